"""The arithmetic of `benchmarks/offline.py`: scores, intervals and bars."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_SCRIPT = Path(__file__).parent.parent / "benchmarks" / "offline.py"


@pytest.fixture(scope="module")
def offline() -> Any:
    spec = importlib.util.spec_from_file_location("offline_benchmark", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_difference_has_the_interval_of_welch(offline: Any) -> None:
    # Variances of the means: 1/3 and 4/3; degrees (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.94.
    found = offline.difference([1.0, 2.0, 3.0], [0.0, 2.0, 4.0])
    assert found.mean == 0
    assert found.half == pytest.approx(4.303 * math.sqrt(5 / 3))
    # Equal variances of five and five seeds: 8 degrees.
    five = [1.0, 2.0, 3.0, 4.0, 5.0]
    shifted = offline.difference([x - 10 for x in five], five)
    assert shifted.mean == pytest.approx(-10)
    assert shifted.half == pytest.approx(2.306 * math.sqrt(2 * 2.5 / 5))
    assert not shifted.holds
    assert offline.difference([x - 2 for x in five], five).holds


def test_one_seed_has_no_interval_and_reaches_no_bar(offline: Any) -> None:
    found = offline.difference([9.0], [1.0])
    assert math.isnan(found.half)
    assert not found.holds
    assert "one seed" in offline.in_words(found)


def content(
    offline: Any, ours: float, peer: float, *, updates: int = 100, seeds: int = 3
) -> dict[str, Any]:
    """Results of every algorithm, with the same returns: from -100 by chance to 100 by experts."""
    facts = {"env_id": "Env-v0", "random_return": -100.0}
    cells = [
        {
            "dataset": "env/medium-v0",
            "algo": algo,
            "side": side,
            "seed": seed,
            "updates": updates,
            "returns": [mean - seed, mean + seed, mean + 2 * seed],
        }
        for algo in offline.COMPARED
        for side, mean in (("ours", ours), ("peer", peer))
        for seed in range(1, seeds + 1)
    ]
    datasets = {"env/medium-v0": {**facts, "mean_return": 100.0}}
    return {"datasets": datasets, "cells": cells}


def test_scores_are_percent_of_the_way_to_the_expert(offline: Any) -> None:
    scores = offline.Scores([content(offline, 100.0, 50.0)], {"Env-v0": 100.0})
    means = [(200 + 2 * seed / 3) / 2 for seed in (1, 2, 3)]
    assert scores.of("env/medium-v0", "iql", "ours") == pytest.approx(means)
    assert scores.differences("iql")["env/medium-v0"].mean == pytest.approx(25)


def test_the_expert_is_the_dataset_of_that_name(offline: Any) -> None:
    given = content(offline, 100.0, 50.0)
    medium = given["datasets"]["env/medium-v0"]
    given["datasets"]["env/expert-v0"] = {**medium, "mean_return": 400.0}
    assert offline.Scores([given], {}).scale_of("env/medium-v0") == (-100.0, 400.0)
    with pytest.raises(SystemExit, match="--expert-return Env-v0=RETURN"):
        offline.Scores([content(offline, 100.0, 50.0)], {})


@pytest.mark.parametrize(("ours", "reached"), [(100.0, True), (99.0, True), (95.0, False)])
def test_bars(offline: Any, capsys: pytest.CaptureFixture[str], ours: float, reached: bool) -> None:
    scores = offline.Scores([content(offline, ours, 100.0)], {"Env-v0": 100.0})
    assert offline.print_report(scores) is reached
    printed = capsys.readouterr().out
    assert ("MISSED" in printed) is not reached


def test_a_bar_is_not_reached_where_runs_are_missing(
    offline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = content(offline, 100.0, 100.0)
    given["cells"] = [cell for cell in given["cells"] if cell["algo"] != "cql"]
    assert not offline.print_report(offline.Scores([given], {"Env-v0": 100.0}))
    assert "| CQL | no runs of env/medium-v0 | unknown |" in capsys.readouterr().out


def test_runs_of_different_lengths_are_refused(offline: Any) -> None:
    both = [content(offline, 1.0, 1.0), content(offline, 1.0, 1.0, updates=200)]
    with pytest.raises(SystemExit, match="different numbers of updates"):
        offline.Scores(both, {"Env-v0": 100.0})


def test_a_peer_policy_that_differs_from_its_own_actions_is_refused(
    offline: Any, tmp_path: Path
) -> None:
    arrays: dict[str, Any] = {
        "layers": 2,
        "weight0": np.array([[2.0], [-1.0]], np.float32),
        "bias0": np.array([0.0, 0.5], np.float32),
        "weight1": np.array([[1.0, 1.0]], np.float32),
        "bias1": np.array([-0.25], np.float32),
        "shift": np.array([1.0]),
        "scale": np.array([0.5]),
        "obs": np.array([[2.0], [-1.0]], np.float32),
    }
    # x = 0.5 and -1; hidden (1, 0) and (0, 1.5); outputs 0.75 and 1.25.
    right = np.tanh([[0.75], [1.25]])
    file = tmp_path / "policy.npz"
    np.savez(file, **arrays, actions=right)
    policy = offline.PeerPolicy(file, [-2.0], [4.0])
    assert policy(arrays["obs"]) == pytest.approx(1 + 3 * right, abs=1e-6)
    np.savez(file, **arrays, actions=right + 2e-5)
    with pytest.raises(RuntimeError, match="differ from those of d3rlpy"):
        offline.PeerPolicy(file, [-2.0], [4.0])
