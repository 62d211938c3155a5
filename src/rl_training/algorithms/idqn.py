"""Independent DQN (Tampuu et al. 2017, arXiv:1511.08779): DQN on the rows of several agents.

A row is one agent of one environment. Each learns from what it observes and receives alone; agents
with equal spaces may share a network. With one agent it is DQN.
"""

from __future__ import annotations

import dataclasses

from rl_training.algorithms.agents import AgentsConfig
from rl_training.algorithms.dqn import DQNSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class IDQNConfig(AgentsConfig, DQNSettings):
    """DQN's settings, and what an agent observes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_groups()
