"""What follows an iteration: a row in the log, and callbacks that evaluate, save and show."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.errors import ConfigError, Paused
from rl_training.logging import MetricLogger, current_name
from rl_training.runs import record_inexactness
from rl_training.runtime.callbacks import (
    Callback,
    CheckpointCallback,
    CheckpointSaved,
    EvaluationCallback,
    EvaluationEnd,
    FunctionCallback,
    IterationEnd,
    RolloutEnd,
    StepEnd,
    TrainingEnd,
    UpdateEnd,
    overrides,
    returned_false,
)
from rl_training.runtime.console import ProgressCallback
from rl_training.runtime.experience import Collected, Timed, WatchedSource
from rl_training.runtime.recording import RecordingCallback
from rl_training.tracking.opening import Identities
from rl_training.types import Array, Obs, VectorStep

if TYPE_CHECKING:
    from rl_training.eval import EvalResult
    from rl_training.runtime.trainer import Trainer
    from rl_training.tracking import Status


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
        self.callbacks = _with_standard(trainer, callbacks)
        self._watching: dict[str, list[Callback]] = {event: [] for event in _OPTIONAL}
        """The callbacks that override the events which most callbacks do not."""
        self._current_step = 0
        self._collected: list[Collected] = []
        self.metrics: dict[str, float] = {}
        """The last value of every metric."""
        self.earlier_seconds = 0.0
        """Seconds that the run had trained before it was resumed."""
        # Weak: a trainer, and with it a replay, is freed at once when its last user drops it.
        self._trainer_ref = weakref.ref(trainer)
        self._logger: MetricLogger | None = None
        self.tracker_identities = Identities(trainer.folder)
        self.end_status: Status = "failed"
        """How the run ended, for trackers; the trainer sets it before `close`."""
        self._log_offset: int | None = None
        self._unfinished: _Report | None = None
        self.paused_at_end = False
        """Whether a signal paused what followed the last iteration."""
        self._write: Callable[[Mapping[str, float]], None] = self._log
        if trainer.log_info:
            _watched(trainer, "log_info").watch_info(trainer.log_info)

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
        self.earlier_seconds = self.metrics.get("time/elapsed", 0.0)
        if not trainer.ranks.leads:
            return self.earlier_seconds
        in_memory = trainer.folder is None
        resumed = trainer.global_step > 0 if in_memory else self._log_offset is not None
        self._logger = MetricLogger(
            trainer.config,
            trainer.folder,
            self.tracker_identities,
            resume_at=self._log_offset,
            resumed_at_step=trainer.global_step if resumed else None,
        )
        if self._logger.jsonl is not None:
            self.earlier_seconds = self._logger.jsonl.elapsed
        return self.earlier_seconds

    def notify_start(self) -> None:
        """Notify the callbacks that training starts."""
        trainer = self._trainer
        self._watching = {
            event: [callback for callback in self.callbacks if overrides(callback, event)]
            for event in _OPTIONAL
        }
        self._current_step = trainer.current_step()
        if self._watching["on_step"]:
            _watched(trainer, "on_step").watch_steps(self._notify_step)
        elif isinstance(trainer.source, WatchedSource):
            trainer.source.watch_steps(None)  # what trained before may have watched
        for callback in self.callbacks:
            callback.on_start(trainer)

    def _notify_step(
        self, obs: Obs, actions: Array, taken: VectorStep, infos: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self._current_step += int(np.count_nonzero(taken.valid))
        event = StepEnd(
            self._current_step,
            obs,
            actions,
            taken.final_obs,
            taken.reward,
            taken.terminated,
            taken.truncated,
            taken.valid,
            infos,
        )
        self._notify_watching("on_step", event)

    def notify_rollout(self, step: int, collected: Collected, *, complete: bool = True) -> None:
        """Notify the callbacks that experience was collected, at ``step``.

        A rollout that is not complete, because of a pause, is reported with the rest of it. Where
        nothing was collected, since it was before a pause, there is nothing to report.
        """
        if not self._watching["on_rollout"] or not collected.vector_steps:
            return
        self._collected.append(collected)
        if not complete:
            return
        parts, self._collected = self._collected, []
        episodes = tuple(episode for part in parts for episode in part.episodes)
        event = RolloutEnd(step, sum(part.steps for part in parts), episodes)
        self._notify_watching("on_rollout", event)

    def notify_update(
        self, step: int, updates: int, read_metrics: Callable[[], Mapping[str, float]]
    ) -> None:
        """Notify the callbacks that ``updates`` gradient steps were taken, at ``step``.

        ``read_metrics`` is called where a callback reads the metrics.
        """
        if not self._watching["on_update"] or not updates:
            return
        self._notify_watching("on_update", UpdateEnd(step, updates, read_metrics))

    def _notify_watching(self, name: str, event: object) -> None:
        """Notify the callbacks that override an event of work in which other ranks are busy."""
        trainer = self._trainer
        with trainer.ranks.only_here():
            for callback in self._watching[name]:
                self._stop_if_false(callback, name, getattr(callback, name)(trainer, event))

    def _stop_if_false(self, callback: Callback, event: str, result: object) -> None:
        if returned_false(result):
            name = callback if isinstance(callback, FunctionCallback) else type(callback).__name__
            self._trainer.request_stop(f"{event} of {name} returned False")

    def notify_pause(self) -> None:
        """Notify the callbacks that a checkpoint is overdue."""
        for callback in self.callbacks:
            callback.on_pause(self._trainer)

    def notify_progress(self, step: int) -> None:
        """Notify the callbacks that override ``on_progress`` that training is at ``step``.

        For displays, a few times a second at most: nothing that is computed or logged depends on
        it.
        """
        self._notify_watching("on_progress", step)

    def notify_end(self, end: TrainingEnd) -> None:
        """Notify the callbacks of the end; as interrupted, once one of them paused."""
        for callback in self.callbacks:
            try:
                callback.on_end(self._trainer, end)
            except Paused:
                self.paused_at_end = True
                end = dataclasses.replace(end, interrupted=True)

    def report(self, event: IterationEnd) -> None:
        """Log an iteration and notify the callbacks."""
        self._current_step = event.step
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
                result = callback.on_iteration(self._trainer, report.event)
                self._stop_if_false(callback, "on_iteration", result)
                report.notified.append(name)
        self._unfinished = None

    def record_evaluation(
        self, result: EvalResult, info_means: Mapping[str, float] | None = None
    ) -> None:
        """Log an evaluation, with the means of ``log_info``, and notify the callbacks."""
        metrics = {**result.metrics(), **(info_means or {})}
        self.metrics.update(metrics)
        self._write(metrics)
        event = EvaluationEnd(self._trainer.global_step, result, metrics)
        for callback in self.callbacks:
            answer = callback.on_evaluation(self._trainer, event)
            self._stop_if_false(callback, "on_evaluation", answer)

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
        try:
            metrics = {name: float(value)}
        except (TypeError, ValueError):
            raise ConfigError(f"the metric {name!r} must be a number; got {value!r}") from None
        if not np.isfinite(metrics[name]):
            warnings.warn(f"{name} is {value} and is not logged", stacklevel=3)
            return
        self.metrics.update(metrics)
        self._write(metrics)

    def sync_log(self) -> None:
        """Make the metric log durable, so that a checkpoint never counts on rows that are lost."""
        if self._logger is not None and self._logger.jsonl is not None:
            self._logger.jsonl.sync()

    def close(self) -> None:
        """Close the log and the callbacks, all of them whatever one raises."""
        with contextlib.ExitStack() as stack:
            if self._logger is not None:
                stack.callback(self._logger.close, self.end_status)
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
        log = None if self._logger is None else self._logger.jsonl
        return None if log is None else log.offset()

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
        self.metrics = {current_name(str(name)): float(value) for name, value in metrics.items()}
        self._log_offset = log_offset
        for name, callback in self.named_callbacks():
            if name in callbacks:
                callback.load_state_dict(callbacks[name])


_OPTIONAL = ("on_step", "on_rollout", "on_update", "on_progress")
"""Events that may come often: callbacks that do not override them are not called."""


def _watched(trainer: Trainer, what: str) -> WatchedSource:
    if not isinstance(trainer.source, WatchedSource):
        raise ConfigError(
            f"{what} needs environments of this process; {type(trainer.source).__name__} has no"
            " steps or infos to watch (no watch_steps and watch_info)"
        )
    return trainer.source


def mean_losses(sums: Mapping[str, Any]) -> dict[str, float]:
    """Return the means of a replay learner's ``metric_sums``, by the names they are logged under.

    They are transferred from the device, and the sums stay as they are.
    """
    if sums["sums"] is None or not sums["updates"]:
        return {}
    means = (sums["sums"] / sums["updates"]).tolist()
    return {f"losses/{name}": value for name, value in zip(sums["names"], means, strict=True)}


def _with_standard(trainer: Trainer, callbacks: Sequence[Callback]) -> list[Callback]:
    """The user's callbacks between evaluation, whose results they see, and the checkpoint."""
    config = trainer.config
    if not trainer.ranks.leads:
        return []
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
    if config.record_interval:  # the user's callbacks may contain the evaluation
        result.append(RecordingCallback(config.record_interval))
    if trainer.folder is None:
        if own_checkpoint:
            raise ConfigError("a CheckpointCallback needs a run folder: run_dir=None has none")
        return result
    result += own_checkpoint or [
        CheckpointCallback(config.checkpoint_interval, config.keep_checkpoints)
    ]
    return result
