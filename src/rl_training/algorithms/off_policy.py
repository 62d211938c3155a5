"""Knobs that every off-policy algorithm shares."""

from __future__ import annotations

import dataclasses
import math

from rl_training.coerce import check_types, require
from rl_training.data.replay_buffer import Prioritization


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """When to learn, and from how much."""

    learning_rate: float = 3e-4
    """Adam's step size."""
    buffer_size: int = 1_000_000
    """Transitions kept for replay, over all environments."""
    learning_starts: int = 1000
    """Steps of random actions before anything is learnt."""
    batch_size: int = 256
    """Transitions per update."""
    train_freq: int = 1
    """Learn at every crossing of a multiple of this many transitions."""
    gradient_steps: float = 1.0
    """Updates owed at each crossing; fractions add up, -1 is one per transition."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Steps of reward summed before the value of what follows."""

    def __post_init__(self) -> None:
        check_types(self, "algo_kwargs")
        for name in ("buffer_size", "batch_size", "train_freq", "n_step"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.learning_starts >= 0, "learning_starts", "zero or more")
        self._require(0 <= self.gamma <= 1, "gamma", "between 0 and 1")
        finite_rate = 0 < self.learning_rate < math.inf
        self._require(finite_rate, "learning_rate", "above 0 and finite")
        steps = self.gradient_steps
        self._require(steps == -1 or 0 < steps < math.inf, "gradient_steps", "above 0, or -1")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        require(condition, f"algo_kwargs.{name}", rule, getattr(self, name))

    def check_envs(self, num_envs: int) -> None:
        """Refuse knobs that do not fit the number of environments."""
        require(
            self.buffer_size >= num_envs,
            "algo_kwargs.buffer_size",
            f"at least num_envs = {num_envs}",
            self.buffer_size,
        )

    def prioritization(self) -> Prioritization | None:
        """How replay is prioritised, if at all."""
        return None
