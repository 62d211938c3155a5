"""Hybrid actions: Dict and Tuple spaces, stepped with one row of numbers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.types import HybridActionSpec


class HybridSpace(spaces.Box):
    """The numbers of a Dict or Tuple of actions in one row, each as the environment counts it."""

    def __init__(self, given: spaces.Space[Any], spec: HybridActionSpec) -> None:
        super().__init__(-np.inf, np.inf, spec.shape, np.float64)
        self.given = given
        """The environment's own space."""
        self.spec = spec

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Return the row of a random action; ``mask`` marks the legal choices."""
        del probability
        row = self.spec.row(self.given.sample())
        if mask is not None:
            legal = np.split(np.asarray(mask, bool), np.cumsum(self.spec.nvec)[:-1])
            for (column, first), allowed in zip(self.spec.choices, legal, strict=True):
                row[column] = first + self.np_random.choice(np.flatnonzero(allowed))
        return row

    def seed(self, seed: Any = None) -> Any:
        """Seed the environment's own space."""
        super().seed(seed)
        return self.given.seed(seed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HybridSpace) and self.given == other.given

    def __repr__(self) -> str:
        return repr(self.given)

    __hash__ = None  # type: ignore[assignment]


class HybridActions(gym.ActionWrapper[Any, Any, Any]):
    """Takes rows of numbers, and gives the environment the Dict or Tuple that they are."""

    def __init__(self, env: gym.Env[Any, Any], spec: HybridActionSpec) -> None:
        super().__init__(env)
        self._spec = spec
        self.action_space = HybridSpace(env.action_space, spec)

    def action(self, action: Any) -> Any:
        """Return an action in the environment's own structure, which is also taken as it is."""
        if not isinstance(action, np.ndarray):
            return action
        return self._spec.joined(action)
