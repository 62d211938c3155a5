"""Measure one short training run of a config, in its own process: ``python -m ... REQUEST``.

The request is JSON (see `Request`), the reply is JSON in the last line of the output. The run
differs from the config only where a few seconds would not be typical: warm-ups are short, epsilon
has its final value, and there are no evaluations or checkpoints at intervals.
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
from rl_training.runtime.offline import OfflineTrainer
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer

PARTS = ("environment", "inference", "storing", "update", "logging")
_WARM_UP_STEPS = 500
_FIRST_ITERATION = 50
_POLICY_PHASES = 2
_LARGEST_REPLAY = 50_000
_SHORT_ITERATION = 0.2
_ENDLESS = 10**9


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure."""

    settings: dict[str, Any]
    folder: str
    """Folder in which the run folder is created."""
    seconds: float
    """Seconds to measure, after the warm-up."""
    windows: int
    """Number of windows that this time is divided into, to measure the spread."""
    profile: bool
    """Also measure the time of each part of the loop, in one more window."""


@dataclasses.dataclass
class Reply:
    """What was measured."""

    device: str = "cpu"
    acceleration: str = "eager"
    rates: list[float] = dataclasses.field(default_factory=list)
    """Steps per second of each window."""
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    """Share of time per part; the rest is the loop itself."""
    transfer: float = 0.0
    """Share of time of copies to and from the device, which are part of the other shares."""
    checkpoint_seconds: float = 0.0
    error: str | None = None


def shortened(config: TrainConfig[Any], folder: str) -> TrainConfig[Any]:
    """Return the config of the measured run."""
    knobs = config.algo_kwargs
    changed: dict[str, Any] = {}
    if hasattr(knobs, "learning_starts") and not config.is_offline:
        changed["learning_starts"] = min(knobs.learning_starts, _WARM_UP_STEPS)
        # A replay buffer of a million images takes seconds to allocate.
        changed["buffer_size"] = min(knobs.buffer_size, _LARGEST_REPLAY)
    if hasattr(knobs, "exploration_initial_eps"):
        changed["exploration_initial_eps"] = knobs.exploration_final_eps
    if hasattr(knobs, "policy_phases"):
        # The time of an auxiliary phase is proportional to the number of rollouts before it.
        changed["policy_phases"] = min(knobs.policy_phases, _POLICY_PHASES)
    changed[config.total_setting] = _ENDLESS
    return config.with_overrides(
        output_dir=folder,
        progress=False,
        wandb=False,
        eval_episodes=0,
        checkpoint_interval=0,
        **changed,
    )


class Clock(Callback):
    """Measures windows of whole iterations after the warm-up, then stops the run."""

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
        self.reply.acceleration = trainer.config.acceleration
        if isinstance(trainer, OffPolicyTrainer | OfflineTrainer):
            self._longest_iteration = trainer.iteration_steps
            trainer.iteration_steps = min(_FIRST_ITERATION, trainer.iteration_steps)
        self._last = time.perf_counter()

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:
        """Record how long the checkpoint took."""
        del trainer
        self.reply.checkpoint_seconds = event.seconds

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Start and end windows."""
        _synchronize(trainer.device.type)
        before, now = self._last, time.perf_counter()
        self._lengthen(trainer, now)
        self._has_learnt |= any(name.startswith("losses/") for name in event.metrics)
        if not self._has_learnt:
            return
        self._iterations += 1
        if not self.reply.rates:  # a rough value, in case the process is stopped during warm-up
            rough = (event.step - event.previous_step) / (now - before)
            publish(dataclasses.replace(self.reply, rates=[rough]))
        # PPG runs an auxiliary phase every few iterations; each window must contain one.
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
            publish(reply)  # the process may be stopped before the rest is measured
            if len(reply.rates) == self._request.windows:
                if self._request.profile:
                    self._spent = time_parts(trainer)
                else:
                    trainer.request_stop("measured")

    def _lengthen(self, trainer: Trainer, now: float) -> None:
        """Lengthen iterations of fast steps, so that reporting takes a small share of the time."""
        if (
            isinstance(trainer, OffPolicyTrainer | OfflineTrainer)
            and now - self._last < _SHORT_ITERATION
        ):
            trainer.iteration_steps = min(2 * trainer.iteration_steps, self._longest_iteration)
        self._last = now


@dataclasses.dataclass(frozen=True)
class _Window:
    start: float
    step: int
    iteration: int


def time_parts(trainer: Trainer) -> dict[str, float]:
    """Return a dict in which the seconds of each part of the loop are summed from now on.

    The accelerator is synchronised after each part, so that work counts where it was launched.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    device = trainer.device.type  # only the name: a reference to the trainer would be a cycle

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
    """Print the reply so far as JSON; the parent reads the last line."""
    output = sys.__stdout__ or sys.stdout
    output.write("\n" + json.dumps(dataclasses.asdict(reply)) + "\n")
    output.flush()


def measure(request: Request) -> Reply:
    """Train as requested and return the speed."""
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
        # Output of an environment must not be read as the reply.
        with contextlib.redirect_stdout(sys.stderr):
            reply = measure(request)
    except UserError as error:
        reply = Reply(error=str(error))
    publish(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
