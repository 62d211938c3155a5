"""Callbacks: typed events in, `request_stop` out. Evaluation and checkpoints are callbacks too."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rl_training import checkpointing
from rl_training._internal.coerce import require
from rl_training.errors import ConfigError, did_you_mean
from rl_training.eval import EvalResult
from rl_training.types import Array, Episode, Obs

if TYPE_CHECKING:
    from rl_training.runtime.trainer import Trainer

_CHECKPOINT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """Every environment took one step. The arrays are the ones in use: copy, do not change them.

    With several shards the event comes for each shard, with the rows of its environments; under
    torchrun for the shards of rank 0 alone, whose steps ``step`` then counts within an iteration.
    """

    step: int
    """Environment steps of the run so far, this one included."""
    obs: Obs
    """The observations that the actions were chosen for."""
    actions: Array
    """The actions that the environments received."""
    next_obs: Obs
    """What the actions led to; of an episode that ended, its last observation."""
    rewards: Array
    """As the environments returned them, before ``normalize_reward``."""
    terminated: Array
    truncated: Array
    valid: Array
    """False where an environment was only reset and ignored its action (native vectors)."""
    read_infos: Callable[[], list[dict[str, Any]]]

    @functools.cached_property
    def infos(self) -> list[dict[str, Any]]:
        """The info of each environment's step; where an episode ended, its final info."""
        return self.read_infos()


@dataclasses.dataclass(frozen=True)
class RolloutEnd:
    """Experience was collected and is learnt from next.

    On-policy a whole rollout, which is in ``trainer.buffer``; off-policy the steps up to the next
    updates (``train_freq``), which are the newest in ``trainer.replay``.
    """

    step: int
    """Environment steps of the run so far, these included."""
    steps: int
    """Environment steps that were collected."""
    episodes: tuple[Episode, ...]
    """Episodes that ended meanwhile (under torchrun those of rank 0's shards); after a resume
    within a rollout: those since the resume."""


@dataclasses.dataclass(frozen=True)
class UpdateEnd:
    """A learning phase ended."""

    step: int
    """Environment steps of the run so far."""
    updates: int
    """Gradient steps of the phase; a pause divides it into two events."""
    read_metrics: Callable[[], Mapping[str, float]]

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        """Losses and the like, by the names they are logged under.

        On-policy means over the phase; off-policy means over the updates since the last row of
        metrics, which are transferred from the device when they are read.
        """
        return self.read_metrics()


@dataclasses.dataclass(frozen=True)
class IterationEnd:
    """A rollout was collected and learnt from."""

    step: int
    previous_step: int
    metrics: Mapping[str, float]

    def crossed(self, interval: int) -> bool:
        """Whether a multiple of ``interval`` lies in this iteration (0: never)."""
        return interval > 0 and self.step // interval > self.previous_step // interval


@dataclasses.dataclass(frozen=True)
class EvaluationEnd:
    """An evaluation was played."""

    step: int
    result: EvalResult
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """As logged: ``eval/return_mean`` and the like, and the means of ``log_info``."""


@dataclasses.dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on disk."""

    step: int
    path: Path
    seconds: float = 0.0
    """Time that it took to write."""


@dataclasses.dataclass(frozen=True)
class TrainingEnd:
    """The loop ended; ``interrupted`` runs are to be resumed, not concluded."""

    step: int
    reason: str
    interrupted: bool


class Callback:
    """Override the events you need; those that are not overridden cost nothing.

    ``trainer.request_stop(reason)`` ends the run after the current iteration. So does an event
    that returns False, if its return type below allows it.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Training starts, or a resumed run continues."""

    def on_step(self, trainer: Trainer, event: StepEnd) -> bool | None:
        """Every environment took one step. Slow for fast environments: it is called for each."""

    def on_rollout(self, trainer: Trainer, event: RolloutEnd) -> bool | None:
        """Experience was collected; learning from it is next."""

    def on_update(self, trainer: Trainer, event: UpdateEnd) -> bool | None:
        """A learning phase ended."""

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> bool | None:
        """An iteration ended: its metrics are logged."""

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> bool | None:
        """An evaluation ended."""

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:
        """A checkpoint was saved."""

    def on_progress(self, trainer: Trainer, step: int) -> None:
        """Training is at ``step``, within an iteration: for displays, a few times a second.

        When it is called depends on the clock, so that nothing the run computes or logs may depend
        on it. Only callbacks that override it are called.
        """

    def on_pause(self, trainer: Trainer) -> None:
        """A checkpoint is overdue, within an iteration or an evaluation."""

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Training ended."""

    def on_close(self) -> None:
        """Release resources; called however training ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a resume: plain values, arrays, tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


def overrides(callback: Callback, event: str) -> bool:
    """Return whether a callback has its own method for an event, for example ``"on_step"``."""
    own = getattr(callback, event)
    return getattr(own, "__func__", own) is not getattr(Callback, event)


def returned_false(result: object) -> bool:
    """Return whether a callback returned False, which ends the run; None and others do not."""
    return isinstance(result, (bool, np.bool_)) and not result


class FunctionCallback(Callback):
    """Calls a function after every iteration; the run ends where the function returns False."""

    def __init__(self, function: Callable[[Trainer, IterationEnd], object]) -> None:
        self._function = function

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> bool | None:
        """Call it."""
        return False if returned_false(self._function(trainer, event)) else None

    def __str__(self) -> str:
        """Return the function's name."""
        return str(getattr(self._function, "__name__", self._function))


Callbacks: TypeAlias = (
    "Callback | Callable[[Trainer, IterationEnd], object]"
    " | Sequence[Callback | Callable[[Trainer, IterationEnd], object]] | None"
)
"""What ``callbacks=`` takes: a callback, a function of trainer and event, or several of them."""


def as_callbacks(given: Callbacks) -> list[Callback]:
    """Return callbacks as a list; a plain function is called after every iteration."""
    several = [] if given is None else given if isinstance(given, Sequence) else [given]
    found: list[Callback] = []
    for one in several:
        if isinstance(one, Callback):
            _check_methods(one)
            found.append(one)
        elif callable(one) and not isinstance(one, type):
            _check_signature(one)
            found.append(FunctionCallback(one))
        else:
            raise ConfigError(
                "callbacks must be Callback objects or functions of (trainer, event); got"
                f" {one!r}"
                + (": make an object of it" if isinstance(one, type) else "")
                + (" (derive from rl_training.Callback)" if hasattr(one, "_on_step") else "")
            )
    return found


def _check_methods(callback: Callback) -> None:
    """Refuse a method that looks like that of an event and would never be called."""
    events = [name for name in dir(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in events:
            raise ConfigError(
                f"{type(callback).__name__}.{name} is not the method of an event."
                f"{did_you_mean(name, events)}"
            )


def _check_signature(function: Callable[..., object]) -> None:
    """Refuse a function that cannot be called with a trainer and an event."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", function)
        raise ConfigError(
            f"a callback function takes two arguments, (trainer, event); {name} does not"
        ) from None
    except ValueError:  # a function without a signature
        return


class StopOnReturn(Callback):
    """Stops once an evaluation's mean return reaches a threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        """Compare."""
        if event.result.mean_return >= self.threshold:
            trainer.request_stop(
                f"return {event.result.mean_return:.1f} reached the threshold {self.threshold:g}"
            )


class EvaluationCallback(Callback):
    """Evaluates at step intervals and at the end, on environments of its own.

    The episodes of an evaluation depend on the run's seed and the step alone: nothing to save,
    and training is never disturbed.
    """

    def __init__(self, interval: int, episodes: int, *, deterministic: bool = True) -> None:
        require(episodes >= 1, "eval_episodes", "at least 1", episodes)
        self.interval = interval
        self.episodes = episodes
        self.deterministic = deterministic
        self._last_step = -1

    def on_start(self, trainer: Trainer) -> None:
        """Make the environments now: better to fail here than after the training."""
        trainer.open_evaluation(self.episodes)

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Evaluate where an interval was crossed."""
        if event.crossed(self.interval):
            self._evaluate(trainer)

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Evaluate the final policy, unless it just was or the run is to be resumed."""
        if not event.interrupted and self._last_step != trainer.global_step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        result, info_means = trainer.evaluate(self.episodes, deterministic=self.deterministic)
        self._last_step = trainer.global_step
        trainer.reporter.record_evaluation(result, info_means)

    def state_dict(self) -> dict[str, Any]:
        """Which step was evaluated last."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._last_step = int(state["last_step"])


class CheckpointCallback(Callback):
    """Saves at the start, at step intervals (and every five minutes), at a new best, at the end."""

    def __init__(self, interval: int, keep: int) -> None:
        self.interval = interval
        self.keep = keep
        self.best: float | None = None
        self._new_best = False
        self._evaluated = False
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def on_start(self, trainer: Trainer) -> None:
        """A run has a checkpoint from its first moment on."""
        for leftover in (trainer.run_dir / "checkpoints").glob(".*.tmp"):
            leftover.unlink()  # of a process killed while it saved
        trainer.pause_at = self._saved_at + _CHECKPOINT_SECONDS
        if trainer.global_step == 0 and not trainer.has_unfinished_work:
            self._save(trainer)

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        """Note a new best; it is saved once the iteration is complete."""
        self._evaluated = True
        if self.best is None or event.result.mean_return > self.best:
            self.best = event.result.mean_return
            self._new_best = True

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Save where the interval was crossed, at a new best, when late, and at the end."""
        late = time.monotonic() - self._saved_at > _CHECKPOINT_SECONDS
        last = event.step >= trainer.total  # before the final evaluation, which may fail
        if self._new_best or late or last or event.crossed(self.interval):
            self._save(trainer)

    def on_pause(self, trainer: Trainer) -> None:
        """Save within an iteration or an evaluation that takes long."""
        self._save(trainer)

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Save the final state, its evaluation included, unless it was just saved."""
        new = self._evaluated or self._saved_step != trainer.global_step
        if new or trainer.has_unfinished_work:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        started = time.monotonic()
        folder = trainer.run_dir / "checkpoints"
        new_best, self._new_best = self._new_best, False
        self._evaluated = False
        self._saved_step = trainer.global_step
        path = folder / f"step_{trainer.global_step:012d}{checkpointing.SUFFIX}"
        trainer.reporter.sync_log()
        trainer.commit_files()
        state = trainer.state_dict()
        checkpointing.save_checkpoint(path, state)
        if new_best:
            checkpointing.link_checkpoint(path, folder / f"best{checkpointing.SUFFIX}")
        checkpointing.link_checkpoint(path, folder / f"last{checkpointing.SUFFIX}")
        # By step, since a clock may be set back. Steps beyond this one were left behind when the
        # run was resumed from an older checkpoint: they go first.
        numbered = sorted(
            folder.glob(f"step_*{checkpointing.SUFFIX}"),
            key=lambda p: (
                (step := checkpointing.checkpoint_step(p)) <= trainer.global_step,
                step,
            ),
        )
        checkpointing.prune(numbered[: -self.keep])
        trainer.after_checkpoint(state, is_best=new_best)
        self._saved_at = time.monotonic()
        trainer.pause_at = self._saved_at + _CHECKPOINT_SECONDS
        trainer.reporter.checkpoint_saved(
            folder / f"last{checkpointing.SUFFIX}", self._saved_at - started
        )

    def state_dict(self) -> dict[str, Any]:
        """The best return so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.best = state["best"]


def __getattr__(name: str) -> Any:
    if name == "ProgressCallback":  # its earlier place
        from rl_training.runtime.console import ProgressCallback

        return ProgressCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
