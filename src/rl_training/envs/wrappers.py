"""Wrappers for the setting ``wrappers``: hidden velocities, and action masks ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import ConfigError

_POSITIONS: dict[str, tuple[int, ...]] = {
    "CartPole": (0, 2),
    "Pendulum": (0, 1),
    "LunarLander": (0, 1, 4, 6, 7),
    "LunarLanderContinuous": (0, 1, 4, 6, 7),
    "MountainCar": (0,),
    "MountainCarContinuous": (0,),
    "Acrobot": (0, 1, 2, 3),
}
"""Indices of the positions in an observation; the other numbers are velocities."""


class IgnoreActionMasks(gym.Wrapper[Any, Any, Any, Any]):
    """Hides the environment's method ``action_masks()``, so that all actions may be chosen."""

    action_masks = None


class HideVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """Shows positions alone, so that velocities must be remembered from what was seen.

    Known are CartPole, Pendulum, LunarLander, MountainCar and Acrobot; for another vector ``keep``
    names the numbers to show.
    """

    def __init__(self, env: gym.Env[Any, Any], keep: Sequence[int] | None = None) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"HideVelocities takes a vector observation, not {space}")
        if keep is None:
            name = env.spec.id.rpartition("/")[2].rpartition("-v")[0] if env.spec else ""
            if name not in _POSITIONS:
                raise ConfigError(
                    f"HideVelocities does not know {name or type(env.unwrapped).__name__}: list"
                    " the indices of the numbers to keep in kwargs: {keep: [...]}"
                )
            keep = _POSITIONS[name]
        kept = list(keep)
        size = space.shape[0]
        whole = all(isinstance(i, int) and not isinstance(i, bool) for i in kept)
        if not kept or not whole or not all(0 <= i < size for i in kept):
            raise ConfigError(f"HideVelocities: 'keep' must name some of 0 to {size - 1}: {kept}")
        self._kept = np.array(kept)
        self.observation_space = spaces.Box(
            space.low[self._kept],
            space.high[self._kept],
            dtype=space.dtype.type,
        )

    def observation(self, observation: Any) -> Any:
        """The numbers that are shown."""
        return observation[self._kept]
