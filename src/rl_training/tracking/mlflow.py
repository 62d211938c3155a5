"""MLflow, on the server or in the file that its own environment variables name."""

from __future__ import annotations

import os
import posixpath
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rl_training.errors import ConfigError
from rl_training.tracking.protocol import Status, TrackedRun

_STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""Limits of one request."""
_LONGEST_PARAM = 500
_MOST_WAITING = 10_000
"""Rows that may wait for a slow server."""
CLOSE_SECONDS = 30.0
"""Time for the rows that still wait when training ends."""


class _Row(NamedTuple):
    step: int
    metrics: Mapping[str, float]
    milliseconds: int


class MlflowTracker:
    """Sends rows to MLflow from a thread of its own, so that training never waits for a server.

    A resumed run continues its MLflow run. Values there cannot be taken back: those that were sent
    before a run was killed stay, and their steps are not sent again. What was logged and not sent
    is sent first.
    """

    def __init__(self, run: TrackedRun) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise ConfigError(
                "mlflow: true needs the extra 'mlflow'; in the clone: pip install '.[mlflow]'"
            ) from None
        # Retries would draw from Python's global random generator, which environments may use.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
        self._make_client = MlflowClient
        self._run = run
        self._rows: queue.Queue[_Row | Status] = queue.Queue(_MOST_WAITING)
        self._error: Exception | None = None
        self._sent_to: dict[str, int] = {}
        """The last step of every metric that the server has from before a resume."""
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a row to the thread; raise what sending raised."""
        self._raise_error()
        try:
            self._rows.put_nowait(_Row(step, dict(metrics), round(time.time() * 1000)))
        except queue.Full:
            raise TimeoutError(f"{_MOST_WAITING:,} rows wait for the MLflow server") from None

    def close(self, status: Status) -> None:
        """Wait until all rows are sent, but not long, and set the status of the run."""
        self._raise_error()
        self._rows.put(status, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(f"the MLflow server took more than {CLOSE_SECONDS:.0f} seconds")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- in the thread -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            client = self._make_client()
            run_id = self._begin(client)
            for row in self._earlier_rows():
                self._send(client, run_id, [row])
            while True:
                batch, status = self._next_batch()
                self._send(client, run_id, batch)
                if status is not None:
                    client.set_terminated(run_id, _STATUSES[status])
                    return
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = error

    def _begin(self, client: Any) -> str:
        """Return the id of the run, continued or new."""
        from mlflow.entities import Param

        run_id = self._run.identity.get("run_id")
        if run_id is not None:
            known = client.get_run(run_id).data.to_proto().metrics
            self._sent_to = {metric.key: metric.step for metric in known}
            client.update_run(run_id, status="RUNNING")
            return run_id
        name = self._run.config.mlflow_experiment
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(experiment_id, run_name=self._run.name)
        new_id: str = run.info.run_id
        self._run.save_identity({"run_id": new_id})
        params = [
            Param(key, str(value)[:_LONGEST_PARAM]) for key, value in self._run.settings().items()
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(new_id, params=params[start : start + _MOST_PARAMS])
        return new_id

    def _earlier_rows(self) -> Iterator[_Row]:
        now = round(time.time() * 1000)
        for step, metrics in self._run.earlier_rows():
            yield _Row(step, metrics, now)

    def _next_batch(self) -> tuple[list[_Row], Status | None]:
        """Wait for a row; return the rows that wait, as many as a request may have."""
        found = self._rows.get()
        batch: list[_Row] = []
        size = 0
        while not isinstance(found, str):
            batch.append(found)
            size += len(found.metrics)
            if size > _MOST_METRICS // 2:
                return batch, None
            try:
                found = self._rows.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, found

    def _send(self, client: Any, run_id: str, rows: list[_Row]) -> None:
        """Send the values that the server does not have."""
        from mlflow.entities import Metric

        named = (
            (metric_name(name), value, row) for row in rows for name, value in row.metrics.items()
        )
        metrics = [
            Metric(name, value, row.milliseconds, row.step)
            for name, value, row in named
            if row.step > self._sent_to.get(name, -1)
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(run_id, metrics=metrics[start : start + _MOST_METRICS])


def metric_name(name: str) -> str:
    """Return a metric's name with what MLflow does not allow replaced."""
    allowed = re.sub(r"[^\w./ -]", "_", name)
    if posixpath.normpath(allowed) != allowed or allowed.startswith(("/", ".")):
        return allowed.replace("/", "_").replace(".", "_")
    return allowed
