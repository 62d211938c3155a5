"""Run jobs in several processes, show their progress, and continue when one of them fails."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.terminal import one_line
from rl_training.tools.zoo.jobs import (
    LOG,
    Job,
    JobStatus,
    command,
    job_status,
    latest_row,
    read_tail,
)

_POLL_SECONDS = 0.2
_TAIL = 65_536
_LONGEST_LINE = 500


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    job_status: JobStatus
    error: str | None = None
    """Last line of its output, if it failed."""


@dataclasses.dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path


Show = Callable[[list[tuple[Job, int, float | None]], list[Outcome]], None]
"""Called at intervals with the running jobs (job, step, training return) and all outcomes."""


def run_jobs(
    jobs: Sequence[Job],
    processes: int,
    show: Show,
    trust_modules: Sequence[str] | None = None,
) -> tuple[list[Outcome], bool]:
    """Run the unfinished jobs; return all outcomes, and whether a signal requested a stop.

    SIGINT and SIGTERM are forwarded: every run saves a checkpoint, and the next call resumes it.
    """
    before = {job: job_status(job) for job in jobs}
    ended = [Outcome(job, now) for job, now in before.items() if now.status == "finished"]
    waiting = [job for job in jobs if before[job].status != "finished"]
    running: list[_Running] = []
    threads = None if processes == 1 else max(1, (os.cpu_count() or 1) // processes)
    with _stop_request() as stop:
        asked = 0
        while running or (waiting and not stop.count):
            while waiting and len(running) < processes and not stop.count:
                job = waiting.pop(0)
                running.append(_start(job, command(job, before[job], threads, trust_modules)))
            if stop.count > asked:
                asked = stop.count
                for one in running:
                    _ask_to_stop(one.process, hard=asked > 1)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                ended.append(_outcome(one))
            show([(one.job, *_progress(one.job)) for one in running], ended)
            if running:
                time.sleep(_POLL_SECONDS)
    return ended, stop.count > 0


def _start(job: Job, words: list[str]) -> _Running:
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / LOG
    with log.open("ab") as file:
        # A new session, so that Ctrl-C reaches the run only through this process, once. preexec_fn
        # is safe because this process has no other threads.
        process = subprocess.Popen(  # noqa: S603 - our own command
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
    return _Running(job, process, log)


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM, at which a run saves, when the parent process ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _ask_to_stop(process: subprocess.Popen[bytes], *, hard: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hard:
            process.kill()
        else:
            process.terminate()


def _outcome(one: _Running) -> Outcome:
    try:
        now = job_status(one.job)
    except UserError as error:  # the other runs continue
        return Outcome(one.job, JobStatus("missing"), str(error))
    if one.process.returncode == 0:
        return Outcome(one.job, now)
    words = read_tail(one.log, _TAIL).decode("utf-8", "replace").strip().splitlines()
    last = words[-1] if words else f"exit code {one.process.returncode}"
    return Outcome(one.job, now, f"{one_line(last[:_LONGEST_LINE])} (see {one.log})")


def _progress(job: Job) -> tuple[int, float | None]:
    runs = sorted(job.folder.glob("*/metrics.jsonl"))
    return latest_row(runs[-1].parent) if runs else (0, None)


class _Stop:
    count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


@contextlib.contextmanager
def _stop_request() -> Iterator[_Stop]:
    """Count SIGINT and SIGTERM instead of ending the process."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
