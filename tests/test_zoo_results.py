"""Results that are kept: read strictly, of the presets as they are, told alike everywhere."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import NOT_MEASURED, ONLINE
from rl_training.cli import main
from rl_training.config import presets_dir
from rl_training.errors import ConfigError
from rl_training.tools.zoo.jobs import plan
from rl_training.tools.zoo.manifest import Benchmark, Entry, benchmark_names, load_benchmark
from rl_training.tools.zoo.results import (
    PresetResult,
    Results,
    SeedResult,
    differing_settings,
    gather,
    kept_results,
    read_results,
    result_settings,
    write_results,
)

ROOT = Path(__file__).parents[1]
KEPT = [name for name in benchmark_names() if kept_results(load_benchmark(name)) is not None]


def result(
    *means: float, expected: float | None = 10.0, made_with: int | None = None, **changes: Any
) -> PresetResult:
    figures: dict[str, Any] = {"steps": 1024, "episodes": 20, "std": 1.0, "seconds": 2.0}
    runs = tuple(
        SeedResult(seed=i, mean=mean, made_with=made_with, **figures)
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
    assert result(9.0).verdict(1.0) == "1.0 below (1 of 2 seeds)"
    assert result(8.0, 9.0).verdict(1.0) == "1.5 below"
    assert result(-200.0, -100.0, expected=-140.0).verdict(1.0) == "10.0 below"
    assert result(9.0, 11.0).verdict(0.5) == "not comparable: 0.5 of the steps"
    assert result(9.0, expected=None).verdict(1.0) == "no expected return"
    assert result().verdict(1.0) == "not run"


def test_summaries_name_every_seed_where_they_differ() -> None:
    assert result(500.0, 500.0).summary() == "500.0, every seed"
    assert result(8.0, 9.0).summary() == "8.5 mean (8.0, 9.0)"
    assert result(8.0, 9.0).is_whole
    assert not result(8.0).is_whole
    assert result(8.0).summary().startswith("1 of 2 seeds: 8.0")


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
    from rl_training.tools.zoo import command as zoo

    whole = Results(format=1, benchmark="x", scale=1.0, presets=(result(1.0),), made_with=())
    monkeypatch.setattr(zoo, "gather", lambda *_: whole)
    (tmp_path / "file").write_text("in the way")
    assert main(["zoo", "report", "classic", "--output", str(tmp_path / "file" / "x.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"benchmark": "other"}, "benchmark' must be small"),
        ({"scale": 0.5}, "scale' must be 1"),
        (
            {"presets": [dataclasses.asdict(result())]},
            r"ppo_cartpole' must be of seeds among \[1, 2\]; got \[\]",
        ),
        ({"presets": [dataclasses.asdict(result(1.0, 2.0, 3.0))]}, r"among \[1, 2\]"),
        ({"presets": [dataclasses.asdict(result(1.0, made_with=0))]}, "made_with"),
    ],
)
def test_only_runs_to_their_end_are_kept(tmp_path: Path, change: Any, words: str) -> None:
    benchmark = Benchmark(tmp_path / "small" / "benchmark.yaml", "Small", ())
    assert kept_results(benchmark) is None
    whole = Results(
        format=1, benchmark="small", scale=1.0, presets=(result(1.0, 2.0),), made_with=()
    )
    path = benchmark.path.parent / "results.json"
    write_results(path, whole)
    assert kept_results(benchmark) == whole
    partial = dataclasses.replace(whole, presets=(result(1.0),))
    write_results(path, partial)
    assert kept_results(benchmark) == partial
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=words):
        kept_results(benchmark)


def test_damaged_runs_cost_no_table(tmp_path: Path) -> None:
    benchmark = load_benchmark("classic")
    jobs = plan(benchmark, tmp_path, only=("ppo_cartpole",), seeds=1)
    run = jobs[0].folder / "run"
    run.mkdir(parents=True)
    config = benchmark.config(jobs[0].entry)
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "metadata.json").write_text("{")
    metrics = {"rollout/return_mean": 7.0}
    summary = {"status": "finished", "global_step": 100_352, "metrics": metrics}
    (run / "summary.json").write_text(json.dumps(summary))
    results = gather(benchmark, jobs, 1.0)
    own = results.of("ppo_cartpole")
    assert own is not None
    (seed,) = own.runs
    assert (seed.mean, seed.std, seed.seconds, seed.episodes) == (7.0, None, None, 0)
    assert results.made_with[0].commit is None


# -- what is kept ----------------------------------------------------------------------------------


def kept(name: str) -> tuple[Benchmark, Results]:
    benchmark = load_benchmark(name)
    results = kept_results(benchmark)
    assert results is not None
    return benchmark, results


def test_every_algorithm_has_results_on_classic_control_and_box2d() -> None:
    for name in ("classic", "box2d"):
        benchmark, results = kept(name)
        algos = {benchmark.config(entry).algo for entry in benchmark.entries}
        assert algos == set(ONLINE) - NOT_MEASURED[name]
        assert all(results.of(entry.preset) for entry in benchmark.entries)


ENTRIES = [
    (name, entry)
    for name in KEPT
    for entry in load_benchmark(name).entries
    if kept(name)[1].of(entry.preset) is not None
]


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=lambda one: getattr(one, "preset", one))
def test_results_are_of_the_preset_as_it_is(name: str, entry: Entry) -> None:
    """A preset that is changed must be run anew."""
    benchmark, results = kept(name)
    own = results.of(entry.preset)
    assert own is not None, "not run"
    assert (own.steps, own.seeds) == (entry.steps, entry.seeds)
    assert (own.expected, own.source) == (entry.expected, entry.source)
    # Of the preset and of every default; a setting that is new since then has kept things as is.
    now = result_settings(benchmark.config(entry))
    knobs = {key: now["algo_kwargs"][key] for key in own.settings["algo_kwargs"]}
    assert {
        **{key: now[key] for key in own.settings},
        "algo_kwargs": knobs,
        "eval_interval": own.settings["eval_interval"],  # the final policy does not depend on it
    } == own.settings
    assert differing_settings(own.settings, now) == []
    for run in own.runs:
        assert run.steps >= entry.steps
        assert run.episodes == 20
        named = (run.device, run.acceleration, run.command, results.origin_of(run))
        placed = run.placement not in ((None, None), ("auto", "eager"))
        assert None not in named or not placed, "a run on another device says what made it"


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=lambda one: getattr(one, "preset", one))
def test_presets_tell_the_results_that_are_kept(name: str, entry: Entry) -> None:
    benchmark, results = kept(name)
    own = results.of(entry.preset)
    assert own is not None
    content = yaml.safe_load(benchmark.preset_file(entry).read_text())
    if set(content) - {"format"} != {"preset"}:
        pytest.skip("a preset of the zoo's own")
    preset = yaml.safe_load((presets_dir() / f"{content['preset']}.yaml").read_text())
    assert ("verified" in preset, "partial" in preset) == (own.is_whole, not own.is_whole)
    assert preset["verified" if own.is_whole else "partial"] == {
        "steps": own.runs[0].steps,
        "seeds": [run.seed for run in own.runs],
        "return": f"{own.summary()}, final policy, deterministic, 20 episodes a seed",
        "command": own.command(name),
    }


@pytest.mark.parametrize("name", KEPT)
def test_kept_results_tell_nothing_of_somebodys_machine(name: str) -> None:
    benchmark, results = kept(name)
    assert all(re.fullmatch(r"cpu|cuda(:\d+)?", str(one.device)) for one in results.made_with)
    text = (benchmark.path.parent / "results.json").read_text()
    assert not re.search(r'"(~|\.*/|[A-Z]:)', text), "a path"
    assert "hardware" not in text


def test_the_list_shows_what_was_measured(capsys: Any) -> None:
    assert main(["zoo", "list", "classic"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if " ppo/pendulum " in row)
    _, results = kept("classic")
    own = results.of("ppo_pendulum")
    assert own is not None
    assert f"{own.mean:,.1f}" in line
