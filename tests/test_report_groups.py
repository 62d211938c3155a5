"""Which runs a report takes for one config on several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_training.tools.report.data import StoredRun
from rl_training.tools.report.groups import make_groups


def run(seed: int, **settings: Any) -> StoredRun:
    """A finished run."""
    config = {"algo": "dqn", "env_id": "CartPole-v1", "seed": seed, **settings}
    return StoredRun(Path(f"run{seed}"), config, {}, "finished", "", 1, 1, 1.0, {}, frozenset())


def sizes(*runs: StoredRun) -> list[int]:
    return sorted(len(group.runs) for group in make_groups(runs))


def test_a_setting_that_came_with_a_version_tells_no_runs_apart() -> None:
    before = [run(seed, **{"algo_kwargs.interval": 500}) for seed in (1, 2)]
    after = [run(seed, **{"algo_kwargs.interval_steps": 500, "shards": 1}) for seed in (3, 4)]
    assert sizes(*before, *after) == [4]


def test_a_new_setting_with_several_values_does() -> None:
    before = [run(1)]
    after = [run(2, shards=1), run(3, shards=2)]
    assert sizes(*before, *after) == [1, 1, 1]
    assert sizes(run(1, rate=1), run(2, rate=2), run(3, rate=1)) == [1, 2]


def test_keys_of_the_users_own_always_do() -> None:
    assert sizes(run(1), run(2, **{"env_kwargs.gravity": -5.0})) == [1, 1]
    assert sizes(run(1, env_kwargs={}), run(2, **{"env_kwargs.gravity": -5.0})) == [1, 1]
