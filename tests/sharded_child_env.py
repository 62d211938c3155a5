"""A wrapper that does something wrong, or sends a signal, in one environment of one rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from rl_training.launched import rank, world_size


class Fault(NamedTuple):
    """What happens where: in step ``at`` of an environment, or in its reset where ``at`` is 0."""

    kind: str
    """"sigterm", "kill" or "raise" (what they do), or "nan" (the reward)."""
    rank: int
    env: int
    """Counted on its rank, in the order of creation: evaluation follows training."""
    at: int


FAULT = "SHARDED_FAULT"
"""Environment variable: the fault of a process, as "KIND:RANK:ENV:AT"."""
MARKER = "SHARDED_MARKER"
"""Environment variable: a file that a fault touches when it happens."""


def parse_fault(text: str) -> Fault | None:
    """Return the fault that a text describes; None if it is empty."""
    if not text:
        return None
    kind, *numbers = text.split(":")
    return Fault(kind, *map(int, numbers))


class _Plan:
    """The fault of the next run in this process."""

    fault = parse_fault(os.environ.get(FAULT, ""))
    made = 0
    counts = True
    """Whether steps are counted: not those that a resume repeats."""


NUM_ENVS = 4
"""Environments of training, of all ranks; those made after them are for evaluation."""
_SECONDS_PER_STEP = 0.03


def plan(fault: Fault | None) -> None:
    """Let the environments that are made from now on have a fault, or none, after `start`."""
    _Plan.fault, _Plan.made, _Plan.counts = fault, 0, False


def start() -> None:
    """Count steps from now on."""
    _Plan.counts = True


class Interruptible(gym.Wrapper[Any, Any, Any, Any]):
    """Follows the plan. Before a signal, steps of training take time: ranks exchange signals."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        fault, number = _Plan.fault, _Plan.made
        _Plan.made += 1
        trains = number < NUM_ENVS // world_size()
        waits = fault is not None and fault.kind == "sigterm" and trains
        self._seconds = _SECONDS_PER_STEP if waits else 0.0
        mine = fault is not None and (rank(), number) == (fault.rank, fault.env)
        self._fault = fault if mine else None
        self._steps = 0

    def reset(self, **kwargs: Any) -> Any:
        if self._fault is not None and self._fault.at == 0:
            self._act(self._fault.kind)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        self._steps += _Plan.counts
        obs, reward, terminated, truncated, info = super().step(action)
        if self._fault is not None and self._steps == self._fault.at:
            self._act(self._fault.kind)
            reward = float("nan") if self._fault.kind == "nan" else reward
        return obs, reward, terminated, truncated, {**info, "height": float(obs[2])}

    def _act(self, kind: str) -> None:
        if MARKER in os.environ:
            Path(os.environ[MARKER]).touch()
        if kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise RuntimeError("the pole fell on my foot")
