"""The training loop. It owns cadence (when to collect, learn, report, stop) and holds no math.

A *step* is one transition of one environment; `global_step` counts those that are learnt from.
An *iteration* is one collect and one learn. An *update* is one gradient step. An *episode* ends
by termination or truncation. Everything happens at iteration boundaries, and so do checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_training.errors import NonFiniteError, UserError
from rl_training.logging import MetricLogger
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runs import read_json, record_resume, write_json
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
from rl_training.runtime.rng import global_rng_state, set_global_rng_state
from rl_training.types import Progress

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
        self.callbacks = self._with_standard(callbacks)
        self._stop_reason: str | None = None
        self._interrupted = False
        self._log_offset: int | None = None
        self._logger: MetricLogger | None = None
        self._rng: Mapping[str, Any] | None = None
        self._lock_descriptor: int | None = None

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
    def iterate(self, progress: Progress) -> tuple[int, dict[str, float]]:
        """Collect and learn once: how many steps that was, and its metrics."""

    def request_stop(self, reason: str) -> None:
        """End the run after the current iteration."""
        if self._stop_reason is None:
            self._stop_reason = reason

    def train(self) -> TrainResult:
        """Run to the end, from wherever the trainer stands."""
        try:
            if self.device.type == "cpu" and self.env.obs_spec.has_images:
                keep_freed_memory()
            with torch_threads(self.threads), self._signals():
                return self._train()
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                self._write_summary("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()

    def _train(self) -> TrainResult:
        self._lock()
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
        started, start_step = time.perf_counter(), self.global_step
        while self.global_step < self.total and self._stop_reason is None:
            before = self.global_step
            steps, metrics = self.iterate(Progress(before, self.horizon))
            self.global_step += steps
            self.iteration += 1
            _check_finite(metrics, self.global_step)
            elapsed = time.perf_counter() - started
            metrics["time/elapsed"] = self._logger.jsonl.elapsed + elapsed
            metrics["time/steps_per_second"] = (self.global_step - start_step) / elapsed
            self._report(IterationEnd(self.global_step, before, metrics))
        reason = self._stop_reason or "total_timesteps reached"
        interrupted = self._interrupted and self.global_step < self.total
        end = TrainingEnd(self.global_step, reason, interrupted)
        for callback in self.callbacks:
            callback.on_end(self, end)
        self._write_summary("interrupted" if interrupted else "finished", reason)
        return TrainResult(
            run_dir=self.run_dir,
            checkpoint_path=self.run_dir / "checkpoints" / "last.pt",
            metrics={**self.metrics, "global_step": self.global_step},
            stop_reason=reason,
            interrupted=interrupted,
        )

    def _report(self, event: IterationEnd) -> None:
        self.metrics.update(event.metrics)
        last = event.step >= self.total
        if self.config.log_interval == 0 or event.crossed(self.config.log_interval) or last:
            self._log(event.metrics)
        for callback in self.callbacks:
            callback.on_iteration(self, event)

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self._logger is not None:
            self._logger.write(self.global_step, metrics)

    def record_evaluation(self, result: EvalResult) -> None:
        """Log an evaluation and tell the callbacks."""
        metrics = result.metrics()
        self.metrics.update(metrics)
        self._log(metrics)
        for callback in self.callbacks:
            callback.on_evaluation(self, EvaluationEnd(self.global_step, result))

    def emit_checkpoint(self, path: Path) -> None:
        """Tell the callbacks that a checkpoint is on disk."""
        for callback in self.callbacks:
            callback.on_checkpoint(self, CheckpointSaved(self.global_step, path))

    def close(self) -> None:
        """Release environments, files and the bar; safe to call twice."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            stack.callback(self._unlock)
            stack.callback(self.env.close)
            if self._logger is not None:
                stack.callback(self._logger.close)
                self._logger = None
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_close)

    def _lock(self) -> None:
        """Two processes in one run folder would ruin it."""
        if os.name != "posix":
            return
        import fcntl

        descriptor = os.open(self.run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{self.run_dir} is being trained by another process") from None
        else:
            self._lock_descriptor = descriptor

    def _unlock(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

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

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run, whole: what a checkpoint holds."""
        return {
            "config": self.config.to_dict(),
            "custom_env": self.env_fn is not None,
            "obs_spec": self.env.obs_spec.to_plain(),
            "action_spec": self.env.action_spec.to_plain(),
            "algorithm": self.algorithm.state_dict(),
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
            },
        }

    def extra_state(self) -> dict[str, Any]:
        """What a family keeps besides, a replay say."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any], *, empty_replay: bool) -> None:  # noqa: B027 - most have none
        """Bring that back."""

    def after_checkpoint(self, *, is_best: bool) -> None:  # noqa: B027 - most keep none
        """A checkpoint and its names are on disk: files of older ones may go."""

    def load_state_dict(self, state: Mapping[str, Any], *, empty_replay: bool = False) -> bool:
        """Stand where a checkpoint stood; False where the environments could not, exactly."""
        training = state["training"]
        counters = training["counters"]
        self.algorithm.load_state_dict(state["algorithm"])
        self.collector.actor.load_state_dict(training["actor"])
        self.global_step = int(counters["global_step"])
        self.iteration = int(counters["iteration"])
        self.total = int(counters["total"])
        self.horizon = int(counters["horizon"])
        self._log_offset = counters["log_offset"]
        self.metrics = dict(training["metrics"])
        self._rng = training["rng"]
        self.load_extra_state(training["extra"], empty_replay=empty_replay)
        for name, callback in self._named_callbacks():
            if name in training["callbacks"]:
                callback.load_state_dict(training["callbacks"][name])
        with torch_threads(self.threads):
            exact = self.collector.load_state_dict(training["collector"])
        if not exact:  # what was remembered may belong to other episodes
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

    # -- signals -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run at the next boundary; a second, at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, frame: FrameType | None) -> None:
            del frame
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self._stop_reason = signal.Signals(number).name
            text = (
                f"\n{self._stop_reason}: finishing this iteration, then saving (again: at once)\n"
            )
            os.write(2, text.encode())  # a buffered write may be under way

        for number in previous:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _check_finite(metrics: Mapping[str, float], step: int) -> None:
    for name, value in metrics.items():
        if not np.isfinite(value):
            raise NonFiniteError(
                f"{name} is {value} at step {step}: training diverged. A lower learning rate or"
                " normalised observations and rewards may help; the last checkpoint is intact"
            )
