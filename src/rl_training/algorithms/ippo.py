"""Independent PPO (de Witt et al. 2020, arXiv:2011.09533): PPO on the rows of several agents.

A row is one agent of one environment. Each learns from what it observes and receives alone; agents
with equal spaces may share a policy and a value function. With one agent it is PPO, and with
memory RecurrentPPO.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from rl_training._internal.coerce import require
from rl_training.algorithms.agents import AgentsConfig
from rl_training.algorithms.ppo import PPOConfig, check_sequences
from rl_training.types import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPPOConfig(AgentsConfig, PPOConfig):
    """PPO's settings, and what an agent observes."""

    memory: Literal["none", "lstm"] = "none"
    """'lstm': policy and value function each have an LSTM, and 'hidden_sizes' are the layers after
    it (unset: 64); 'none': they see one observation."""
    lstm_size: int = 64
    """Cells of each LSTM, with memory: lstm."""
    sequence_length: int = 32
    """Steps that gradients flow back through, with memory: lstm; a divisor of num_steps."""
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
        for setting in ("lstm_size", "sequence_length"):
            self._require(getattr(self, setting) >= 1, setting, "at least 1")
        if self.has_memory:
            self._require(
                self.num_steps % self.sequence_length == 0,
                "sequence_length",
                f"a divisor of num_steps = {self.num_steps}",
            )
            self._require(
                self.network is None, "network", "unset with memory: lstm, which takes an 'encoder'"
            )
        self._require(0 < self.pool_fraction <= 1, "pool_fraction", "above 0, and at most 1")
        for name in ("pool_size", "snapshot_interval"):
            self._require(getattr(self, name) >= 1, name, "at least 1")

    @property
    def has_memory(self) -> bool:
        """Whether policies are recurrent."""
        return self.memory != "none"

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        if not self.has_memory:
            super().check_run(run)
            return
        check_sequences(run, self.num_steps, self.sequence_length, self.num_minibatches)
        eager = run.acceleration == "eager"
        require(eager, "acceleration", "eager with memory: lstm", run.acceleration)
