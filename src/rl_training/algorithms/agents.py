"""Settings of algorithms for several agents: what an agent observes, and who shares a policy."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from rl_training._internal.coerce import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentsConfig:
    """What an agent observes, and who shares a policy.

    Configs name it before the algorithm's own: its settings are then the last.
    """

    agent_id: bool = False
    """Add the number of the agent to its observation, so that agents can learn different roles."""
    policies: Literal["shared", "separate"] = "shared"
    """'shared': one policy for all agents, which need equal spaces; 'separate': one for each."""
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Agents that share a policy, by the name of their group, in place of policies: '{team_a: [a_0,
    a_1], team_b: [b_0]}'."""
    uses_state: ClassVar[bool] = False
    """Whether rows contain the state of the whole team."""
    learns_jointly: ClassVar[bool] = False
    """Whether a step of a whole team is one transition; rows then contain which agents live."""

    def _check_groups(self) -> None:
        is_one = not self.groups or self.policies == "shared"
        require(is_one, "algo_kwargs.policies", "unset where there are groups", self.policies)
        for name, agents in self.groups.items():
            listed = isinstance(agents, (list, tuple)) and all(isinstance(a, str) for a in agents)
            require(
                bool(listed and agents), f"algo_kwargs.groups.{name}", "a list of agents", agents
            )
