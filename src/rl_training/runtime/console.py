"""What a run shows while it trains: a live table on a terminal, short lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from rl_training.runtime.callbacks import (
    Callback,
    CheckpointCallback,
    CheckpointSaved,
    EvaluationEnd,
    IterationEnd,
    TrainingEnd,
)
from rl_training.runtime.console_table import Status, as_ascii, duration, speed_text, table
from rl_training.runtime.signals import stop_message
from rl_training.terminal import one_line, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from rl_training.runtime.trainer import Trainer

_SECONDS_BETWEEN_REFRESHES = 0.25
_SHARE_OF_TIME = 0.01
"""Refreshing takes at most this share of the run's time."""
_SPEED_SECONDS = 30.0
"""The speed shown is the mean over about this many seconds."""


class ProgressCallback(Callback):
    """Shows how training is going, on standard error.

    On a terminal a table that is refreshed in place, and that stays as it was last when the run
    ends. Elsewhere (a file, a pipe, a notebook) a line every few seconds.
    """

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        self._seconds = seconds_between_lines
        self._trainer: Trainer | None = None
        self._live: Live | None = None
        self._reset(0)

    def _reset(self, step: int) -> None:
        now = time.monotonic()
        self._step = step
        self._started = self._next = now
        self._samples = deque([(now, step)])
        """Times and steps of the last refreshes."""
        self._history: deque[tuple[int, dict[str, float]]] = deque()
        """Steps and metrics of the rollouts, of the last tenth of the run."""
        self._evaluations: list[tuple[int, float]] = []
        self._best: tuple[int | None, float] | None = None
        self._checkpoint: tuple[int, float] | None = None
        self._note = ""
        self._signal_shown = False

    def on_start(self, trainer: Trainer) -> None:
        """Show the table, or the first line."""
        self._reset(trainer.current_step())
        self._trainer = trainer
        for callback in trainer.callbacks:
            if isinstance(callback, CheckpointCallback) and callback.best is not None:
                self._best = (None, callback.best)
        if _is_terminal():
            self._open()
        else:
            self._next += self._seconds
            say(_first_line(trainer))

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # Printed text appears above the table. Output that is redirected to a file stays there.
        to_terminal = sys.stdout is not None and sys.stdout.isatty()
        console = Console(stderr=True, highlight=False, markup=False)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=to_terminal)
        with contextlib.suppress(OSError):  # a terminal that is gone must not end a run
            self._live.start()

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Show the step, a few times a second at most, and the last one in any case."""
        self._show(trainer, event.step, at_once=event.step >= trainer.total)

    def on_progress(self, trainer: Trainer, step: int) -> None:
        """Show the step, a few times a second at most."""
        self._show(trainer, step)

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        """Show the evaluation."""
        mean = event.result.mean_return
        self._evaluations.append((event.step, mean))
        is_best = self._best is None or mean > self._best[1]
        if is_best:
            self._best = (event.step, mean)
        if self._live is not None:
            self._show(trainer, event.step, at_once=True)
            return
        spread = event.result.metrics()["eval/return_std"]
        when = f"{_unit(trainer)} {event.step:,}"
        say(
            f"evaluation at {when}: return {mean:.1f} +/- {spread:.1f} over"
            f" {len(event.result.returns)} episodes{' (best so far)' if is_best else ''}"
        )

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:  # noqa: ARG002
        """Show when the last checkpoint was saved."""
        self._checkpoint = (trainer.current_step(), time.monotonic())

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Show why the run ends, where it is not at its last step."""
        early = event.step < trainer.total
        reason = one_line(event.reason)
        self._note = f"ended: {reason}" if early else "finished"
        if event.interrupted:
            self._note = f"interrupted ({reason}): resume the run to finish it"
        if self._live is not None:
            self._show(trainer, trainer.current_step(), at_once=True)
        elif early and not event.interrupted:
            say(f"training ended at {_unit(trainer)} {event.step:,}: {event.reason}")

    def on_close(self) -> None:
        """Leave the table as it is now on the terminal."""
        trainer, self._trainer = self._trainer, None
        if self._live is None:
            return
        if trainer is not None:
            self._show(trainer, self._step, at_once=True)
        live, self._live = self._live, None
        with contextlib.suppress(OSError):
            live.stop()

    def _show(self, trainer: Trainer, step: int, *, at_once: bool = False) -> None:
        now = time.monotonic()
        self._step = step
        if now < self._next and not at_once:
            return
        self._samples.append((now, step))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _SPEED_SECONDS:
            self._samples.popleft()
        if self._live is None:
            self._next = now + self._seconds
            _say_line(self._status(trainer, now))
            return
        with contextlib.suppress(OSError):
            self._refresh(trainer, now, self._live)
        took = time.monotonic() - now
        self._next = now + max(_SECONDS_BETWEEN_REFRESHES, took / _SHARE_OF_TIME)

    def _refresh(self, trainer: Trainer, now: float, live: Live) -> None:
        from rich.console import Group

        self._sample_history(trainer)
        self._make_room(trainer, live.console)
        size = live.console.size
        lines = table(self._status(trainer, now), size.width, size.height)
        if live.console.options.ascii_only:
            lines = [as_ascii(line) for line in lines]
        live.update(Group(*lines), refresh=True)

    def _make_room(self, trainer: Trainer, console: Console) -> None:
        """Erase the message of a signal, which was written below the table, and show a note."""
        message = _signal_message(trainer)
        if message is None or self._signal_shown:
            return
        self._signal_shown = True
        self._note = self._note or message
        below = 1 + -(-len(message) // max(console.width, 1))
        console.file.write(f"\x1b[{below}A\r\x1b[J")

    def _sample_history(self, trainer: Trainer) -> None:
        """Keep the returns of the last tenth of the run, to show how they changed."""
        rollout = {k: v for k, v in trainer.metrics.items() if k.startswith("rollout/")}
        if not rollout:
            return
        last = self._history[-1][0] if self._history else -trainer.total
        if self._step - last >= trainer.total / 100:
            self._history.append((self._step, rollout))
        while len(self._history) > 1 and self._history[1][0] <= self._step - trainer.total / 10:
            self._history.popleft()

    def _status(self, trainer: Trainer, now: float) -> Status:
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        seconds = last_time - first_time
        since = self._history[0] if self._history and self._history[0][0] < self._step else None
        saved = self._checkpoint
        return Status(
            title=_title(trainer),
            folder=_folder(trainer),
            step=self._step,
            total=trainer.total,
            elapsed=trainer.reporter.earlier_seconds + now - self._started,
            speed=(last_step - first_step) / seconds if seconds > 0 else 0.0,
            metrics={**trainer.metrics, **trainer.source.metrics()},
            since=since,
            evaluations=tuple(self._evaluations),
            best=self._best,
            checkpoint=None if saved is None else (saved[0], now - saved[1]),
            note=self._note or trainer.activity,
            unit=trainer.config.unit,
        )


def _is_terminal() -> bool:
    """Whether standard error is a terminal on which the cursor can be moved."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


def _signal_message(trainer: Trainer) -> str | None:
    """The line that was written when a signal arrived; None: none did."""
    return None if trainer.stop_signal is None else stop_message(trainer.stop_signal)


def _unit(trainer: Trainer) -> str:
    return trainer.config.unit.removesuffix("s")


def _title(trainer: Trainer) -> str:
    config = trainer.config
    if config.is_offline:
        device = trainer.device.type
        return one_line(
            f"{config.algo.upper()} from {config.dataset}, {device}, seed {config.seed}"
        )
    envs = f"{config.num_envs} environment{'s' if config.num_envs > 1 else ''}"
    if config.shards > 1:
        count = trainer.communicator.world_size
        envs += f" in {config.shards} shards on {count} process{'es' if count > 1 else ''}"
    return one_line(
        f"{config.algo.upper()} on {config.env_id}, {envs}, {trainer.device.type},"
        f" seed {config.seed}"
    )


def _first_line(trainer: Trainer) -> str:
    step = trainer.current_step()
    unit = trainer.config.unit
    done = f" from {_unit(trainer)} {step:,}" if step else ""
    threads = f"{trainer.threads} thread{'s' if trainer.threads > 1 else ''}"
    return f"{_title(trainer)}, {threads}: {trainer.total:,} {unit}{done} -> {_folder(trainer)}"


def _folder(trainer: Trainer) -> str:
    return "not saved" if trainer.folder is None else one_line(str(trainer.folder))


def _say_line(status: Status) -> None:
    mean = status.metrics.get("rollout/return_mean")
    say(
        f"{status.step:,}/{status.total:,} {status.unit}  {speed_text(status.speed)}"
        f" {status.unit}/s  ETA {duration(status.seconds_left)}"
        + ("" if status.unit == "updates" else f"  return {'-' if mean is None else f'{mean:.1f}'}")
    )
