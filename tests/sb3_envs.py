"""Small environments with images, for models of Stable-Baselines3 and for the script they run."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.types import Array

SHAPE = (44, 60, 3)
"""The last convolution has 2 x 4 places: an exchange of height and width is seen."""


class Pictures(gym.Env[Array, Any]):
    """Random images, height unlike width, and no reward."""

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)

    def __init__(self, actions: str = "discrete") -> None:
        self.action_space: gym.Space[Any] = gym.spaces.Discrete(3)
        if actions == "box":  # not symmetric, and different for each component
            low, high = np.array([-2, 0], np.float32), np.array([6, 1], np.float32)
            self.action_space = gym.spaces.Box(low, high)
        self._steps = 0

    def _picture(self) -> Array:
        return self.np_random.integers(0, 256, SHAPE).astype(np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._picture(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._picture(), 0.0, False, self._steps >= 5, {}


gym.register("Sb3Pictures-v0", "sb3_envs:Pictures")
gym.register("Sb3PicturesBox-v0", "sb3_envs:Pictures", kwargs={"actions": "box"})
