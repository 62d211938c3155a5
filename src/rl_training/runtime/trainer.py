"""The training loop. It owns cadence (when to collect, learn, report, stop) and holds no math.

A *step* is one transition of one environment; `global_step` counts those that are learnt from.
An *iteration* is one collect and one learn. An *update* is one gradient step. An *episode* ends
by termination or truncation. Reports, evaluations and checkpoints come at iteration boundaries. A
signal, or a checkpoint that is overdue, pauses an iteration between two steps or two updates: what
it has done so far is part of the checkpoint, so that the result does not depend on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rl_training._internal.tree import tree_map
from rl_training.errors import NonFiniteError, Paused, StorageError
from rl_training.logging import MetricLogger
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runs import (
    RunLock,
    is_storage_error,
    read_json,
    record_inexactness,
    record_resume,
    write_json,
)
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
from rl_training.runtime.collector import Buffer, Collector
from rl_training.runtime.device import keep_freed_memory, torch_threads
from rl_training.runtime.rng import check_global_rng_state, global_rng_state, set_global_rng_state
from rl_training.runtime.signals import StopSignals
from rl_training.types import Obs, Progress

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.envs import Adapter, EnvFn
    from rl_training.eval import EvalResult
    from rl_training.runtime.spec import Algorithm, AlgorithmSpec


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    run_dir: Path
    checkpoint_path: Path
    """The last checkpoint."""
    metrics: dict[str, float]
    """The last value of every metric, the last evaluation's and ``global_step`` included."""
    stop_reason: str
    interrupted: bool = False
    """Stopped by a signal: resume it."""


@dataclasses.dataclass
class Setup:
    """What a trainer is made of."""

    spec: AlgorithmSpec
    config: TrainConfig[Any]
    algorithm: Any
    env: Adapter
    env_fn: EnvFn | None
    device: torch.device
    threads: int
    run_dir: Path
    lock: RunLock | None = None


class Iteration(NamedTuple):
    """What one iteration did."""

    steps: int
    metrics: dict[str, float]


@dataclasses.dataclass
class _Report:
    """An iteration's end that callbacks are being notified of."""

    event: IterationEnd
    notified: list[str]
    """Names of the callbacks that have been."""


def make_collector(setup: Setup, buffer: Buffer) -> Collector:
    """The collector of any family: its exploring actor, its storage, normalised rewards or not."""
    config = setup.config
    normalizer = None
    if config.normalize_reward:
        gamma = config.algo_kwargs.gamma
        normalizer = RewardNormalizer(setup.env.num_envs, gamma, config.clip_reward)
    actor = setup.spec.actor(setup.algorithm, config, setup.device)
    return Collector(setup.env, actor, buffer, normalizer)


class Trainer(ABC):
    """Collect, learn, report, until done. Families say what one iteration is."""

    collector: Collector

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        self.spec = setup.spec
        self.config = setup.config
        self.algorithm: Algorithm = setup.algorithm
        self.env = setup.env
        self.env_fn = setup.env_fn
        self.device = setup.device
        self.threads = setup.threads
        self.run_dir = setup.run_dir
        self.total = self.round_up(setup.config.total_timesteps)
        self.horizon = self.total
        """The total that schedules are evaluated over."""
        self.global_step = 0
        self.iteration = 0
        self.metrics: dict[str, float] = {}
        self.resumed: dict[str, Any] | None = None
        """Of a resumed run: from which checkpoint and how, for its lineage."""
        self.pause_at = math.inf
        """Time (of `time.monotonic`) from which a checkpoint is overdue."""
        self.callbacks = self._with_standard(callbacks)
        self._signals = StopSignals()
        self._stop_reason: str | None = None
        self._report_under_way: _Report | None = None
        self._log_offset: int | None = None
        self._logger: MetricLogger | None = None
        self._rng: Mapping[str, Any] | None = None
        self._lock = setup.lock

    def _with_standard(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """The user's callbacks between evaluation, whose results they see, and the checkpoint."""
        config = self.config
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

    @staticmethod  # noqa: B027 - most need nothing
    def check(setup: Setup) -> None:
        """Refuse what the machine cannot hold, before a run folder is made."""

    @abstractmethod
    def round_up(self, total: int) -> int:
        """Whole iterations that hold ``total`` steps."""

    @abstractmethod
    def iterate(self, progress: Progress) -> Iteration | None:
        """Collect and learn once; None where it paused, to continue with the next call."""

    def request_stop(self, reason: str) -> None:
        """End the run after the current iteration."""
        if self._stop_reason is None:
            self._stop_reason = reason

    def pauses(self) -> bool:
        """Whether an iteration must pause now: a signal came, or a checkpoint is overdue."""
        return self._signals.received is not None or time.monotonic() >= self.pause_at

    def stops_work(self) -> bool:
        """Whether work that is done again when resumed must stop: a signal came.

        A checkpoint that is overdue is written at once, with the state from before that work.
        """
        if time.monotonic() >= self.pause_at:
            self._save_overdue()
        return self._signals.received is not None

    def _save_overdue(self) -> None:
        self.pause_at = math.inf  # a checkpoint callback sets it again
        for callback in self.callbacks:
            callback.on_pause(self)

    def train(self) -> TrainResult:
        """Run to the end, from wherever the trainer is."""
        try:
            if self.device.type == "cpu" and self.env.obs_spec.has_images:
                keep_freed_memory()
            with torch_threads(self.threads), self._signals.watched():
                result = self._train()
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                self._write_summary(*_how_it_ended(error))
            with contextlib.suppress(Exception):  # nor must what then fails to close
                self.close()
            if isinstance(error, StorageError) or is_storage_error(error):
                raise StorageError(f"{_one_line(error)}; {self._last_checkpoint()}") from error
            raise
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - the run is complete and saved
            warnings.warn(
                f"the run is complete, but closing it failed ({_one_line(error)})", stacklevel=2
            )
        return result

    def _train(self) -> TrainResult:
        resumed = self._log_offset is not None
        self._logger = MetricLogger(
            self.config,
            self.run_dir,
            resume_at=self._log_offset,
            purge_step=self.global_step + 1 if resumed else None,
        )
        if self.resumed is not None:
            record_resume(self.run_dir, **self.resumed)
        self._restore_rng()
        for callback in self.callbacks:
            callback.on_start(self)
        with contextlib.suppress(Paused):
            self._iterations(self._logger.jsonl.elapsed)
        reason = self._stop_reason or self._signals.received or "total_timesteps reached"
        interrupted = self._signals.received is not None and self.global_step < self.total
        end = TrainingEnd(self.global_step, reason, interrupted)
        for callback in self.callbacks:
            try:
                callback.on_end(self, end)
            except Paused:
                end = dataclasses.replace(end, interrupted=True)
        self._write_summary("interrupted" if end.interrupted else "finished", reason)
        return TrainResult(
            run_dir=self.run_dir,
            checkpoint_path=self.run_dir / "checkpoints" / "last.pt",
            metrics={**self.metrics, "global_step": self.global_step},
            stop_reason=reason,
            interrupted=end.interrupted,
        )

    def _iterations(self, earlier: float) -> None:
        """Iterate and report to the end; ``earlier`` are seconds trained before a resume."""
        if self._report_under_way is not None:
            self._notify(self._report_under_way)
        started, start_step = time.perf_counter(), self.global_step
        while self.global_step < self.total and self._stop_reason is None:
            before = self.global_step
            done = self.iterate(Progress(before, self.horizon))
            if done is None:
                if self._signals.received is not None:
                    return
                self._save_overdue()
                continue
            self.global_step += done.steps
            self.iteration += 1
            metrics = done.metrics
            _check_finite(metrics, self.global_step)
            elapsed = time.perf_counter() - started
            metrics["time/elapsed"] = earlier + elapsed
            metrics["time/steps_per_second"] = (self.global_step - start_step) / elapsed
            self._report(IterationEnd(self.global_step, before, metrics))
            if self._signals.received is not None:
                return

    def _report(self, event: IterationEnd) -> None:
        self.metrics.update(event.metrics)
        last = event.step >= self.total
        if self.config.log_interval == 0 or event.crossed(self.config.log_interval) or last:
            self._log(event.metrics)
        self._notify(_Report(event, []))

    def _notify(self, report: _Report) -> None:
        """Notify the callbacks that have not been; `Paused` leaves the rest for the resumed run."""
        self._report_under_way = report
        for name, callback in self._named_callbacks():
            if name not in report.notified:
                callback.on_iteration(self, report.event)
                report.notified.append(name)
        self._report_under_way = None

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self._logger is not None:
            self._logger.write(self.global_step, metrics)

    def sync_log(self) -> None:
        """Make the metric log durable, so that a checkpoint never counts on rows that are lost."""
        if self._logger is not None:
            self._logger.jsonl.sync()

    def record_evaluation(self, result: EvalResult) -> None:
        """Log an evaluation and notify the callbacks."""
        metrics = result.metrics()
        self.metrics.update(metrics)
        self._log(metrics)
        for callback in self.callbacks:
            callback.on_evaluation(self, EvaluationEnd(self.global_step, result))

    def emit_checkpoint(self, path: Path) -> None:
        """Notify the callbacks that a checkpoint is on disk."""
        if self.env.has_unrecorded_episodes:
            record_inexactness(self.run_dir)
        for callback in self.callbacks:
            callback.on_checkpoint(self, CheckpointSaved(self.global_step, path))

    def close(self) -> None:
        """Release environments, files and the bar; safe to call twice."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            if self._lock is not None:
                stack.callback(self._lock.release)
            stack.callback(self.env.close)
            if self._logger is not None:
                stack.callback(self._logger.close)
                self._logger = None
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_close)

    def _write_summary(self, status: str, reason: str) -> None:
        path = self.run_dir / "summary.json"
        summary = {
            "format": 1,
            "status": status,
            "reason": reason,
            "global_step": self.global_step,
            "total_timesteps": self.total,
            "metrics": self.metrics,
        }
        if read_json(path) != summary:
            write_json(path, summary)

    def _last_checkpoint(self) -> str:
        path = self.run_dir / "checkpoints" / "last.pt"
        return f"the last checkpoint is {path}" if path.is_file() else "there is no checkpoint yet"

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run, whole: what a checkpoint holds."""
        return {
            "config": self.config.to_dict(),
            "custom_env": self.env_fn is not None,
            "obs_spec": self.env.obs_spec.to_plain(),
            "action_spec": self.env.action_spec.to_plain(),
            "algorithm": self.learner_state(),
            "training": {
                "actor": self.collector.actor.state_dict(),
                "collector": self.collector.state_dict(),
                "extra": self.extra_state(),
                "rng": global_rng_state(self.device),
                "counters": {
                    "global_step": self.global_step,
                    "iteration": self.iteration,
                    "total": self.total,
                    "horizon": self.horizon,
                    "threads": self.threads,
                    "log_offset": self._logger.jsonl.offset() if self._logger else None,
                },
                "metrics": {k: v for k, v in self.metrics.items() if not k.startswith("time/")},
                "callbacks": {
                    name: state
                    for name, callback in self._named_callbacks()
                    if (state := callback.state_dict())
                },
                "unfinished": self._unfinished_state(),
            },
        }

    def learner_state(self) -> dict[str, Any]:
        """The learner's state."""
        return self.algorithm.state_dict()

    @property
    def has_unfinished_work(self) -> bool:
        """Whether the run is within an iteration, a report or its ending."""
        return any(part is not None for part in self._unfinished_state().values())

    def _unfinished_state(self) -> dict[str, Any]:
        """What of an iteration, a report or the ending is to be continued after a resume."""
        report = None
        if self._report_under_way is not None:
            event, notified = self._report_under_way.event, self._report_under_way.notified
            waiting = [
                name
                for name, callback in self._named_callbacks()
                if name not in notified and not isinstance(callback, CheckpointCallback)
            ]
            if waiting:
                report = {
                    "previous_step": event.previous_step,
                    "metrics": dict(event.metrics),
                    "notified": list(notified),
                }
        return {
            "iteration": self.partial_state(),
            "report": report,
            "ending": self._stop_reason if self._signals.received is not None else None,
        }

    def _load_unfinished_state(self, state: Mapping[str, Any]) -> None:
        if state["iteration"] is not None:
            self.load_partial_state(state["iteration"])
        if (report := state["report"]) is not None:
            metrics = {str(name): float(value) for name, value in report["metrics"].items()}
            event = IterationEnd(self.global_step, int(report["previous_step"]), metrics)
            self._report_under_way = _Report(event, [str(name) for name in report["notified"]])
        if state["ending"] is not None:
            self._stop_reason = str(state["ending"])

    def partial_state(self) -> dict[str, Any] | None:
        """How far the current iteration got; None between iterations."""
        return None

    @abstractmethod
    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Restore that."""

    def extra_state(self) -> dict[str, Any]:
        """What a family keeps besides, a replay say."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any], *, empty_replay: bool) -> None:  # noqa: B027 - most have none
        """Restore that."""

    def cut_episodes(self, obs: Obs) -> None:  # noqa: B027 - most need nothing
        """The environments could not be restored: the stored episodes end at ``obs``."""

    def after_checkpoint(self, *, is_best: bool) -> None:  # noqa: B027 - most keep none
        """A checkpoint and its names are on disk: files of older ones may go."""

    def load_state_dict(self, state: Mapping[str, Any], *, empty_replay: bool = False) -> bool:
        """Restore a checkpoint; False where the environments could not be restored exactly."""
        training = state["training"]
        counters = training["counters"]
        self.algorithm.load_state_dict(state["algorithm"])
        self.collector.actor.load_state_dict(training["actor"])
        self.global_step, self.iteration, self.total, self.horizon = (
            _whole(counters, name) for name in ("global_step", "iteration", "total", "horizon")
        )
        offset = counters["log_offset"]
        self._log_offset = None if offset is None else _whole(counters, "log_offset")
        self.metrics = {str(name): float(value) for name, value in training["metrics"].items()}
        check_global_rng_state(training["rng"])
        self._rng = training["rng"]
        if (unfinished := training.get("unfinished")) is not None:
            self._load_unfinished_state(unfinished)
        self.load_extra_state(training["extra"], empty_replay=empty_replay)
        for name, callback in self._named_callbacks():
            if name in training["callbacks"]:
                callback.load_state_dict(training["callbacks"][name])
        with torch_threads(self.threads):
            exact = self.collector.load_state_dict(training["collector"])
        if not exact:
            obs: Any = tree_map(np.asarray, training["collector"]["obs"])
            self.cut_episodes(obs)
            # What was remembered may belong to other episodes.
            self.collector.actor.reset(np.ones(self.env.num_envs, bool))
        return exact

    def _named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), callback

    def _restore_rng(self) -> None:
        # Last, since building and replaying environments may draw from the global generators.
        if self._rng is not None:
            set_global_rng_state(self._rng)


def _whole(counters: Mapping[str, Any], name: str) -> int:
    value = counters[name]
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"'{name}' is {value!r}, not a count")
    return value


def _how_it_ended(error: BaseException) -> tuple[str, str]:
    """Status and reason of a run that did not end by itself."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"stopped at once ({error})" if str(error) else "stopped at once"
    return "failed", f"{type(error).__name__}: {error}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_finite(metrics: Mapping[str, float], step: int) -> None:
    for name, value in metrics.items():
        if not np.isfinite(value):
            raise NonFiniteError(
                f"{name} is {value} at step {step}: training diverged. A lower learning rate or"
                " normalised observations and rewards may help; the last checkpoint is intact"
            )
