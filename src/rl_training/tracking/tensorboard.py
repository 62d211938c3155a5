"""TensorBoard events, in the run folder."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.tracking.protocol import Status, TrackedRun


class TensorBoardTracker:
    """TensorBoard events, a whole row in one (a scalar at a time costs several times more).

    The config is written as hyperparameters: TensorBoard's HPARAMS tab compares runs by them.
    Events are written at once, not by TensorBoard's own thread, so that a full disk is an error
    here.
    """

    def __init__(self, folder: Path, run: TrackedRun) -> None:
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
        if run.resumed_at is not None:
            # Makes TensorBoard forget what an interrupted run wrote after this step.
            start = SessionLog(status=SessionLog.START)
            self._add(step=run.resumed_at + 1, session_log=start)
        else:
            chosen = hparams_pb(run.settings(), trial_id=run.name)
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

    def close(self, status: Status) -> None:  # noqa: ARG002 - events have no status
        """Close the file."""
        self._file.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which hold whole seconds."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdigit()), default=0)
    if 0 <= newest - int(time.time()) <= 1:
        time.sleep(newest + 1 - time.time())
