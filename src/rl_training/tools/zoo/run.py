"""Run jobs side by side, show their progress, and continue when one of them fails."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from rl_training.errors import UserError
from rl_training.terminal import say
from rl_training.tools.zoo.jobs import LOG, Job, JobStatus, job_status, latest_row

_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    job_status: JobStatus
    error: str | None = None
    """Last line of its output, if it failed."""


class Ended(NamedTuple):
    """How the process of a job ended."""

    succeeded: bool
    reason: str
    """Why it failed; of no meaning if it succeeded."""
    was_lost: bool = False
    """It was killed, or its machine was lost: the job may be tried again."""


class Run(Protocol):
    """A job that was started."""

    job: Job

    def poll(self) -> Ended | None:
        """Return how it ended; None: it has not."""
        ...

    def stop(self, *, hard: bool) -> None:
        """Request a checkpoint and the end, or end it at once."""
        ...


class Runs(Protocol):
    """Where jobs are run."""

    at_once: int
    """Most jobs at the same time."""
    retries: int
    """How often a job whose run was lost is resumed."""

    def start(self, job: Job) -> Run:
        """Start a job, or resume its run."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


Show = Callable[[list[tuple[Job, int, float | None]], list[Outcome]], None]
"""Called at intervals with the running jobs (job, step, training return) and all outcomes."""


def run_jobs(jobs: Sequence[Job], runs: Runs, show: Show) -> tuple[list[Outcome], bool]:
    """Run the unfinished jobs; return all outcomes, and whether a signal requested a stop.

    SIGINT and SIGTERM are forwarded: every run saves a checkpoint, and the next call resumes it.
    """
    before = {job: job_status(job) for job in jobs}
    ended = [Outcome(job, now) for job, now in before.items() if now.status == "finished"]
    waiting = [job for job in jobs if before[job].status != "finished"]
    running: list[Run] = []
    tries: Counter[Job] = Counter()
    with stop_request() as stop:
        asked = 0
        while running or (waiting and not stop.count):
            while waiting and len(running) < runs.at_once and not stop.count:
                running.append(runs.start(waiting.pop(0)))
            if stop.count > asked:
                asked = stop.count
                for one in running:
                    one.stop(hard=asked > 1)
            for one in list(running):
                if (end := one.poll()) is None:
                    continue
                running.remove(one)
                tries[one.job] += 1
                if end.was_lost and not stop.count and tries[one.job] <= runs.retries:
                    say(
                        f"{one.job.name}: {end.reason}; it continues from its last checkpoint"
                        f" (retry {tries[one.job]} of {runs.retries})"
                    )
                    waiting.insert(0, one.job)
                else:
                    ended.append(_outcome(one.job, end))
            show([(one.job, *progress(one.job)) for one in running], ended)
            if running:
                time.sleep(_POLL_SECONDS)
    return ended, stop.count > 0


def _outcome(job: Job, end: Ended) -> Outcome:
    try:
        now = job_status(job)
    except UserError as error:  # the other runs continue
        return Outcome(job, JobStatus("missing"), str(error))
    if end.succeeded:
        return Outcome(job, now)
    return Outcome(job, now, f"{end.reason} (see {job.folder / LOG})")


def progress(job: Job) -> tuple[int, float | None]:
    """Return the last step and the last training return of a job's newest run."""
    runs = sorted(job.folder.glob("*/metrics.jsonl"))
    return latest_row(runs[-1].parent) if runs else (0, None)


class StopCount:
    """Number of requests to stop."""

    count = 0

    def __call__(self, *_: Any) -> None:
        """Count a signal."""
        self.count += 1


@contextlib.contextmanager
def stop_request() -> Iterator[StopCount]:
    """Count SIGINT and SIGTERM instead of ending the process."""
    stop = StopCount()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
