"""Independent PPO (de Witt et al. 2020, arXiv:2011.09533): PPO on the rows of several agents.

A row is one agent of one environment. Each learns from what it observes and receives alone; agents
with equal spaces may share a policy and a value function. With one agent it is PPO.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from rl_training._internal.coerce import require
from rl_training.algorithms.ppo import PPOConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPPOConfig(PPOConfig):
    """PPO's settings, and what an agent observes."""

    agent_id: bool = False
    """Add the number of the agent to its observation, so that agents can learn different roles."""
    policies: Literal["shared", "separate"] = "shared"
    """'shared': one policy for all agents, which need equal spaces; 'separate': one for each."""
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Agents that share a policy, by the name of their group, in place of policies: '{team_a: [a_0,
    a_1], team_b: [b_0]}'."""
    uses_state: ClassVar[bool] = False
    """Whether rows contain the state of the whole team."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, agents in self.groups.items():
            listed = isinstance(agents, (list, tuple)) and all(isinstance(a, str) for a in agents)
            require(
                bool(listed and agents), f"algo_kwargs.groups.{name}", "a list of agents", agents
            )
