"""Independent PPO (de Witt et al. 2020, arXiv:2011.09533): PPO on the rows of several agents.

A row is one agent of one environment. Each learns from what it observes and receives alone; agents
with equal spaces may share a policy and a value function. With one agent it is PPO, and with
memory RecurrentPPO.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from rl_training.algorithms.agents import AgentsConfig
from rl_training.algorithms.ppo import PPOConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPPOConfig(AgentsConfig, PPOConfig):
    """PPO's settings, and what an agent observes."""

    opponents: Literal["current", "pool"] = "current"
    """Who plays the other side in a game of two agents that share a policy. 'current': the policy
    itself; 'pool': in a part of the games one of its earlier snapshots, which does not learn."""
    pool_fraction: float = 0.5
    """opponents: pool: the part of the games that is played against snapshots."""
    pool_size: int = 10
    """opponents: pool: number of snapshots, the latest ones; they are in every checkpoint."""
    pool_sampling: Literal["uniform", "rating"] = "uniform"
    """opponents: pool: which snapshot plays a game. 'uniform': each with the same chance; 'rating':
    in proportion to the score that its Elo rating predicts against the current policy."""
    snapshot_interval: int = 10_000
    """opponents: pool: steps between two snapshots; the first is the initial policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_groups()
        self._require(0 < self.pool_fraction <= 1, "pool_fraction", "above 0, and at most 1")
        for name in ("pool_size", "snapshot_interval"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
