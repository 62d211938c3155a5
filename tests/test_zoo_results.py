"""Results that are kept: read strictly, of the presets as they are, told alike everywhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_training.cli import main
from rl_training.config import config_from_mapping, presets_dir
from rl_training.errors import ConfigError
from rl_training.tools.zoo_manifest import Benchmark, Entry, load_benchmark
from rl_training.tools.zoo_results import (
    PresetResult,
    Results,
    SeedResult,
    kept_results,
    read_results,
    write_results,
)

ROOT = Path(__file__).parents[1]
KEPT = ("classic",)


def result(*means: float, expected: float | None = 10.0, **changes: Any) -> PresetResult:
    runs = tuple(
        SeedResult(seed=i, steps=1024, episodes=20, mean=mean, std=1.0, seconds=2.0)
        for i, mean in enumerate(means, start=1)
    )
    values: dict[str, Any] = {
        "preset": "ppo_cartpole",
        "settings": {"algo": "ppo"},
        "steps": 1000,
        "seeds": (1, 2),
        "expected": expected,
        "source": "us",
        "runs": runs,
    }
    return PresetResult(**{**values, **changes})


# -- figures ---------------------------------------------------------------------------------------


def test_verdicts() -> None:
    assert result(9.0, 11.0).verdict(1.0) == "reached"
    assert result(8.0, 9.0).verdict(1.0) == "1.5 below"
    assert result(-200.0, -100.0, expected=-140.0).verdict(1.0) == "10.0 below"
    assert result(9.0, 11.0).verdict(0.5) == "not comparable: 0.5 of the steps"
    assert result(9.0, expected=None).verdict(1.0) == "no figure to compare with"
    assert result().verdict(1.0) == "not run"


def test_summaries_name_every_seed_where_they_differ() -> None:
    assert result(500.0, 500.0).summary() == "500.0, every seed"
    assert result(8.0, 9.0).summary() == "8.5 mean (8.0, 9.0)"
    assert result(8.0, 9.0).is_whole
    assert not result(8.0).is_whole


def test_files_come_back_as_they_were_and_mistakes_are_named(tmp_path: Path) -> None:
    whole = Results(
        format=1, benchmark="classic", scale=1.0, presets=(result(1.5, 2.0),), made_with=()
    )
    path = tmp_path / "results.json"
    write_results(path, whole)
    assert read_results(path) == whole
    content = json.loads(path.read_text())
    for change, words in (
        ({"format": 2}, "'format' must be 1"),
        ({"scal": 1.0}, "scal.*Did you mean 'scale'"),
        ({"presets": [{**content["presets"][0], "mean": 3}]}, r"presets\[0\].mean"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(ConfigError, match=words) as caught:
            read_results(path)
        assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from rl_training.tools import zoo

    whole = Results(format=1, benchmark="x", scale=1.0, presets=(result(1.0),), made_with=())
    monkeypatch.setattr(zoo, "gather", lambda *_: whole)
    (tmp_path / "file").write_text("in the way")
    assert main(["zoo", "report", "classic", "--json", str(tmp_path / "file" / "x.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


# -- what is kept ----------------------------------------------------------------------------------


def kept(name: str) -> tuple[Benchmark, Results]:
    benchmark = load_benchmark(name)
    results = kept_results(benchmark)
    assert results is not None
    return benchmark, results


ENTRIES = [(name, entry) for name in KEPT for entry in load_benchmark(name).entries]


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=lambda one: getattr(one, "preset", one))
def test_results_are_of_the_preset_as_it_is(name: str, entry: Entry) -> None:
    """A preset that is changed must be run anew."""
    benchmark, results = kept(name)
    assert results.scale == 1.0
    own = results.of(entry.preset)
    assert own is not None, "not run"
    assert own.is_whole
    assert (own.steps, own.seeds) == (entry.steps, entry.seeds)
    assert (own.expected, own.source) == (entry.expected, entry.source)
    assert config_from_mapping(own.settings) == benchmark.config(entry)
    for run in own.runs:
        assert run.steps >= entry.steps
        assert run.episodes == 20


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=lambda one: getattr(one, "preset", one))
def test_presets_tell_the_results_that_are_kept(name: str, entry: Entry) -> None:
    benchmark, results = kept(name)
    own = results.of(entry.preset)
    assert own is not None
    content = yaml.safe_load(benchmark.preset_file(entry).read_text())
    preset = yaml.safe_load((presets_dir() / f"{content['preset']}.yaml").read_text())
    assert preset["verified"] == {
        "steps": own.runs[0].steps,
        "seeds": list(own.seeds),
        "return": f"{own.summary()}, final policy, deterministic, 20 episodes a seed",
        "command": f"rl-training zoo run {name} --only {entry.preset}",
    }


@pytest.mark.parametrize("name", KEPT)
def test_kept_results_tell_nothing_of_somebodys_machine(name: str) -> None:
    _, results = kept(name)
    for origin in results.made_with:
        assert set(dataclasses.asdict(origin)) == {"commit", "device", "cpu_cores", "versions"}
        assert origin.device == "cpu"
    assert "/" not in json.dumps([dataclasses.asdict(o) for o in results.made_with])


def test_the_list_shows_what_was_measured(capsys: Any) -> None:
    assert main(["zoo", "list", "classic"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if "ppo_pendulum" in row)
    _, results = kept("classic")
    own = results.of("ppo_pendulum")
    assert own is not None
    assert f"{own.mean:,.1f}" in line
