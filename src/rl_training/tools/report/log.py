"""Reader of ``metrics.jsonl``: the series of selected metrics against steps and time."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_training.logging import FORMAT, current_name
from rl_training.tools.report.limits import MAX_NAME, MAX_NUMBER, MAX_STEP, DamagedError
from rl_training.untrusted_files import open_regular

FloatArray: TypeAlias = npt.NDArray[np.float64]

MAX_LOG_BYTES = 1 << 30
MAX_LINE = 1 << 20
MAX_ROWS = 5_000_000
MAX_METRICS = 10_000
_MAX_SECONDS = 1e12


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric of one run, against steps and against seconds of training."""

    steps: FloatArray
    seconds: FloatArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.values)


@dataclasses.dataclass(frozen=True)
class Log:
    """The selected metrics of a run."""

    series: dict[str, Series]
    names: frozenset[str]
    last_step: int
    seconds: float
    notes: tuple[str, ...]


def read_log(path: Path, metrics: Sequence[str]) -> Log:
    """Read the named metrics of a log."""
    log = _LogReader(metrics)
    notes: tuple[str, ...] = ()
    for number, line in _lines(path):
        try:
            row = parsed_row(path.name, number, line)
        except DamagedError:
            if not line.endswith("\n"):  # the line was being written
                notes = ("the last line of metrics.jsonl is incomplete and was left out",)
                break
            raise
        if row is not None:
            log.add(path.name, number, *row)
    return log.result(notes)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers, reading the file piece by piece."""
    try:
        with open_regular(path, MAX_LOG_BYTES) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
                if len(line) > MAX_LINE or number > MAX_ROWS:
                    raise DamagedError(
                        f"{path.name}, line {number}: more than {MAX_LINE:,} bytes in a line, or"
                        f" more than {MAX_ROWS:,} lines"
                    )
                if line.strip():
                    yield number, line.decode("utf-8")
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from None


def parsed_row(file: str, number: int, line: str) -> tuple[int, dict[str, float]] | None:
    """Return the step and the metrics of a line; None for the first one, which names the format.

    Raises DamagedError where it is not a row; ``file`` is for its message.
    """
    try:
        row = json.loads(line)
        if number == 1 and "format" in row:
            _check_format(file, row["format"])
            return None
        return _checked(row)
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
        raise DamagedError(f"{file}, line {number}, is not a row of metrics") from None


def out_of_order(file: str, number: int) -> DamagedError:
    """Return the error for a row whose step is smaller than that of the row before."""
    return DamagedError(f"{file}, line {number}: the step is smaller than before")


def is_drawable(value: float) -> bool:
    """Return whether a value is finite and within the limits."""
    return math.isfinite(value) and abs(value) <= MAX_NUMBER


def _check_format(file: str, found: Any) -> None:
    if found != FORMAT:
        shown = found if isinstance(found, int) else f"of type {type(found).__name__}"
        raise DamagedError(f"{file} has format {shown}; this version reads format {FORMAT}")


def _checked(row: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the step and the metrics of a row; raise some exception if it is not a row."""
    values = {current_name(key): _number(value) for key, value in row.items()}
    step = values.pop("step")
    if not 0 <= step <= MAX_STEP or step != int(step) or max(map(len, row)) > MAX_NAME:
        raise ValueError
    return int(step), values


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


class Clock:
    """Seconds of training so far.

    In logs of older versions the time starts from zero at every resume.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._earlier = 0.0

    def advance(self, elapsed: float) -> bool:
        """Take a row's time; return whether it is a time."""
        if not 0 <= elapsed <= _MAX_SECONDS:
            return False
        if self._earlier + elapsed < self.seconds:
            self._earlier = self.seconds
        self.seconds = self._earlier + elapsed
        return True


class _LogReader:
    """Collects rows."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._points = {name: (array("d"), array("d")) for name in metrics}
        self._clock_steps, self._clock_seconds = array("d", [0.0]), array("d", [0.0])
        self._clock = Clock()
        self._last_step = 0
        self._left_out = 0

    def add(self, file: str, number: int, step: int, row: dict[str, float]) -> None:
        if step < self._last_step:
            raise out_of_order(file, number)
        self._last_step = step
        self._names |= row.keys()
        if len(self._names) > MAX_METRICS:
            raise DamagedError(f"{file}, line {number}: more than {MAX_METRICS:,} metrics")
        if "time/elapsed" in row:
            if self._clock.advance(row["time/elapsed"]):
                self._clock_steps.append(step)
                self._clock_seconds.append(self._clock.seconds)
            else:
                self._left_out += 1
        for name in row.keys() & self._points.keys():
            if is_drawable(row[name]):
                steps, values = self._points[name]
                steps.append(step)
                values.append(row[name])
            else:
                self._left_out += 1

    def result(self, notes: tuple[str, ...]) -> Log:
        if self._left_out:
            what = f"not finite, or beyond {MAX_NUMBER:g}"
            notes += (f"{self._left_out} values that are {what} were left out",)
        clock_steps, clock_seconds = np.array(self._clock_steps), np.array(self._clock_seconds)
        series = {}
        for name, (steps_logged, values) in self._points.items():
            steps = np.array(steps_logged)
            seconds = np.interp(steps, clock_steps, clock_seconds)
            series[name] = Series(steps, seconds, np.array(values))
        names = frozenset(self._names)
        return Log(series, names, self._last_step, float(clock_seconds[-1]), notes)
