"""The training loop: when to collect, learn, report and stop. It contains no math.

Words used here:

- *step*: one transition of one environment; `global_step` counts those that are learnt from. A
  run from a dataset alone steps no environment: there a step is an update.
- *iteration*: one collect and one learn.
- *update*: one gradient step.
- *source*: what collects experience (`ExperienceSource`); *learner*: what learns from it.
- *report*: log a row, evaluate, call the callbacks, save; it follows an iteration.

A signal, or a checkpoint that is overdue, pauses an iteration between two steps or two updates.
What the iteration has done so far is part of the checkpoint: the result does not depend on pauses.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.checkpointing import state_digest, to_storable
from rl_training.communicator import gather_state, local_state
from rl_training.errors import (
    EnvironmentFailure,
    LostWorkerError,
    NonFiniteError,
    Paused,
    StorageError,
    WorkerError,
)
from rl_training.eval import EvalResult
from rl_training.runs import (
    is_storage_error,
    read_json,
    record_resume,
    write_json,
)
from rl_training.runtime.callbacks import Callback, IterationEnd, TrainingEnd
from rl_training.runtime.device import keep_freed_memory, torch_threads
from rl_training.runtime.evaluation import Evaluations
from rl_training.runtime.experience import Learner, Timed
from rl_training.runtime.reporting import Reporter
from rl_training.runtime.rng import (
    GeneratorWatch,
    check_global_rng_state,
    global_rng_state,
    set_global_rng_state,
)
from rl_training.runtime.run_parts import Iteration, Setup, TrainResult, require_folder
from rl_training.runtime.sharded_source import ShardedSource
from rl_training.runtime.stopping import Stopping
from rl_training.tracking import Status
from rl_training.types import Progress

__all__ = ["Iteration", "Setup", "TrainResult", "Trainer"]

_SECONDS_BETWEEN_DISPLAYS = 0.25
_WATCHED_ITERATIONS = 10
"""First iterations in which uses of the global random generators are noticed."""
_OF_ENVIRONMENTS = (EnvironmentFailure, WorkerError, NonFiniteError)


class Trainer(ABC):
    """Collect, learn, report, until the end. A subclass defines one iteration."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        self.spec = setup.spec
        self.config = setup.config
        self.learner: Learner = setup.learner
        self.source = setup.source
        self.ranks = setup.ranks
        self.communicator = setup.ranks.communicator
        self.make_eval_env = setup.make_eval_env
        self.make_rendering_env = setup.make_rendering_env
        self.custom_env = setup.custom_env
        self.device = setup.device
        self.threads = setup.threads
        self.folder = setup.folder
        """The run folder; None: the run is kept in memory and nothing is written."""
        self.total = self.round_up(setup.config.total)
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
        self.stopping = Stopping(setup.ranks)
        self._evaluations = Evaluations(self)
        several_shards = self.communicator.shards > 1
        self._generator_watch = GeneratorWatch(_WATCHED_ITERATIONS if several_shards else 0)
        self._stop_reason: str | None = None
        self._rng: Mapping[str, Any] | None = None
        self._lock = setup.lock

    @property
    def run_dir(self) -> Path:
        """The run folder; raises `UserError` where the run is kept in memory."""
        return require_folder(self.folder)

    @property
    def stop_signal(self) -> str | None:
        """The name of the signal that stops the run; of several ranks, once all know of it."""
        return self.stopping.signal

    @property
    def log_info(self) -> tuple[str, ...]:
        """Keys of the last info of an episode that are logged."""
        return tuple(dict.fromkeys((*self.config.log_info, *self.source.info.log_info)))

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
        overdue = now >= self.pause_at
        if not self.ranks.several:  # called for every step: without a further call
            return overdue or self.stopping.signals.received is not None
        return self.stopping.poll(overdue=overdue) or self.stopping.signal is not None

    def _refresh_displays(self, now: float) -> None:
        if now >= self._show_at:
            self._show_at = now + _SECONDS_BETWEEN_DISPLAYS
            self.reporter.notify_progress(self.current_step())

    def current_step(self) -> int:
        """Return the global step within the current iteration, for displays."""
        return self.global_step

    def counted(self) -> int:
        """Return the steps or updates that a new end of the run is counted from."""
        return self.global_step

    def stops_work(self) -> bool:
        """Return whether work that a resume repeats must stop, because a signal arrived.

        A checkpoint that is overdue is written at once, with the state from before that work.
        """
        now = time.monotonic()
        self._refresh_displays(now)
        if self.stopping.poll(overdue=now >= self.pause_at):
            self._save_overdue()
        return self.stop_signal is not None

    def _save_overdue(self) -> None:
        self.pause_at = math.inf  # a checkpoint callback sets it again
        self._lead(self.reporter.notify_pause)

    def _commands(self) -> dict[str, Callable[..., Any]]:
        """Return what rank 0 may let the other ranks do, in parts of the run that it leads."""
        return {
            "policy_state": self._gathered_policy_state,
            "state": self._whole_state,
            "commit": self.commit_shards,
            "open_evaluation": self._evaluations.open,
            "evaluate": self._evaluations.evaluate,
        }

    def _lead(self, work: Callable[[], None]) -> None:
        """Do a part of the run that rank 0 leads; a stop that it requests is that of all ranks."""
        reason = self.ranks.lead(work, self._commands(), lambda: self._stop_reason)
        if self._stop_reason is None:
            self._stop_reason = reason

    def save_before_failure(self) -> None:
        """Write a checkpoint of the training so far: what follows it in a report has failed.

        A resume repeats the rest of the report.
        """

        def save() -> None:
            for callback in self.callbacks:
                with contextlib.suppress(Exception):  # the failure itself is what is raised
                    callback.on_pause(self)

        self.pause_at = math.inf
        self._lead(save)

    def open_evaluation(self, episodes: int) -> None:
        """Make the environments for evaluations of so many episodes."""
        with self.ranks.together("open_evaluation", episodes):
            self._evaluations.open(episodes)

    def evaluate(
        self, episodes: int, *, deterministic: bool = True
    ) -> tuple[EvalResult, dict[str, float]]:
        """Evaluate the current policy on environments of its own.

        Returns the result and the means of ``log_info``. Raises `Paused` where a signal arrived.
        """
        with self.ranks.together("evaluate", episodes, deterministic):
            return self._evaluations.evaluate(episodes, deterministic)

    def wait_for_ranks(self, *, failed: bool) -> bool:
        """Wait until every rank has finished its own part of some work; return whether one failed.

        Within such work only `stops_work` may be called. Raises `Paused` where a signal arrived
        and a rank had not finished.
        """
        while True:
            overdue = time.monotonic() >= self.pause_at
            decision = self.stopping.wait(overdue=overdue, failed=failed)
            if decision.failed:
                return True
            if decision.overdue:
                self._save_overdue()
            if not decision.waiting:
                return False
            if self.stop_signal is not None:
                raise Paused

    def train(self) -> TrainResult:
        """Run to the end, from wherever the trainer is."""
        try:
            if self.device.type == "cpu" and self.source.info.obs_spec.has_images:
                keep_freed_memory()
            with torch_threads(self.threads), self.stopping.watched():
                result = self._train()
        except BaseException as error:
            status, reason = _how_it_ended(error)
            raised = self._explained(error)
            self.ranks.fail(raised)
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                self._record_end(status, reason)
            with contextlib.suppress(Exception):  # nor must what then fails to close
                self.close()
            if raised is error:
                raise
            raise raised from error
        try:
            if self.folder is None:  # it may be trained further
                self._evaluations.close()
                self.reporter.close()
            else:
                self.close()
        except Exception as error:  # noqa: BLE001 - the run is complete and saved
            warnings.warn(
                f"the run is complete, but closing it failed ({_one_line(error)})", stacklevel=2
            )
        return result

    def _explained(self, error: BaseException) -> BaseException:
        """Return the error with the run folder or the last checkpoint in its message."""
        if isinstance(error, StorageError) or is_storage_error(error):
            return StorageError(f"{_one_line(error)}; {self._last_checkpoint()}")
        if self.folder is not None and isinstance(error, _OF_ENVIRONMENTS):
            first, newline, traceback = str(error).partition("\n")
            error.args = (f"{first} (run folder: {self.folder}){newline}{traceback}",)
        return error

    def _train(self) -> TrainResult:
        seconds_before = self.reporter.start()
        if self.resumed is not None and self.folder is not None and self.ranks.leads:
            record_resume(self.run_dir, **self.resumed)
        self._restore_rng()
        self.source.publish(self.learner.module, self.policy_version())
        self._lead(self.reporter.notify_start)
        with contextlib.suppress(Paused):
            self._iterations(seconds_before)
        reason = self._stop_reason or self.stop_signal or f"{self.config.total_setting} reached"
        interrupted = self.stop_signal is not None and self.global_step < self.total
        end = TrainingEnd(self.global_step, reason, interrupted)
        result = self.ranks.lead(
            lambda: self.reporter.notify_end(end), self._commands(), lambda: self._result(end)
        )
        if self.folder is None:
            self._rng = global_rng_state(self.device)
        self._record_end("interrupted" if result.interrupted else "finished", reason)
        return result

    def _result(self, end: TrainingEnd) -> TrainResult:
        return TrainResult(
            folder=self.folder,
            metrics={**self.metrics, "global_step": self.current_step()},
            stop_reason=end.reason,
            interrupted=end.interrupted or self.reporter.paused_at_end,
        )

    def _iterations(self, earlier: float) -> None:
        """Iterate and report to the end; ``earlier`` are seconds trained before a resume."""
        self._lead(self.reporter.continue_report)
        started, start_step = time.perf_counter(), self.current_step()
        while self.global_step < self.total and self._stop_reason is None:
            before = self.global_step
            with self._generator_watch:
                done = self._iterate(Progress(before, self.horizon))
            if done is None:
                if self.stop_signal is not None:
                    return
                self._save_overdue()
                continue
            self.global_step += done.steps
            self.iteration += 1
            metrics = done.metrics
            _check_finite(metrics, f"{self.config.unit.removesuffix('s')} {self.global_step}")
            elapsed = time.perf_counter() - started
            metrics["time/elapsed"] = earlier + elapsed
            rate = (self.global_step - start_step) / elapsed
            metrics[f"time/{self.config.unit}_per_second"] = rate
            event = IterationEnd(self.global_step, before, metrics)
            self._lead(lambda event=event: self.reporter.report(event))  # type: ignore[misc]
            if self.stop_signal is not None:
                return

    def _iterate(self, progress: Progress) -> Iteration | None:
        try:
            return self.iterate(progress)
        except LostWorkerError:  # its steps are in no buffer: a resume takes them again
            self.save_before_failure()
            raise

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks in the order in which they are notified."""
        return self.reporter.callbacks

    def source_metrics(self) -> dict[str, float]:
        """Return the metrics of recent episodes over all shards; all ranks call this."""
        if isinstance(self.source, ShardedSource):
            self.source.update_metrics()
        return self.source.metrics()

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
            stack.callback(self._evaluations.close)
            stack.callback(self.reporter.close)

    def _record_end(self, status: Status, reason: str) -> None:
        self.reporter.end_status = status
        if self.folder is None or not self.ranks.leads:
            return
        path = self.folder / "summary.json"
        summary = {
            "format": 1,
            "status": status,
            "reason": reason,
            "global_step": self.global_step,
            self.config.total_setting: self.total,
            "metrics": self.metrics,
        }
        if read_json(path) != summary:
            write_json(path, summary)

    def _last_checkpoint(self) -> str:
        if self.folder is None:
            return "nothing is saved: the run is kept in memory"
        path = self.folder / "checkpoints" / "last.pt"
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
        self.reporter.tracker_identities = before.tracker_identities
        if (report := before.unfinished_state()) is not None:
            self.reporter.load_unfinished_state(report)
        if self.stop_signal is None:
            self._stop_reason = None
        self.stopping = Stopping(self.ranks)

    # -- state ---------------------------------------------------------------------------------

    def policy_state(self) -> dict[str, Any]:
        """Return what makes the policy: config, spaces and the learner's state; on every rank."""
        with self.ranks.together("policy_state"):
            return self._gathered_policy_state()

    def _gathered_policy_state(self) -> dict[str, Any]:
        return gather_state(self._policy_state(), self.communicator)  # type: ignore[no-any-return]

    def _policy_state(self) -> dict[str, Any]:
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
        with self.ranks.together("state"):
            return self._whole_state()

    def _whole_state(self) -> dict[str, Any]:
        """Return the state of all shards; all ranks call this."""
        self._require_same_weights()
        if isinstance(self.source, ShardedSource):
            self.source.exact_elsewhere = True
            self.source.exact_elsewhere = self.ranks.everywhere(self.source.exactly_resumable)
        state = self._local_state()
        return gather_state(state, self.communicator, everywhere=False)  # type: ignore[no-any-return]

    def _require_same_weights(self) -> None:
        """Raise an error if ranks have different weights: something changed them on one alone."""
        if self.ranks.several:
            digest = state_digest(to_storable(self.learner.module.state_dict()))
            same = digest == self.ranks.share(digest)
            if not self.ranks.everywhere(same):
                raise RuntimeError(
                    "the ranks have different weights: a callback, which only rank 0 has, or a"
                    " network that draws its own random numbers changed them on one rank alone"
                )

    def _local_state(self) -> dict[str, Any]:
        return {
            **self._policy_state(),
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
            "ending": self._stop_reason if self.stop_signal is not None else None,
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

    def commit_files(self) -> None:
        """Write the files that `state_dict` names, so that a checkpoint can be written."""
        with self.ranks.together("commit"):
            self.commit_shards()

    def commit_shards(self) -> None:  # noqa: B027 - most have none
        """Write the files of the local shards that `state_dict` names."""

    def extra_state(self) -> dict[str, Any]:
        """Return further state of a subclass, for example of a replay."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any], *, empty_replay: bool) -> None:  # noqa: B027 - most have none
        """Restore the further state."""

    def cut_episodes(self, source_state: Mapping[str, Any]) -> None:  # noqa: B027 - most need nothing
        """End the episodes in the buffer: the source could not continue from its saved state."""

    def after_checkpoint(self, state: Mapping[str, Any], *, is_best: bool) -> None:  # noqa: B027 - most keep none
        """Delete files of older checkpoints: the one of ``state`` is on disk."""

    def load_state_dict(self, state: Mapping[str, Any], *, empty_replay: bool = False) -> bool:
        """Restore a checkpoint; False where the environments could not be restored exactly."""
        state = local_state(state, self.communicator)
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


def _whole(counters: Mapping[str, Any], name: str) -> int:
    value = counters[name]
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"'{name}' is {value!r}, not a count")
    return value


def _how_it_ended(error: BaseException) -> tuple[Status, str]:
    """Status and reason of a run that did not end by itself."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"stopped at once ({error})" if str(error) else "stopped at once"
    return "failed", f"{type(error).__name__}: {error}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_finite(metrics: Mapping[str, float], when: str) -> None:
    for name, value in metrics.items():
        if not np.isfinite(value):
            raise NonFiniteError(
                f"{name} is {value} at {when}: training diverged. A lower learning rate or"
                " normalised observations and rewards may help. Checkpoints are from before it"
            )
