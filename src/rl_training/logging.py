"""Metrics of a run: ``metrics.jsonl``, and the trackers that its settings name."""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.runs import write_durably
from rl_training.tracking.opening import Identities, Trackers

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.tracking import Status

FORMAT = 1
WALL_CLOCK = "time/"
"""Metrics under this prefix are of the clock: two identical runs differ in them alone."""
_RENAMED = {"losses/entropy_loss": "losses/entropy"}
"""Old names of metrics, in logs of earlier versions, and their names today."""


def current_name(metric: str) -> str:
    """Return today's name of a metric that earlier versions logged under another name."""
    return _RENAMED.get(metric, metric)


class JsonlSink:
    """One JSON object per line; the first line holds the format."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        self.elapsed = 0.0
        """Seconds of training that the rows so far account for."""
        if resume_at is None:
            self._file = path.open("wb")
            self._file.write(_FIRST_LINE)
        else:
            _cut_back(path, resume_at)
            self.elapsed = _last_elapsed(path)
            self._file = path.open("ab")
        self._file.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row and hand it to the operating system."""
        self._file.write(json.dumps({"step": step, **metrics}).encode() + b"\n")
        self._file.flush()

    def offset(self) -> int:
        """Length of the file now; a resumed run cuts it back to this."""
        return self._file.tell()

    def sync(self) -> None:
        """Wait until all rows are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_FIRST_LINE = json.dumps({"format": FORMAT}).encode() + b"\n"


def _cut_back(path: Path, offset: int) -> None:
    """Drop rows written after the checkpoint; they are kept in a file beside.

    A log that is missing, shorter than it was, or torn is repaired, with a warning: whole rows are
    kept. The new content takes the old one's place in one step, so that a crash loses neither.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = content[:offset].splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _is_row(line)]
    if not kept or "format" not in _parsed(kept[0]):
        kept.insert(0, _FIRST_LINE)
    whole = b"".join(kept)
    if whole != content[:offset] or len(content) < offset:
        warnings.warn(
            f"{path} is damaged or shorter than at the checkpoint: {len(kept) - 1} whole rows are"
            f" left, up to step {_parsed(kept[-1]).get('step', 0):,}. The run continues without"
            " the rest",
            stacklevel=2,
        )
    if len(content) > offset:
        aside = path.with_name(f"{path.stem}.after-{offset}.{time.time_ns()}{path.suffix}")
        write_durably(aside, memoryview(content[offset:]))
    if whole != content:
        write_durably(path, memoryview(whole))


def _is_row(line: bytes) -> bool:
    row = _parsed(line)
    return type(row.get("step")) is int or "format" in row


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _last_elapsed(path: Path) -> float:
    """The last time in a metric log, so that a resumed run's clock continues."""
    times = [row.get("time/elapsed", 0.0) for _, row in read_rows(path)]
    return max((float(t) for t in times if isinstance(t, (int, float))), default=0.0)


class MetricLogger:
    """The metric log of a run, if it has a folder, and its trackers."""

    def __init__(
        self,
        config: TrainConfig[Any],
        run_dir: Path | None,
        identities: Identities,
        *,
        resume_at: int | None = None,
        resumed_at_step: int | None = None,
    ) -> None:
        self.jsonl: JsonlSink | None = None
        earlier: Callable[[], Iterable[tuple[int, Mapping[str, float]]]] = tuple
        if run_dir is not None:
            path = run_dir / "metrics.jsonl"
            self.jsonl = JsonlSink(path, resume_at)
            earlier = functools.partial(read_rows, path, self.jsonl.offset())
        self._trackers = Trackers(
            config, run_dir, identities, resumed_at=resumed_at_step, earlier_rows=earlier
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row to the log and to every tracker."""
        if self.jsonl is not None:
            self.jsonl.write(step, metrics)
        self._trackers.write(step, metrics)

    def close(self, status: Status) -> None:
        """Close the log and every tracker."""
        if self.jsonl is not None:
            self.jsonl.close()
        self._trackers.close(status)


def read_rows(path: Path, end: int | None = None) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows of a metric log and their steps; a line that was cut short ends them.

    Only lines that begin before the byte ``end`` are read.
    """
    position = 0
    with path.open("rb") as file:
        for line in file:
            if end is not None and position >= end:
                return
            position += len(line)
            row = _parsed(line)
            if not row:
                return
            if type(row.get("step")) is int:
                yield row.pop("step"), row
