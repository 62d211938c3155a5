"""``metrics.jsonl`` as a report reads it: the series of a few metrics, and the clock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_training.logging import FORMAT

FloatArray: TypeAlias = npt.NDArray[np.float64]


class DamagedError(Exception):
    """A run folder whose files cannot be used; the message is the reason."""


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
    """What a run logged."""

    series: dict[str, Series]
    names: frozenset[str]
    last_step: int
    seconds: float
    notes: tuple[str, ...]


def read_log(path: Path, metrics: Sequence[str]) -> Log:
    """Read a log, keeping the named metrics."""
    names: set[str] = set()
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in metrics}
    clock: list[tuple[float, float]] = [(0.0, 0.0)]
    earlier, last_step, left_out = 0.0, 0, 0
    rows, notes = _parse_rows(path)
    for row in rows:
        step, names_here = row.pop("step"), row.keys()
        names |= names_here
        last_step = max(last_step, int(step))
        if "time/elapsed" in row:
            # Logs of older runs hold a clock from zero for every resume.
            if earlier + row["time/elapsed"] < clock[-1][1]:
                earlier = clock[-1][1]
            clock.append((step, earlier + row["time/elapsed"]))
        for name in names_here & points.keys():
            if np.isfinite(row[name]):
                points[name].append((step, row[name]))
            else:
                left_out += 1
    if left_out:
        notes += (f"{left_out} values that are not finite were left out",)
    clock_steps, clock_seconds = np.array(clock, np.float64).T
    series = {}
    for name, pairs in points.items():
        steps, values = np.array(pairs, np.float64).reshape(-1, 2).T
        series[name] = Series(steps, np.interp(steps, clock_steps, clock_seconds), values)
    return Log(series, frozenset(names), last_step, float(clock_seconds[-1]), notes)


def _parse_rows(path: Path) -> tuple[list[dict[str, float]], tuple[str, ...]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from None
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if number == 1 and "format" in row:
                _check_format(path, row["format"])
                continue
            rows.append({str(key): float(value) for key, value in row.items()} | _step_of(row))
        except (ValueError, TypeError, AttributeError, KeyError):
            if number == len(lines):  # no newline yet: it was being written
                return rows, ("the last line of metrics.jsonl is incomplete and was left out",)
            raise DamagedError(f"{path.name}, line {number}, is not a row of metrics") from None
    return rows, ()


def _step_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {"step": int(row["step"])}


def _check_format(path: Path, found: Any) -> None:
    if found != FORMAT:
        raise DamagedError(f"{path.name} has format {found!r}; {FORMAT} is read here")
