"""Callbacks: typed events in, `request_stop` out. Evaluation and checkpoints are callbacks too."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_training import checkpointing
from rl_training._internal.coerce import require
from rl_training.errors import ConfigError
from rl_training.eval import EvalResult, evaluate_actor
from rl_training.seeding import stream_seed, torch_stream
from rl_training.terminal import say

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from rl_training.envs import VectorAdapter
    from rl_training.runtime.trainer import Trainer

_CHECKPOINT_SECONDS = 300.0


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
    """Override what you need. ``trainer.request_stop(reason)`` ends the run after the iteration."""

    def on_start(self, trainer: Trainer) -> None:
        """Training starts, or a resumed run continues."""

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """An iteration ended."""

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        """An evaluation ended."""

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:
        """A checkpoint was saved."""

    def on_pause(self, trainer: Trainer) -> None:
        """A checkpoint is overdue, within an iteration or an evaluation."""

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Training ended."""

    def on_close(self) -> None:
        """Release what was taken; called however training ended."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume: plain values, arrays, tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""


class FunctionCallback(Callback):
    """Calls a function with the trainer and the event after every iteration."""

    def __init__(self, function: Callable[[Trainer, IterationEnd], object]) -> None:
        self._function = function

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Call it."""
        self._function(trainer, event)


Callbacks: TypeAlias = (
    "Callback | Callable[[Trainer, IterationEnd], object]"
    " | Sequence[Callback | Callable[[Trainer, IterationEnd], object]]"
)
"""What ``callbacks=`` takes: a callback, a function of trainer and event, or several of them."""


def as_callbacks(given: Callbacks) -> list[Callback]:
    """Return callbacks as a list; a plain function is called after every iteration."""
    several = given if isinstance(given, Sequence) else [given]
    found: list[Callback] = []
    for one in several:
        if isinstance(one, Callback):
            found.append(one)
        elif callable(one) and not isinstance(one, type):
            found.append(FunctionCallback(one))
        else:
            raise ConfigError(
                "callbacks must be Callback objects or functions of (trainer, event); got"
                f" {one!r}" + (": make an object of it" if isinstance(one, type) else "")
            )
    return found


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
    and training is never disturbed. Worker processes are started for each evaluation, so that they
    take no memory in between.
    """

    def __init__(self, interval: int, episodes: int, *, deterministic: bool = True) -> None:
        require(episodes >= 1, "eval_episodes", "at least 1", episodes)
        self.interval = interval
        self.episodes = episodes
        self.deterministic = deterministic
        self._env: VectorAdapter | None = None
        self._last_step = -1

    def on_start(self, trainer: Trainer) -> None:
        """Make the environments now: better to fail here than after the training."""
        self._open(trainer)
        self._close_workers(trainer)

    def _open(self, trainer: Trainer) -> VectorAdapter:
        if self._env is None:
            self._env = trainer.make_eval_env(self.episodes)
        return self._env

    def _close_workers(self, trainer: Trainer) -> None:
        if trainer.config.vectorization == "async":
            self.on_close()

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Evaluate where an interval was crossed."""
        if event.crossed(self.interval):
            self._evaluate(trainer)

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Evaluate the final policy, unless it just was or the run is to be resumed."""
        if not event.interrupted and self._last_step != trainer.global_step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        config, step = trainer.config, trainer.global_step
        sampling = None
        if not self.deterministic:
            sampling = torch_stream(config.seed, "evaluation_actions", step)
        actor = trainer.spec.eval_actor(trainer.learner, trainer.device, sampling)
        seed = stream_seed(config.seed, "evaluation", step)
        module = trainer.learner.module
        was_training = module.training
        module.eval()
        try:
            result = evaluate_actor(
                actor,
                self._open(trainer),
                num_episodes=self.episodes,
                seed=seed,
                stop=trainer.stops_work,
            )
        finally:
            module.train(was_training)
        self._close_workers(trainer)
        self._last_step = step
        trainer.reporter.record_evaluation(result)

    def on_close(self) -> None:
        """Close the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def state_dict(self) -> dict[str, Any]:
        """Which step was evaluated last."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
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
        checkpointing.save_checkpoint(path, trainer.state_dict())
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
        trainer.after_checkpoint(is_best=new_best)
        self._saved_at = time.monotonic()
        trainer.pause_at = self._saved_at + _CHECKPOINT_SECONDS
        trainer.reporter.checkpoint_saved(
            folder / f"last{checkpointing.SUFFIX}", self._saved_at - started
        )

    def state_dict(self) -> dict[str, Any]:
        """The best return so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.best = state["best"]


class ProgressCallback(Callback):
    """A live bar on a terminal; a line every few seconds elsewhere."""

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        self._seconds = seconds_between_lines
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._shown_at = 0.0

    def on_start(self, trainer: Trainer) -> None:
        """Put the bar up."""
        self._shown_at = time.monotonic()
        if sys.stderr is None or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.completed:,}/{task.total:,} steps"),
            BarColumn(),
            TextColumn("{task.fields[speed]:,.0f} steps/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("return {task.fields[ret]}"),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._bar.add_task(
            "", total=trainer.total, completed=trainer.global_step, speed=0.0, ret="-"
        )
        with contextlib.suppress(OSError):  # a terminal that is gone must not end a run
            self._bar.start()

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Move the bar, a few times a second at most."""
        now = time.monotonic()
        done = event.step >= trainer.total
        if not done and now - self._shown_at < (self._seconds if self._bar is None else 0.2):
            return
        self._shown_at = now
        speed = event.metrics["time/steps_per_second"]
        mean = event.metrics.get("rollout/return_mean")
        shown = "-" if mean is None else f"{mean:.1f}"
        if self._bar is not None and self._task is not None:
            with contextlib.suppress(OSError):
                self._bar.update(
                    self._task, completed=event.step, speed=speed, ret=shown, refresh=True
                )
        else:
            left = max(trainer.total - event.step, 0) / speed if speed > 0 else 0.0
            say(
                f"{event.step:,}/{trainer.total:,} steps  {speed:,.0f} steps/s  "
                f"ETA {left:.0f} s  return {shown}"
            )

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        """Show an evaluation within the run; the last one is part of the run's summary."""
        if event.step >= trainer.total:
            return
        result = event.result
        text = (
            f"evaluation at step {event.step:,}: return {result.mean_return:.1f}"
            f" over {len(result.returns)} episodes"
        )
        if self._bar is None:
            say(text)
            return
        with contextlib.suppress(OSError):
            self._bar.console.print(text, highlight=False)

    def on_close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with contextlib.suppress(OSError):
                bar.stop()
