"""The training loop: when to collect, learn, report and stop. It contains no math.

Words used here:

- *step*: one transition of one environment; `global_step` counts those that are learnt from.
- *iteration*: one collect and one learn.
- *update*: one gradient step.
- *source*: what collects experience (`ExperienceSource`); *learner*: what learns from it.
- *report*: log a row, evaluate, call the callbacks, save; it follows an iteration.

A signal, or a checkpoint that is overdue, pauses an iteration between two steps or two updates.
What the iteration has done so far is part of the checkpoint: the result does not depend on pauses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rl_training.errors import (
    EnvironmentFailure,
    NonFiniteError,
    Paused,
    StorageError,
    UserError,
    WorkerError,
)
from rl_training.runs import (
    RunLock,
    is_storage_error,
    read_json,
    record_resume,
    write_json,
)
from rl_training.runtime.callbacks import Callback, IterationEnd, TrainingEnd
from rl_training.runtime.device import keep_freed_memory, torch_threads
from rl_training.runtime.experience import ExperienceSource, Learner, Timed
from rl_training.runtime.reporting import Reporter
from rl_training.runtime.rng import check_global_rng_state, global_rng_state, set_global_rng_state
from rl_training.runtime.signals import StopSignals
from rl_training.types import Progress

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.envs import VectorAdapter
    from rl_training.runtime.spec import AlgorithmSpec

_SECONDS_BETWEEN_DISPLAYS = 0.25
_OF_ENVIRONMENTS = (EnvironmentFailure, WorkerError, NonFiniteError)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    folder: Path | None
    """The run folder; None for a run that was kept in memory."""
    metrics: dict[str, float]
    """The last value of every metric, the last evaluation's and ``global_step`` included."""
    stop_reason: str
    interrupted: bool = False
    """Stopped by a signal: resume it."""

    def __repr__(self) -> str:
        """Return where the run is, how far it came and why it ended."""
        where = "None" if self.folder is None else f"'{self.folder}'"
        done = int(self.metrics.get("global_step", 0))
        return f"TrainResult(run_dir={where}, global_step={done}, stop_reason={self.stop_reason!r})"

    @property
    def run_dir(self) -> Path:
        """The run folder; raises `UserError` for a run that was kept in memory."""
        return _require_folder(self.folder)

    @property
    def checkpoint_path(self) -> Path:
        """The last checkpoint."""
        return self.run_dir / "checkpoints" / "last.pt"


@dataclasses.dataclass
class Setup:
    """What a trainer is made of."""

    spec: AlgorithmSpec
    config: TrainConfig[Any]
    learner: Any
    source: ExperienceSource
    make_eval_env: Callable[[int], VectorAdapter]
    """Makes the environments for so many evaluation episodes."""
    custom_env: bool
    """Whether environments are made by a function of the user's."""
    device: torch.device
    threads: int
    folder: Path | None = None
    """The run folder; None: nothing is written."""
    lock: RunLock | None = None


class Iteration(NamedTuple):
    """What one iteration did."""

    steps: int
    metrics: dict[str, float]


class Trainer(ABC):
    """Collect, learn, report, until the end. A subclass defines one iteration."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        self.spec = setup.spec
        self.config = setup.config
        self.learner: Learner = setup.learner
        self.source = setup.source
        self.make_eval_env = setup.make_eval_env
        self.custom_env = setup.custom_env
        self.device = setup.device
        self.threads = setup.threads
        self.folder = setup.folder
        """The run folder; None: the run is kept in memory and nothing is written."""
        self.total = self.round_up(setup.config.total_timesteps)
        self.horizon = self.total
        """The total that schedules are evaluated over."""
        self.global_step = 0
        self.iteration = 0
        self.reporter = Reporter(self, callbacks)
        self.resumed: dict[str, Any] | None = None
        """Of a resumed run: from which checkpoint and how, for its lineage."""
        self.pause_at = math.inf
        """Time (of `time.monotonic`) from which a checkpoint is overdue."""
        self.activity = ""
        """What the run is doing besides collecting and learning, for displays: "evaluating"."""
        self._show_at = 0.0
        self._learn: Callable[..., int] = setup.learner.learn
        self._signals = StopSignals()
        self._stop_reason: str | None = None
        self._rng: Mapping[str, Any] | None = None
        self._lock = setup.lock

    @property
    def run_dir(self) -> Path:
        """The run folder; raises `UserError` where the run is kept in memory."""
        return _require_folder(self.folder)

    @property
    def stop_signal(self) -> str | None:
        """The name of the signal that stops the run, once it arrived."""
        return self._signals.received

    @property
    def algorithm(self) -> Any:
        """The learner, an instance of the algorithm's own class."""
        return self.learner

    def measure(self, timed: Timed) -> None:
        """Call every part of the loop through ``timed`` from now on.

        ``timed(part, function)`` returns what is called instead of the function; the parts are
        "environment", "inference", "storing", "update" and "logging".
        """
        self.source.measure(timed)
        self._learn = timed("update", self.learner.learn)
        self.reporter.measure(timed)

    @staticmethod  # noqa: B027 - most need nothing
    def check(setup: Setup) -> None:
        """Refuse what the machine cannot hold, before a run folder is made."""

    @abstractmethod
    def round_up(self, total: int) -> int:
        """Return the number of steps of whole iterations, at least ``total``."""

    @abstractmethod
    def iterate(self, progress: Progress) -> Iteration | None:
        """Collect and learn once; None where it paused, to continue with the next call."""

    def policy_version(self) -> int:
        """Return the version of the weights that the source acts with: learning phases so far."""
        return self.iteration

    def log(self, name: str, value: float) -> None:
        """Log a number of the user's at the current step, like every other metric."""
        self.reporter.log_value(name, value)

    def request_stop(self, reason: str) -> None:
        """End the run after the current iteration."""
        if self._stop_reason is None:
            self._stop_reason = reason

    def pauses(self) -> bool:
        """Return whether an iteration must pause now: on a signal, or for an overdue checkpoint.

        Called between two steps and two updates, where it also refreshes displays.
        """
        now = time.monotonic()
        self._refresh_displays(now)
        return self._signals.received is not None or now >= self.pause_at

    def _refresh_displays(self, now: float) -> None:
        if now >= self._show_at:
            self._show_at = now + _SECONDS_BETWEEN_DISPLAYS
            self.reporter.notify_progress(self.current_step())

    def current_step(self) -> int:
        """Return the global step within the current iteration, for displays."""
        return self.global_step

    def stops_work(self) -> bool:
        """Return whether work that a resume repeats must stop, because a signal arrived.

        A checkpoint that is overdue is written at once, with the state from before that work.
        """
        now = time.monotonic()
        self._refresh_displays(now)
        if now >= self.pause_at:
            self._save_overdue()
        return self._signals.received is not None

    def _save_overdue(self) -> None:
        self.pause_at = math.inf  # a checkpoint callback sets it again
        self.reporter.notify_pause()

    def save_before_failure(self) -> None:
        """Write a checkpoint of the training so far: what follows it in a report has failed.

        A resume repeats the rest of the report.
        """
        with contextlib.suppress(Exception):  # the failure itself is what the user must see
            self._save_overdue()

    def train(self) -> TrainResult:
        """Run to the end, from wherever the trainer is."""
        try:
            if self.device.type == "cpu" and self.source.info.obs_spec.has_images:
                keep_freed_memory()
            with torch_threads(self.threads), self._signals.watched():
                result = self._train()
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                self._write_summary(*_how_it_ended(error))
            with contextlib.suppress(Exception):  # nor must what then fails to close
                self.close()
            if self.folder is not None and isinstance(error, _OF_ENVIRONMENTS):
                first, newline, traceback = str(error).partition("\n")
                error.args = (f"{first} (run folder: {self.folder}){newline}{traceback}",)
            if isinstance(error, StorageError) or is_storage_error(error):
                raise StorageError(f"{_one_line(error)}; {self._last_checkpoint()}") from error
            raise
        try:
            if self.folder is None:  # it may be trained further
                self.reporter.close()
            else:
                self.close()
        except Exception as error:  # noqa: BLE001 - the run is complete and saved
            warnings.warn(
                f"the run is complete, but closing it failed ({_one_line(error)})", stacklevel=2
            )
        return result

    def _train(self) -> TrainResult:
        seconds_before = self.reporter.start()
        if self.resumed is not None and self.folder is not None:
            record_resume(self.run_dir, **self.resumed)
        self._restore_rng()
        self.source.publish(self.learner.module, self.policy_version())
        self.reporter.notify_start()
        with contextlib.suppress(Paused):
            self._iterations(seconds_before)
        reason = self._stop_reason or self._signals.received or "total_timesteps reached"
        interrupted = self._signals.received is not None and self.global_step < self.total
        end = self.reporter.notify_end(TrainingEnd(self.global_step, reason, interrupted))
        if self.folder is None:
            self._rng = global_rng_state(self.device)
        self._write_summary("interrupted" if end.interrupted else "finished", reason)
        return TrainResult(
            folder=self.folder,
            metrics={**self.metrics, "global_step": self.current_step()},
            stop_reason=reason,
            interrupted=end.interrupted,
        )

    def _iterations(self, earlier: float) -> None:
        """Iterate and report to the end; ``earlier`` are seconds trained before a resume."""
        self.reporter.continue_report()
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
            self.reporter.report(IterationEnd(self.global_step, before, metrics))
            if self._signals.received is not None:
                return

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks in the order in which they are notified."""
        return self.reporter.callbacks

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return self.reporter.metrics

    def close(self) -> None:
        """Release environments, files and the progress bar; safe to call twice."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            if self._lock is not None:
                stack.callback(self._lock.release)
            stack.callback(self.source.close)
            stack.callback(self.reporter.close)

    def _write_summary(self, status: str, reason: str) -> None:
        if self.folder is None:
            return
        path = self.folder / "summary.json"
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

    def move_end(self, total: int) -> None:
        """Train up to ``total`` steps, even if a callback had requested a stop."""
        self.total = total
        self._stop_reason = None

    def prepare_more(self, callbacks: Sequence[Callback]) -> None:
        """Let a run that was kept in memory be trained again, from where it ended.

        Callbacks keep their states by name, and the global generators theirs, as on a resume.
        """
        before, self.reporter = self.reporter, Reporter(self, callbacks)
        self.reporter.load_state(before.metrics, before.callback_states(), None)
        if (report := before.unfinished_state()) is not None:
            self.reporter.load_unfinished_state(report)
        if self._signals.received is None:
            self._stop_reason = None
        self._signals = StopSignals()

    # -- state ---------------------------------------------------------------------------------

    def policy_state(self) -> dict[str, Any]:
        """Return what makes the policy: config, spaces and the learner's state."""
        return {
            "config": self.config.to_dict(),
            "custom_env": self.custom_env,
            "obs_spec": self.source.info.obs_spec.to_plain(),
            "action_spec": self.source.info.action_spec.to_plain(),
            "algorithm": self.learner_state(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole run, what a checkpoint holds; no file is written.

        The state may name files that `commit_files` writes.
        """
        return {
            **self.policy_state(),
            "training": {
                "source": self.source.state_dict(),
                "extra": self.extra_state(),
                "rng": global_rng_state(self.device),
                "counters": {
                    "global_step": self.global_step,
                    "iteration": self.iteration,
                    "total": self.total,
                    "horizon": self.horizon,
                    "threads": self.threads,
                    "log_offset": self.reporter.log_offset,
                },
                "metrics": self.reporter.saved_metrics(),
                "callbacks": self.reporter.callback_states(),
                "unfinished": self._unfinished_state(),
            },
        }

    def learner_state(self) -> dict[str, Any]:
        """Return the learner's state."""
        return self.learner.state_dict()

    @property
    def has_unfinished_work(self) -> bool:
        """Whether the run is within an iteration, a report or its ending."""
        return any(part is not None for part in self._unfinished_state().values())

    def _unfinished_state(self) -> dict[str, Any]:
        """Return what of an iteration, a report or the ending a resume must continue."""
        return {
            "iteration": self.partial_state(),
            "report": self.reporter.unfinished_state(),
            "ending": self._stop_reason if self._signals.received is not None else None,
        }

    def _load_unfinished_state(self, state: Mapping[str, Any]) -> None:
        if state["iteration"] is not None:
            self.load_partial_state(state["iteration"])
        if state["report"] is not None:
            self.reporter.load_unfinished_state(state["report"])
        if state["ending"] is not None:
            self._stop_reason = str(state["ending"])

    def partial_state(self) -> dict[str, Any] | None:
        """Return how far the current iteration got; None between iterations."""
        return None

    @abstractmethod
    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Restore a partial state."""

    def commit_files(self) -> None:  # noqa: B027 - most have none
        """Write the files that `state_dict` names, so that a checkpoint can be written."""

    def extra_state(self) -> dict[str, Any]:
        """Return further state of a subclass, for example of a replay."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any], *, empty_replay: bool) -> None:  # noqa: B027 - most have none
        """Restore the further state."""

    def cut_episodes(self, source_state: Mapping[str, Any]) -> None:  # noqa: B027 - most need nothing
        """End the episodes in the buffer: the source could not continue from its saved state."""

    def after_checkpoint(self, *, is_best: bool) -> None:  # noqa: B027 - most keep none
        """Delete files of older checkpoints: a checkpoint and its names are on disk."""

    def load_state_dict(self, state: Mapping[str, Any], *, empty_replay: bool = False) -> bool:
        """Restore a checkpoint; False where the environments could not be restored exactly."""
        training = state["training"]
        counters = training["counters"]
        self.learner.load_state_dict(state["algorithm"])
        self.global_step, self.iteration, self.total, self.horizon = (
            _whole(counters, name) for name in ("global_step", "iteration", "total", "horizon")
        )
        offset = counters["log_offset"]
        self.reporter.load_state(
            training["metrics"],
            training["callbacks"],
            None if offset is None else _whole(counters, "log_offset"),
        )
        check_global_rng_state(training["rng"])
        self._rng = training["rng"]
        if (unfinished := training.get("unfinished")) is not None:
            self._load_unfinished_state(unfinished)
        self.load_extra_state(training["extra"], empty_replay=empty_replay)
        with torch_threads(self.threads):
            exact = self.source.load_state_dict(training["source"])
        if not exact:
            self.cut_episodes(training["source"])
        return exact

    def _restore_rng(self) -> None:
        # Last, since building and replaying environments may draw from the global generators.
        if self._rng is not None:
            set_global_rng_state(self._rng)


def _require_folder(folder: Path | None) -> Path:
    if folder is None:
        raise UserError("this run is kept in memory (run_dir=None): it has no folder and no files")
    return folder


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
                " normalised observations and rewards may help. Checkpoints are from before it"
            )
