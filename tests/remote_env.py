"""An environment that logs its steps, for tests of workers in other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np


class LoggedEnv(gym.Env[Any, Any]):
    """Random observations; every step is a line of a file of its process.

    A file ``fail`` in the folder makes it raise an error, ``hang`` makes it wait; the first step
    that sees the file deletes it, unless it is called ``fail_always``.
    """

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        del options
        self.count = 0
        return self._observe(), {}

    def _observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._misbehave()
        obs = self._observe()
        self.count += 1
        with (self.folder / f"{os.getpid()}.log").open("a", encoding="utf-8") as log:
            log.write(f"{self.count} {int(action)} {obs.tolist()}\n")
        done = bool(self.np_random.random() < 0.05)
        return obs, float(obs[0]), done, self.count >= 30, {}

    def _misbehave(self) -> None:
        if (self.folder / "fail_always").exists():
            raise RuntimeError("the sensor is broken")
        for name in ("fail", "hang"):
            try:
                (self.folder / name).unlink()
            except FileNotFoundError:
                continue
            if name == "fail":
                raise RuntimeError("the sensor failed once")
            while True:
                os.sched_yield()
