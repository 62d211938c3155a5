"""Reading the ``metrics.jsonl`` of a run that is still writing it: every line is read once."""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path
from typing import BinaryIO

from rl_training.terminal import one_line
from rl_training.tools.report.limits import DamagedError
from rl_training.tools.report.log import (
    MAX_LINE,
    MAX_LOG_BYTES,
    MAX_METRICS,
    MAX_ROWS,
    Clock,
    is_drawable,
    out_of_order,
    parsed_row,
)
from rl_training.untrusted_files import open_regular

MAX_POINTS = 600
"""Most values of a curve besides the newest; an even number, so that halving keeps the last."""
_PIECE = 1 << 18
_TAIL = 256
"""Bytes before the place that was read to by which a log is recognised."""


class LiveCurve:
    """The values of one metric so far: with many, every n-th of them, and the newest."""

    def __init__(self) -> None:
        self._columns = (array("d"), array("d"), array("d"))
        self._newest = (0.0, 0.0, 0.0)
        self._stride = 1
        self._count = 0

    def add(self, step: int, seconds: float, value: float) -> None:
        """Append a value; where there are too many, every second one is dropped."""
        self._newest = (step, seconds, value)
        if self._count % self._stride == 0:
            for column, number in zip(self._columns, self._newest, strict=True):
                column.append(number)
            if len(self._columns[0]) > MAX_POINTS:
                for column in self._columns:
                    del column[1::2]
                self._stride *= 2
        self._count += 1

    def points(self) -> tuple[list[float], list[float], list[float]]:
        """Return steps, seconds and values."""
        columns = [column.tolist() for column in self._columns]
        if (self._count - 1) % self._stride:
            for column, number in zip(columns, self._newest, strict=True):
                column.append(number)
        steps, seconds, values = columns
        return steps, seconds, values


class LogFollower:
    """Reads what was added to a log since the last time.

    A log that was replaced or cut back, as by a resume, is read again from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.revision = time.time_ns() // 1_000_000
        """Grows whenever something was read; larger than in an earlier process."""
        self._stamp: tuple[int, int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self.curves: dict[str, LiveCurve] = {}
        self.last: dict[str, tuple[float, int]] = {}
        """The last value of every metric and its step, also where it is not finite."""
        self.last_step = 0
        self.damage = ""
        """What is wrong with the log; it is then read no further."""
        self.modified = 0.0
        """When the file was last written, in seconds since the epoch."""
        self._clock = Clock()
        self._number = 0
        self._offset = 0
        self._tail = b""
        self._inode = -1

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._clock.seconds

    def read_more(self, deadline: float) -> bool:
        """Read until ``deadline`` (of `time.monotonic`); return whether all of the log is read.

        Raises DamagedError where the log is missing or damaged.
        """
        try:
            with open_regular(self._path, MAX_LOG_BYTES) as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                if stamp != self._stamp:
                    if not self._continues(file, status):
                        self._begin()
                        self.revision += 1
                    self._inode, self.modified = status.st_ino, status.st_mtime
                    self._stamp = stamp if self._read(file, deadline) else None
        except FileNotFoundError:
            raise DamagedError(f"{self._path.name} is missing") from None
        except OSError as error:
            reason = error.strerror or error
            raise DamagedError(f"{self._path.name} cannot be read: {reason}") from None
        if self.damage:
            raise DamagedError(self.damage)
        return self._stamp is not None

    def _continues(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Return whether a file still begins with what was read of it."""
        if status.st_ino != self._inode or status.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _read(self, file: BinaryIO, deadline: float) -> bool:
        """Read whole lines; return whether the end was reached."""
        file.seek(self._offset)
        rest = b""
        while not self.damage:
            piece = file.read(_PIECE)
            if not piece:
                return True
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            try:
                self._add_lines(whole + newline)
                self._check_length(rest)
            except DamagedError as damage:
                self.damage = str(damage)
                self._count_as_read(rest)
            if time.monotonic() > deadline:
                return False
        return True

    def _check_length(self, unfinished: bytes) -> None:
        if len(unfinished) > MAX_LINE:
            raise DamagedError(f"{self._path.name}: a line of more than {MAX_LINE:,} bytes")

    def _count_as_read(self, content: bytes) -> None:
        self._offset += len(content)
        self._tail = (self._tail + content)[-_TAIL:]

    def _add_lines(self, content: bytes) -> None:
        if not content:
            return
        self.revision += 1
        self._count_as_read(content)
        file = self._path.name
        for line in content[:-1].split(b"\n"):
            self._number += 1
            self._check_length(line)
            if self._number > MAX_ROWS:
                raise DamagedError(f"{file}: more than {MAX_ROWS:,} lines")
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DamagedError(f"{file}, line {self._number}: {error}") from None
            row = parsed_row(file, self._number, text)
            if row is not None:
                self._add(*row)

    def _add(self, step: int, row: dict[str, float]) -> None:
        if step < self.last_step:
            raise out_of_order(self._path.name, self._number)
        self.last_step = step
        if "time/elapsed" in row:
            self._clock.advance(row["time/elapsed"])
        for given, value in row.items():
            name = one_line(given)
            self.last[name] = (value, step)
            if is_drawable(value):
                self.curves.setdefault(name, LiveCurve()).add(step, self.seconds, value)
        if len(self.last) > MAX_METRICS:
            raise DamagedError(
                f"{self._path.name}, line {self._number}: more than {MAX_METRICS:,} metrics"
            )
