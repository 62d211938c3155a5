"""The comparison of two commits: equal trees are equal, and the smallest change is reported."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_training.checkpointing import load_checkpoint

SCRIPTS = Path(__file__).parents[1] / "scripts"


def _load() -> ModuleType:
    # Not on the path for longer than this: some scripts are called as tests are.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module("golden_digests")


golden = _load()
QUICK = ["ppo_truncating", "dqn_native"]


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A case's result and its run folder."""
    folder = tmp_path_factory.mktemp("ppo")
    result = golden.run_case(golden.CASES["ppo_truncating"], folder)
    [run_dir] = (folder / "runs").iterdir()
    return result, run_dir


def _reported(old: Any, new: Any, algo: str = "ppo") -> list[tuple[str, str]]:
    return [(found.group, found.name) for found in golden.compare(algo, old, new)]


def test_the_working_tree_equals_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main([".", ".", "--cases", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "2 cases, 0 differ, 0 failed runs" in printed
    assert " 0 learnt" not in printed
    assert " 0 metrics" not in printed


def test_a_difference_is_printed_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = golden.Result({"step 0: algorithm.model.w": "1", "step 0: training.x": "2"})
    new = golden.Result({"step 0: algorithm.model.w": "1", "step 0: training.x": "3"})
    monkeypatch.setattr(golden, "run_both", lambda *_: iter([("ppo_masked", old, new, "")]))
    assert golden.main(["a", "b", "--cases", "ppo_masked"]) == 1
    printed = capsys.readouterr().out
    assert "step 0: training.x: 2 != 3" in printed
    assert "1 learnt (0 differ)" in printed
    assert "1 state (1 differ)" in printed


def test_two_runs_are_equal_and_another_seed_is_not(ppo: tuple[Any, Path], tmp_path: Path) -> None:
    result, _ = ppo
    case = golden.CASES["ppo_truncating"]
    assert _reported(result, golden.run_case(case, tmp_path / "again")) == []
    other = dataclasses.replace(case, settings={**case.settings, "seed": 4})
    reported = _reported(result, golden.run_case(other, tmp_path / "other"))
    assert {group for group, _ in reported} == set(golden.GROUPS)


@pytest.mark.parametrize(
    ("path", "group"),
    [
        (("algorithm", "model", "actor.layers.0.weight"), "learnt"),
        (("algorithm", "optimizer", "exp_avg"), "optimizer"),
        (("training", "rng", "torch"), "state"),
    ],
)
def test_one_changed_bit_is_reported(
    ppo: tuple[Any, Path], path: tuple[str, ...], group: str
) -> None:
    state = load_checkpoint(ppo[1] / "checkpoints" / "last.pt")
    changed = copy.deepcopy(state)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    bits = holder[path[-1]].view(torch.uint8).reshape(-1)
    bits[0] ^= 1
    before, after = (golden.Result(golden.digest_state("ppo", s)[0]) for s in (state, changed))
    [reported] = _reported(before, after)
    assert reported[0] == group
    assert path[-1] in reported[1]


def test_changed_metrics_are_reported(ppo: tuple[Any, Path]) -> None:
    result, _ = ppo

    def scaled(name: str, factor: float) -> Any:
        row = {**result.metrics["row 1"], name: result.metrics["row 1"][name] * factor}
        return dataclasses.replace(result, metrics={**result.metrics, "row 1": row})

    for name in ("losses/value_loss", "rollout/length_mean"):
        expected = [("metrics", f"row 1: {name}")]
        assert _reported(result, scaled(name, 1 + 1e-5)) == expected
        # A sum in another order is allowed, of losses and on-policy alone.
        slightly = scaled(name, 1 + 1e-7)
        assert _reported(result, slightly) == ([] if name.startswith("losses") else expected)
        assert _reported(result, slightly, algo="dqn") == expected


def test_missing_and_new_names_are_reported(
    ppo: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = ppo
    name = "step 0: training.counters.iteration"
    fewer = dataclasses.replace(
        result, digests={k: v for k, v in result.digests.items() if k != name}
    )
    assert _reported(result, fewer) == [("state", name)]
    assert _reported(fewer, result) == [("state", name)]
    monkeypatch.setattr(golden, "ALLOWED_NEW", ("training.counters.iter*",))
    assert [found.allowed for found in golden.compare("ppo", fewer, result)] == [True]
    assert [found.allowed for found in golden.compare("ppo", result, fewer)] == [False]
    rows = dict(list(result.metrics.items())[:-1])
    shorter = dataclasses.replace(result, metrics=rows)
    assert _reported(result, shorter) == [("metrics", list(result.metrics)[-1])]
    failed = golden.Result(error="it broke")
    assert _reported(result, failed) == [("error", "NEW")]


def test_names_of_old_and_new_checkpoints_are_the_same() -> None:
    tensor = torch.ones(2)
    env = {"env": {"seed": 3}, "obs": tensor}
    old = {
        "algorithm": {"model": {"encoder.0.weight": tensor}},
        "training": {"actor": {"rng": tensor}, "collector": env, "counters": {"log_offset": 5}},
    }
    new = {
        "algorithm": {"model": {"trunk.0.weight": tensor}},
        "training": {"source": {"actor": {"rng": tensor}, **env}, "counters": {"log_offset": 6}},
    }
    digests = [golden.digest_state("drqn", state)[0] for state in (old, new)]
    assert digests[0] == digests[1]
    assert "training.source.env.seed" in digests[0]
    with pytest.raises(ValueError, match=r"two values are called training\.source\.env\.seed"):
        golden.digest_state("ppo", {**old, "training": {"collector": env, "source": env}})


def test_a_tree_that_cannot_be_imported_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(commit: str, folder: Path) -> Path:
        (folder / "src" / "rl_training").mkdir(parents=True)
        (folder / "src" / "rl_training" / "__init__.py").write_text("raise ImportError('half')")
        return folder

    monkeypatch.setattr(golden, "make_tree", broken)
    with pytest.raises(SystemExit, match=r"(?s)a cannot be imported.*half"):
        golden.main(["a", "b", "--cases", "ppo_masked"])


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        golden.main([".", ".", "--cases", "ppo_nothing"])
    assert "no case ppo_nothing" in capsys.readouterr().err
