"""A short slice of ``make test-faults``: kills and damaged files, with fixed seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_fuzz import Base, fuzz_one
from fault_kills import differences_after_kills
from fault_workers import quietly, run_tasks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("fuzz"))


def test_damaged_and_hostile_files_are_refused_in_words(base: Base, tmp_path: Path) -> None:
    """Nothing they name runs, nothing hangs, nothing but our own errors comes of them."""

    def task(index: int) -> tuple[str, str]:
        return quietly(lambda: fuzz_one(base, index, tmp_path / "scratch"))  # type: ignore[no-any-return]

    outcomes = list(run_tasks(task, 250, processes=1, limit=20.0))
    found = [one for one in outcomes if one.result not in ("accepted", "refused")]
    assert not found, found[0]
    assert sum(one.result == "refused" for one in outcomes) > 100
    assert sum(one.result == "accepted" for one in outcomes) > 50
    assert not base.was_executed


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_killed_at_file_operations_and_at_random_a_run_ends_the_same(
    algo: str, tmp_path: Path
) -> None:
    # Not with worker processes: other tests have started multiprocessing's server in this process.
    kills, left_behind, differs = differences_after_kills(algo, tmp_path, 3, 6)
    assert (left_behind, differs) == (0, [])
    assert kills >= 1  # the rest may come after the end of a quick run
