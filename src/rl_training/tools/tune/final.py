"""The final evaluation: the best settings and the untuned preset, trained on seeds not tuned on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.config import TrainConfig
from rl_training.runs import write_durably
from rl_training.tools.tune.locks import try_lock
from rl_training.tools.tune.scores import Interval, interval
from rl_training.tools.tune.trial import CONFIG
from rl_training.tools.zoo.jobs import Job, check_outputs, job_status
from rl_training.tools.zoo.manifest import Entry
from rl_training.tools.zoo.run import Outcome, Runs, run_jobs
from rl_training.tools.zoo.view import LiveLines, number, running_line

FOLDER = "final"
PRESET = "preset"


@dataclasses.dataclass(frozen=True)
class SeedReturns:
    """Returns of the final policies of one config, by seed."""

    returns: Mapping[int, float]
    steps: int
    """Steps that the runs made: whole rollouts."""

    @property
    def interval(self) -> Interval:
        """The mean and its 95% bootstrap interval over the seeds."""
        return interval(list(self.returns.values()))

    def text(self) -> str:
        """Return the mean and the interval as text."""
        found = self.interval
        return (
            f"{number(found.mean)} mean (95% interval {number(found.low)} to {number(found.high)})"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The best settings beside the untuned preset, on the same seeds."""

    tuned: SeedReturns
    preset: SeedReturns


def compare(
    folder: Path,
    configs: Mapping[str, TrainConfig[Any]],
    seeds: tuple[int, ...],
    runs: Runs,
    lines: LiveLines,
) -> dict[str, SeedReturns] | None:
    """Train each config on the seeds; return the results by name, None if they are not complete.

    Runs that are there already are continued or used. Returns None as well while another process
    has begun the evaluation.
    """
    place = folder / FOLDER
    lock = try_lock(place)
    if lock is None:
        lines.say("another process evaluates the result on fresh seeds")
        return None
    try:
        jobs = [
            job for name, config in configs.items() for job in _jobs(place, name, config, seeds)
        ]
        check_outputs(jobs, folder)
        for job in jobs:
            content = configs[job.entry.preset].to_yaml().encode("utf-8")
            write_durably(job.preset_file, memoryview(content))
        ended, stopped = run_jobs(jobs, runs, _View(lines, len(jobs)))
    finally:
        lock.release()
    if stopped:
        lines.say("stopped; the same command continues the final evaluation")
    for outcome in ended:
        if outcome.error is not None:
            lines.say(f"failed: final evaluation, {outcome.job.name}: {outcome.error}")
    found = {name: returns_of([j for j in jobs if j.entry.preset == name]) for name in configs}
    complete = {name: one for name, one in found.items() if one is not None}
    return complete if len(complete) == len(configs) else None


def _jobs(place: Path, name: str, config: TrainConfig[Any], seeds: tuple[int, ...]) -> list[Job]:
    file = place / name / CONFIG
    entry = Entry(
        preset=name, steps=config.total, seeds=seeds, expected=None, source="rl-training tune"
    )
    return [Job(entry, file, seed, config.total, place / name / f"seed{seed}") for seed in seeds]


def returns_of(jobs: list[Job]) -> SeedReturns | None:
    """Return the results of finished runs; None if one of them has not finished."""
    found = {job.seed: job_status(job) for job in jobs}
    returns = {
        seed: now.latest_return
        for seed, now in found.items()
        if now.status == "finished" and now.latest_return is not None
    }
    if not jobs or len(returns) < len(jobs):
        return None
    return SeedReturns(returns, max(now.step for now in found.values()))


class _View:
    """Shows the runs of the final evaluation."""

    def __init__(self, lines: LiveLines, total: int) -> None:
        self._lines, self._total = lines, total
        self._ended = 0

    def __call__(self, running: list[tuple[Job, int, float | None]], ended: list[Outcome]) -> None:
        for outcome in ended[self._ended :]:
            self._ended += 1
            now = outcome.job_status
            self._lines.say(
                f"final evaluation [{self._ended}/{self._total}] {outcome.job.name}:"
                f" {now.status}, return {number(now.latest_return)}"
            )
        self._lines.update([f"final evaluation, {running_line(*one)}" for one in running])
