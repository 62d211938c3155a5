"""Independent PPO (de Witt et al. 2020, arXiv:2011.09533): PPO on the rows of several agents.

A row is one agent of one environment. Each learns from what it observes and receives alone; agents
with equal spaces may share a policy and a value function. With one agent it is PPO.
"""

from __future__ import annotations

import dataclasses

from rl_training.algorithms.agents import AgentsConfig
from rl_training.algorithms.ppo import PPOConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPPOConfig(AgentsConfig, PPOConfig):
    """PPO's settings, and what an agent observes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_groups()
