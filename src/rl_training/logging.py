"""Metric sinks: JSONL always, TensorBoard by default, Weights & Biases when asked."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rl_training.errors import ConfigError
from rl_training.runs import write_durably

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

FORMAT = 1
WALL_CLOCK = "time/"
"""Metrics under this prefix are of the clock: two identical runs differ in them alone."""
_RENAMED = {"losses/entropy_loss": "losses/entropy"}
"""Old names of metrics, in logs of earlier versions, and their names today."""


def current_name(metric: str) -> str:
    """Return today's name of a metric that earlier versions logged under another name."""
    return _RENAMED.get(metric, metric)


class Sink(Protocol):
    """Takes rows of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


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


class TensorBoardSink:
    """TensorBoard events, a whole row in one (a scalar at a time costs several times more).

    The config is written as hyperparameters: TensorBoard's HPARAMS tab compares runs by them.
    Events are written at once, not by TensorBoard's own thread, so that a full disk is an error
    here.
    """

    def __init__(
        self, folder: Path, config: TrainConfig[Any], purge_step: int | None = None
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_a_later_name(folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._writer = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            # Makes TensorBoard forget what an interrupted run wrote from this step on.
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        else:
            chosen = hparams_pb(_hyperparameters(config), trial_id=folder.parent.name)
            self._add(step=0, summary=chosen)

    def _add(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row as one event."""
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _hyperparameters(config: TrainConfig[Any]) -> dict[str, Any]:
    """A config as flat names and the plain values that TensorBoard can show."""
    fields = config.to_dict()
    nested = {key: fields.pop(key) for key in ("algo_kwargs", "atari")}
    if config.preprocessing == "none":
        nested.pop("atari")
    for group in nested.values():
        fields.update(group)
    return {
        key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for key, value in fields.items()
    }


def _wait_for_a_later_name(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which hold whole seconds."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdigit()), default=0)
    if 0 <= newest - int(time.time()) <= 1:
        time.sleep(newest + 1 - time.time())


class WandbSink:
    """Weights & Biases, in the mode that its own environment variables set.

    Rows that were logged just before a run was killed may be missing there. So a resumed run first
    sends the ``rows`` that are missing: online, those after the last step that the server has;
    offline, where every part of a run is a folder of its own, all of them.
    """

    def __init__(
        self,
        config: TrainConfig[Any],
        run_dir: Path,
        rows: Iterable[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("wandb: true needs pip install 'rl_training[wandb]'") from None
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=run_dir.name,
            id=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=config.to_dict(),
        )
        self._first_step = int(self._run.starting_step)
        for step, metrics in rows:
            self.write(step, metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a row, unless it is there already."""
        if step >= self._first_step:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MetricLogger:
    """All sinks of a run."""

    def __init__(
        self,
        config: TrainConfig[Any],
        run_dir: Path,
        *,
        resume_at: int | None = None,
        purge_step: int | None = None,
    ) -> None:
        path = run_dir / "metrics.jsonl"
        self.jsonl = JsonlSink(path, resume_at)
        self._sinks: list[Sink] = [self.jsonl]
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(run_dir / "tensorboard", config, purge_step))
        if config.wandb:
            self._sinks.append(WandbSink(config, run_dir, read_rows(path)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row to every sink."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows of a metric log and their steps; a line that was cut short ends them."""
    with path.open("rb") as file:
        for line in file:
            row = _parsed(line)
            if not row:
                return
            if type(row.get("step")) is int:
                yield row.pop("step"), row
