"""One short real run of a config, timed. A process of its own: ``python -m ... REQUEST``.

The request is JSON (see `Request`), the reply JSON on the last line. The run is that of the config
but for what would not show in a few seconds: warm-ups are short, epsilon is at its final value,
evaluation and checkpoints at intervals are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_training.config import TrainConfig, config_from_mapping
from rl_training.errors import UserError
from rl_training.runtime.callbacks import Callback, CheckpointSaved, IterationEnd
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer

PARTS = ("environment", "inference", "storing", "update", "logging")
_WARM_UP_STEPS = 500
_FIRST_ITERATION = 50
_SHORT_ITERATION = 0.2
_ENDLESS = 10**9


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure."""

    settings: dict[str, Any]
    folder: str
    """Where the run folder goes."""
    seconds: float
    """To measure for, after the warm-up."""
    windows: int
    """Parts of that time, for the spread between them."""
    profile: bool
    """Also measure where the time goes, in one more window."""


@dataclasses.dataclass
class Reply:
    """What was measured."""

    device: str = "cpu"
    rates: list[float] = dataclasses.field(default_factory=list)
    """Steps per second, window by window."""
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the time, by part; what is left is the loop itself."""
    transfer: float = 0.0
    """Share of the time in which memory is copied to or from the device (inside other parts)."""
    checkpoint_seconds: float = 0.0
    error: str | None = None


def shortened(config: TrainConfig[Any], folder: str) -> TrainConfig[Any]:
    """The config as it is measured."""
    knobs = config.algo_kwargs
    changed: dict[str, Any] = {}
    if hasattr(knobs, "learning_starts"):
        changed["learning_starts"] = min(knobs.learning_starts, _WARM_UP_STEPS)
    if hasattr(knobs, "exploration_initial_eps"):
        changed["exploration_initial_eps"] = knobs.exploration_final_eps
    return config.with_overrides(
        output_dir=folder,
        total_timesteps=_ENDLESS,
        progress=False,
        wandb=False,
        eval_episodes=0,
        checkpoint_interval=0,
        **changed,
    )


class Clock(Callback):
    """Times windows of whole iterations once the run is warm, then ends it."""

    def __init__(self, request: Request) -> None:
        self.reply = Reply()
        self._request = request
        self._has_learnt = False
        self._iterations = 0
        self._window: _Window | None = None
        self._spent: dict[str, float] | None = None
        self._copies: Any = None
        self._longest_iteration = 0
        self._last = 0.0

    def on_start(self, trainer: Trainer) -> None:
        """Begin with short iterations, so that slow steps are reported soon."""
        self.reply.device = trainer.device.type
        if isinstance(trainer, OffPolicyTrainer):
            self._longest_iteration = trainer.iteration_steps
            trainer.iteration_steps = min(_FIRST_ITERATION, trainer.iteration_steps)
        self._last = time.perf_counter()

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:
        """Note how long it took to write."""
        del trainer
        self.reply.checkpoint_seconds = event.seconds

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Open and close windows."""
        _synchronize(trainer.device.type)
        now = time.perf_counter()
        self._lengthen(trainer, now)
        self._has_learnt |= any(name.startswith("losses/") for name in event.metrics)
        if not self._has_learnt:
            return
        self._iterations += 1
        # PPG's auxiliary phase comes after so many iterations, and belongs to each window.
        cycle = int(getattr(trainer.config.algo_kwargs, "policy_phases", 1))
        if self._window is None:
            if self._iterations > max(2, cycle):
                self._window = _Window(now, event.step, self._iterations)
            return
        window, least = self._window, self._request.seconds / self._request.windows
        if now - window.start < least or (self._iterations - window.iteration) % cycle:
            return
        seconds, steps = now - window.start, event.step - window.step
        self._close(trainer, seconds, steps)
        self._window = _Window(time.perf_counter(), event.step, self._iterations)

    def _close(self, trainer: Trainer, seconds: float, steps: int) -> None:
        reply = self.reply
        if self._copies is not None:
            self._copies.stop()
            reply.transfer = _copying_seconds(self._copies) / seconds
            trainer.request_stop("measured")
        elif self._spent is not None:
            reply.shares = {name: spent / seconds for name, spent in self._spent.items()}
            if trainer.device.type == "cuda":
                self._copies = _watch_copies()
            else:
                trainer.request_stop("measured")
        else:
            reply.rates.append(steps / seconds)
            publish(reply)  # the time may be up before the rest is known
            if len(reply.rates) == self._request.windows:
                if self._request.profile:
                    self._spent = time_parts(trainer)
                else:
                    trainer.request_stop("measured")

    def _lengthen(self, trainer: Trainer, now: float) -> None:
        """Short iterations where steps are slow, long ones where reporting would weigh."""
        if isinstance(trainer, OffPolicyTrainer) and now - self._last < _SHORT_ITERATION:
            trainer.iteration_steps = min(2 * trainer.iteration_steps, self._longest_iteration)
        self._last = now


@dataclasses.dataclass(frozen=True)
class _Window:
    start: float
    step: int
    iteration: int


def time_parts(trainer: Trainer) -> dict[str, float]:
    """Return seconds spent in each part of the loop, which are counted from now on.

    An accelerator is waited for at the end of each, so that work counts where it was requested.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    device = trainer.device.type  # not the trainer, which would then refer to itself

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _synchronize(device)
                spent[part] += time.perf_counter() - start

        return run

    trainer.measure(timed)
    return spent


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def _watch_copies() -> Any:
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    return profiler


def _copying_seconds(profiler: Any) -> float:
    events = profiler.key_averages()
    copies = [e for e in events if "Memcpy" in e.key and ("HtoD" in e.key or "DtoH" in e.key)]
    return float(sum(e.device_time_total for e in copies)) / 1e6


def publish(reply: Reply) -> None:
    """Say what is known by now; the last line counts."""
    output = sys.__stdout__ or sys.stdout
    output.write("\n" + json.dumps(dataclasses.asdict(reply)) + "\n")
    output.flush()


def measure(request: Request) -> Reply:
    """Run, and say how fast it was."""
    clock = Clock(request)
    config = shortened(config_from_mapping(request.settings), request.folder)
    ExperimentManager.setup(config, callbacks=[clock]).train()
    return clock.reply


def main() -> int:
    """Entry point of the child process."""
    sys.path.insert(0, str(Path.cwd()))
    warnings.simplefilter("ignore")
    request = Request(**json.loads(sys.argv[1]))
    try:
        # What an environment prints must not be taken for the reply.
        with contextlib.redirect_stdout(sys.stderr):
            reply = measure(request)
    except UserError as error:
        reply = Reply(error=str(error))
    publish(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
