"""One trial: a run for each seed, one after the other, until the last one ends or it is pruned."""

from __future__ import annotations

import dataclasses
import time
from typing import Literal

from rl_training.config import TrainConfig
from rl_training.runs import write_durably
from rl_training.terminal import say
from rl_training.tools.tune.scores import evaluations, interquartile_mean, score
from rl_training.tools.tune.settings import StudySettings
from rl_training.tools.tune.study import ClaimedTrial
from rl_training.tools.zoo.jobs import LOG, Job, check_outputs, job_status
from rl_training.tools.zoo.manifest import Entry
from rl_training.tools.zoo.processes import is_locked
from rl_training.tools.zoo.run import Run, Runs, progress
from rl_training.tools.zoo.view import running_line

CONFIG = "trial.yaml"
"""File in a trial's folder with the settings of its runs."""
_READ_SECONDS = 1.0
_SECONDS_TO_SAVE = 60.0
"""How long the run of a process that died may take to save and end."""
_RETRIES = 2
"""How often a run whose process was lost is resumed."""


@dataclasses.dataclass(frozen=True)
class TrialEnd:
    """How a trial ended."""

    state: Literal["complete", "pruned", "failed", "stopped"]
    value: float | None = None
    reason: str = ""


class TrialRun:
    """The runs of a trial that this process has claimed."""

    def __init__(self, claimed: ClaimedTrial, settings: StudySettings, config: TrainConfig[object]):
        self.claimed = claimed
        self._settings = settings
        self._prunes = claimed.extends is None
        file = claimed.folder / CONFIG
        entry = Entry(
            preset=claimed.folder.name,
            steps=config.total,
            seeds=settings.seeds,
            expected=None,
            source="rl-training tune",
        )
        self._jobs = [
            Job(entry, file, seed, config.total, claimed.folder / f"seed{seed}")
            for seed in settings.seeds
        ]
        check_outputs(self._jobs, claimed.folder.parent)
        write_durably(file, memoryview(config.to_yaml().encode("utf-8")))
        self._scores: list[float] = []
        self._reported = set(claimed.reported)
        self._run: Run | None = None
        self._tries = 0
        self._waiting_since: float | None = None
        self._next_read = 0.0
        self._pruned = self._stopped = False

    @property
    def _job(self) -> Job:
        return self._jobs[len(self._scores)]

    def stop(self, *, hard: bool) -> None:
        """Let the current run save and end; ``hard`` does not wait for that."""
        self._stopped = True
        if self._run is not None:
            self._run.stop(hard=hard)

    def line(self) -> str:
        """Return a line about the current run."""
        if len(self._scores) == len(self._jobs):
            return f"{self.claimed.name}: done"
        return running_line(self._job, *progress(self._job))

    def advance(self, runs: Runs) -> TrialEnd | None:
        """Start, observe or stop runs; return how the trial ended, None if it has not."""
        if self._run is None:
            return self._start(runs)
        if time.monotonic() >= self._next_read:
            self._next_read = time.monotonic() + _READ_SECONDS
            self._report_evaluations()
        end = self._run.poll()
        if end is None:
            return None
        self._run = None
        if self._stopped:
            return TrialEnd("stopped")
        self._report_evaluations()
        if self._pruned:
            return TrialEnd("pruned")
        if end.succeeded and job_status(self._job).status == "finished":
            return self._finish_seed()
        self._tries += 1
        if (end.was_lost or end.succeeded) and self._tries <= _RETRIES:
            reason = "it was stopped" if end.succeeded else end.reason
            say(
                f"{self._job.name}: {reason}; it continues from its last checkpoint (retry"
                f" {self._tries} of {_RETRIES})"
            )
            return None
        return TrialEnd("failed", reason=f"{end.reason} (see {self._job.folder / LOG})")

    def _start(self, runs: Runs) -> TrialEnd | None:
        if self._stopped:
            return TrialEnd("stopped")
        now = job_status(self._job)
        if now.status == "finished":
            self._report_evaluations()
            return TrialEnd("pruned") if self._pruned else self._finish_seed()
        if now.run_dir is not None and is_locked(now.run_dir):  # a dead process left it: it saves
            self._waiting_since = self._waiting_since or time.monotonic()
            if time.monotonic() - self._waiting_since < _SECONDS_TO_SAVE:
                return None
        self._waiting_since = None
        self._run = runs.start(self._job)
        return None

    def _finish_seed(self) -> TrialEnd | None:
        run_dir = job_status(self._job).run_dir
        logged = None if run_dir is None else evaluations(run_dir)
        if logged is None or not len(logged):
            return TrialEnd("failed", reason=f"{self._job.name} was not evaluated")
        self._scores.append(score(logged, self._settings.objective))
        self._tries = 0
        if len(self._scores) < len(self._jobs):
            return None
        return TrialEnd("complete", interquartile_mean(self._scores))

    def _report_evaluations(self) -> None:
        """Report new evaluations of the current seed; decide whether to prune.

        The value after an evaluation is the aggregate over the seeds so far. Steps count planned
        evaluations, so that trials with rollouts of different lengths are compared at the same.
        """
        logs = sorted(self._job.folder.glob("*/metrics.jsonl"))
        if not logs or self._pruned:
            return
        logged = evaluations(logs[-1].parent)
        planned = self._settings.evaluations
        before = len(self._scores) * planned
        for count in range(1, len(logged) + 1):
            part = dataclasses.replace(
                logged,
                steps=logged.steps[:count],
                seconds=logged.seconds[:count],
                values=logged.values[:count],
            )
            at = min(planned, int(part.steps[-1]) * planned // self._job.steps)
            step = before + at
            if at < 1 or step in self._reported:
                continue
            self._reported.add(step)
            value = interquartile_mean([*self._scores, score(part, self._settings.objective)])
            self.claimed.trial.report(value, step)
            last = step == planned * len(self._jobs)
            if self._prunes and not last and self.claimed.trial.should_prune():
                self._pruned = True
                if self._run is not None:
                    self._run.stop(hard=False)
                return
