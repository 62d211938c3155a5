"""Runs as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_training.errors import UserError
from rl_training.runs import RunLock
from rl_training.terminal import one_line
from rl_training.tools.zoo.jobs import LOG, Job, command, job_status, read_tail
from rl_training.tools.zoo.run import Ended

_TAIL = 65_536
_LONGEST_LINE = 500


def start_process(
    job: Job,
    torch_threads: int | None,
    trust_modules: Sequence[str] | None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a job, or resume its run, in a process that writes to the job's log."""
    words = command(job, job_status(job), torch_threads, trust_modules)
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / LOG).open("ab") as file:
        # A new session, so that Ctrl-C reaches the run only through this process, once.
        return subprocess.Popen(  # noqa: S603 - our own command
            words,
            stdin=subprocess.PIPE,  # see tools/zoo/child.py
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )


def is_locked(run_dir: Path) -> bool:
    """Return whether a process is training in a run folder."""
    try:
        RunLock(run_dir).release()
    except UserError:
        return True
    return False


def last_words(job: Job) -> str:
    """Return the last line that a job's run printed."""
    lines = read_tail(job.folder / LOG, _TAIL).decode("utf-8", "replace").strip().splitlines()
    return one_line(lines[-1][:_LONGEST_LINE]) if lines else ""


class LocalRuns:
    """Runs each job in a process of this machine."""

    retries = 0

    def __init__(self, processes: int, trust_modules: Sequence[str] | None = None) -> None:
        self.at_once = processes
        self._threads = None if processes == 1 else max(1, (os.cpu_count() or 1) // processes)
        self._trust_modules = trust_modules

    def start(self, job: Job) -> LocalRun:
        """Start a job, or resume its run."""
        return LocalRun(job, start_process(job, self._threads, self._trust_modules))

    def close(self) -> None:
        """Release nothing."""


class LocalRun:
    """A job in a process of this machine."""

    def __init__(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        self.job = job
        self._process = process

    def poll(self) -> Ended | None:
        """Return how the process ended; None: it has not."""
        code = self._process.poll()
        if code is None:
            return None
        reason = last_words(self.job) or f"exit code {code}"
        if code < 0:
            reason = f"its process was killed by signal {-code}"
        return Ended(code == 0, reason, was_lost=code < 0)

    def stop(self, *, hard: bool) -> None:
        """Request a checkpoint and the end, or end the process at once."""
        with contextlib.suppress(ProcessLookupError):
            if hard:
                self._process.kill()
            else:
                self._process.terminate()
