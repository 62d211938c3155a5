"""Settings of epsilon-greedy exploration."""

from __future__ import annotations

import dataclasses

from rl_training.algorithms.network_config import NetworkConfig
from rl_training.types import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpsilonGreedyConfig(NetworkConfig):
    """Settings of algorithms that take a random action with probability epsilon."""

    exploration_fraction: float = 0.5
    """Fraction of the run over which epsilon decreases linearly."""
    exploration_initial_eps: float = 1.0
    """Epsilon at the start: the fraction of random actions."""
    exploration_final_eps: float = 0.05
    """Epsilon after exploration_fraction of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.exploration_fraction <= 1, "exploration_fraction", "in (0, 1]")
        for name in ("exploration_initial_eps", "exploration_final_eps"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")

    def epsilon(self, progress: Progress) -> float:
        """Return the fraction of random actions: linear, then constant."""
        done = min(1.0, progress.fraction / self.exploration_fraction)
        first, last = self.exploration_initial_eps, self.exploration_final_eps
        return first + done * (last - first)

    def exploration(self, progress: Progress) -> float:
        """Return the fraction of random actions in training."""
        return self.epsilon(progress)
