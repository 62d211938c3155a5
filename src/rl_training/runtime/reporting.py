"""What follows an iteration: a row in the log, and callbacks that evaluate, save and show."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError, Paused
from rl_training.logging import MetricLogger
from rl_training.runs import record_inexactness
from rl_training.runtime.callbacks import (
    Callback,
    CheckpointCallback,
    CheckpointSaved,
    EvaluationCallback,
    EvaluationEnd,
    IterationEnd,
    ProgressCallback,
    TrainingEnd,
)
from rl_training.runtime.experience import Timed

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.eval import EvalResult
    from rl_training.runtime.trainer import Trainer


@dataclasses.dataclass
class _Report:
    """The end of an iteration that callbacks are being notified of."""

    event: IterationEnd
    notified: list[str]
    """Names of the callbacks that have been."""


class Reporter:
    """Logs metrics and notifies callbacks, in an order that makes a report continuable.

    Evaluation comes before the user's callbacks, which see its results; the checkpoint comes last,
    so that it holds everything up to its step.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self.callbacks = _with_standard(trainer.config, callbacks)
        self.metrics: dict[str, float] = {}
        """The last value of every metric."""
        # Weak: a trainer, and with it a replay, is freed at once when its last user drops it.
        self._trainer_ref = weakref.ref(trainer)
        self._logger: MetricLogger | None = None
        self._log_offset: int | None = None
        self._unfinished: _Report | None = None
        self._write: Callable[[Mapping[str, float]], None] = self._log

    @property
    def _trainer(self) -> Trainer:
        trainer = self._trainer_ref()
        if trainer is None:
            raise RuntimeError("the trainer of this reporter is gone")
        return trainer

    def measure(self, timed: Timed) -> None:
        """Write rows through ``timed`` from now on."""
        self._write = timed("logging", self._log)

    def start(self) -> float:
        """Open the log, cut back to where a resumed run was; return seconds trained before."""
        trainer = self._trainer
        resumed = self._log_offset is not None
        self._logger = MetricLogger(
            trainer.config,
            trainer.run_dir,
            resume_at=self._log_offset,
            purge_step=trainer.global_step + 1 if resumed else None,
        )
        return self._logger.jsonl.elapsed

    def notify_start(self) -> None:
        """Notify the callbacks that training starts."""
        for callback in self.callbacks:
            callback.on_start(self._trainer)

    def notify_pause(self) -> None:
        """Notify the callbacks that a checkpoint is overdue."""
        for callback in self.callbacks:
            callback.on_pause(self._trainer)

    def notify_end(self, end: TrainingEnd) -> TrainingEnd:
        """Notify the callbacks of the end; return it as interrupted where one of them paused."""
        for callback in self.callbacks:
            try:
                callback.on_end(self._trainer, end)
            except Paused:
                end = dataclasses.replace(end, interrupted=True)
        return end

    def report(self, event: IterationEnd) -> None:
        """Log an iteration and notify the callbacks."""
        self.metrics.update(event.metrics)
        interval = self._trainer.config.log_interval_steps
        if event.crossed(interval) or event.step >= self._trainer.total:
            self._write(event.metrics)
        self._notify(_Report(event, []))

    def continue_report(self) -> None:
        """Notify the callbacks that had not been when the run was saved within a report."""
        if self._unfinished is not None:
            self._notify(self._unfinished)

    def _notify(self, report: _Report) -> None:
        """Notify the callbacks that have not been; `Paused` leaves the rest for the resumed run."""
        self._unfinished = report
        for name, callback in self.named_callbacks():
            if name not in report.notified:
                callback.on_iteration(self._trainer, report.event)
                report.notified.append(name)
        self._unfinished = None

    def record_evaluation(self, result: EvalResult) -> None:
        """Log an evaluation and notify the callbacks."""
        metrics = result.metrics()
        self.metrics.update(metrics)
        self._write(metrics)
        for callback in self.callbacks:
            event = EvaluationEnd(self._trainer.global_step, result)
            callback.on_evaluation(self._trainer, event)

    def checkpoint_saved(self, path: Path, seconds: float) -> None:
        """Notify the callbacks that a checkpoint is on disk, which took ``seconds`` to write."""
        trainer = self._trainer
        if not trainer.source.exactly_resumable:
            record_inexactness(trainer.run_dir)
        for callback in self.callbacks:
            callback.on_checkpoint(trainer, CheckpointSaved(trainer.global_step, path, seconds))

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self._logger is not None:
            self._logger.write(self._trainer.global_step, metrics)

    def log_value(self, name: str, value: float) -> None:
        """Log one number at the current step."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a metric must have a name; got {name!r}")
        metrics = {name: float(value)}
        self.metrics.update(metrics)
        self._write(metrics)

    def sync_log(self) -> None:
        """Make the metric log durable, so that a checkpoint never counts on rows that are lost."""
        if self._logger is not None:
            self._logger.jsonl.sync()

    def close(self) -> None:
        """Close the log and the callbacks, all of them whatever one raises."""
        with contextlib.ExitStack() as stack:
            if self._logger is not None:
                stack.callback(self._logger.close)
                self._logger = None
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_close)

    # -- state ---------------------------------------------------------------------------------

    def named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """Yield the callbacks with the names that their states are saved under."""
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), callback

    @property
    def log_offset(self) -> int | None:
        """Bytes of the log so far; None before it is open."""
        return self._logger.jsonl.offset() if self._logger else None

    def saved_metrics(self) -> dict[str, float]:
        """Return the last metrics, without times."""
        return {k: v for k, v in self.metrics.items() if not k.startswith("time/")}

    def callback_states(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one."""
        states = ((name, callback.state_dict()) for name, callback in self.named_callbacks())
        return {name: state for name, state in states if state}

    def unfinished_state(self) -> dict[str, Any] | None:
        """Return the report that is being made; None where all but the checkpoint was done."""
        if self._unfinished is None:
            return None
        event, notified = self._unfinished.event, self._unfinished.notified
        waiting = [
            name
            for name, callback in self.named_callbacks()
            if name not in notified and not isinstance(callback, CheckpointCallback)
        ]
        if not waiting:
            return None
        return {
            "previous_step": event.previous_step,
            "metrics": dict(event.metrics),
            "notified": list(notified),
        }

    def load_unfinished_state(self, state: Mapping[str, Any]) -> None:
        """Restore a report that was being made."""
        metrics = {str(name): float(value) for name, value in state["metrics"].items()}
        event = IterationEnd(self._trainer.global_step, int(state["previous_step"]), metrics)
        self._unfinished = _Report(event, [str(name) for name in state["notified"]])

    def load_state(
        self, metrics: Mapping[str, Any], callbacks: Mapping[str, Any], log_offset: int | None
    ) -> None:
        """Restore metrics, the states of callbacks and the place in the log."""
        self.metrics = {str(name): float(value) for name, value in metrics.items()}
        self._log_offset = log_offset
        for name, callback in self.named_callbacks():
            if name in callbacks:
                callback.load_state_dict(callbacks[name])


def _with_standard(config: TrainConfig[Any], callbacks: Sequence[Callback]) -> list[Callback]:
    """The user's callbacks between evaluation, whose results they see, and the checkpoint."""
    result: list[Callback] = [ProgressCallback()] if config.progress else []
    own_evaluation = any(isinstance(c, EvaluationCallback) for c in callbacks)
    own_checkpoint = [c for c in callbacks if isinstance(c, CheckpointCallback)]
    if config.eval_episodes and not own_evaluation:
        result.append(
            EvaluationCallback(
                config.eval_interval,
                config.eval_episodes,
                deterministic=config.eval_deterministic,
            )
        )
    result += [c for c in callbacks if not isinstance(c, CheckpointCallback)]
    result += own_checkpoint or [
        CheckpointCallback(config.checkpoint_interval, config.keep_checkpoints)
    ]
    return result
