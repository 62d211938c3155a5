"""Environments with short episodes that report success; worker processes import no torch here."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Counts(gym.Env[Any, Any]):
    """Episodes of 5 and 7 steps in turn; a long one is a success. Nothing is random."""

    observation_space = gym.spaces.Box(-1, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._episode = 0
        self._step = 0

    def _obs(self) -> Any:
        return np.array([self._step], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        return self._obs(), {"is_success": False, "of_reset": 1.0}

    def step(self, action: Any) -> Any:
        self._step += 1
        length = 7 if self._episode % 2 == 0 else 5
        done = self._step == length
        info: dict[str, Any] = {"step_in_episode": self._step}
        if done:
            info["is_success"] = length == 7
        return self._obs(), 1.0, done, False, info


class SeededCounts(Counts):
    """Their lengths depend on the seed alone, so that episodes can be replayed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        first = super().reset(seed=seed)
        self._episode = int(self.np_random.integers(2))
        return first
