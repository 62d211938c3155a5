"""Forked workers that run one task after the other, and a parent that ends those that hang."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one task."""

    index: int
    result: str
    """What the task returned; 'hang' where it took too long, 'died' where its process ended."""
    detail: str
    seconds: float
    peak_mib: float
    """Largest resident memory of its process so far."""


Task = Callable[[int], tuple[str, str]]


def run_tasks(task: Task, count: int, processes: int, limit: float) -> Iterator[Outcome]:
    """Run ``task(0..count-1)`` in forked processes; one that takes over ``limit`` s is killed."""
    workers = [_Worker(task, list(range(count))[i::processes]) for i in range(processes)]
    while any(worker.is_busy for worker in workers):
        busy = [worker for worker in workers if worker.is_busy]
        ready, _, _ = select.select([worker.pipe for worker in busy], [], [], 0.5)
        for worker in busy:
            if worker.pipe in ready:
                yield from worker.read()
            elif time.monotonic() - worker.since > limit:
                yield worker.give_up("hang", limit)


class _Worker:
    def __init__(self, task: Task, indices: list[int]) -> None:
        self._task = task
        self._left = indices
        self._buffer = b""
        self._start()

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def _start(self) -> None:
        self.since = time.monotonic()
        if not self._left:
            return
        self.pipe, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write)
            return
        os.close(self.pipe)
        os.setsid()
        try:
            for index in self._left:
                _report(write, _run_one(self._task, index))
        finally:
            os._exit(0)

    def read(self) -> Iterator[Outcome]:
        chunk = os.read(self.pipe, 1 << 16)
        if not chunk:
            yield self.give_up("died", time.monotonic() - self.since)
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self.since = time.monotonic()
            outcome = Outcome(**json.loads(line))
            self._left.remove(outcome.index)
            yield outcome
        if not self._left:
            self._end()

    def give_up(self, how: str, seconds: float) -> Outcome:
        """The task under way is lost; another process continues with the next one."""
        self._end()
        index = self._left.pop(0)
        self._buffer = b""
        self._start()
        return Outcome(index, how, "", seconds, 0.0)

    def _end(self) -> None:
        os.close(self.pipe)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _run_one(task: Task, index: int) -> Outcome:
    started = time.monotonic()
    try:
        result, detail = task(index)
    except BaseException:
        result, detail = "harness error", traceback.format_exc()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Outcome(index, result, detail, time.monotonic() - started, peak)


def _report(pipe: int, outcome: Outcome) -> None:
    view = memoryview(json.dumps(dataclasses.asdict(outcome)).encode() + b"\n")
    while view:
        view = view[os.write(pipe, view) :]


def processes_of_session(session: int) -> list[int]:
    """Living processes (zombies aside) of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def quietly(function: Callable[[], Any]) -> Any:
    """Call with standard output and error turned to nothing, for the whole process."""
    with Path(os.devnull).open("w") as nowhere:
        saved = os.dup(1), os.dup(2)
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        try:
            return function()
        finally:
            for number, kept in zip((1, 2), saved, strict=True):
                os.dup2(kept, number)
                os.close(kept)
