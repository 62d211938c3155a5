"""Value decomposition networks (Sunehag et al. 2018, arXiv:1706.05296).

The value of a team's joint action is the sum of values that its agents compute, each from what it
observes. It is learnt from the team's reward; each agent then takes its own best action.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.idqn import IDQNConfig
from rl_training.algorithms.q_learning import best_values, values_of

SHARED_ALONE = {
    **dict.fromkeys(("network", "network_kwargs"), "networks of a team take an 'encoder' instead"),
    **dict.fromkeys(
        ("policies", "groups"), "agents of a team share one network; idqn has separate ones"
    ),
    **dict.fromkeys(("noisy", "random_shift"), "values of a team have no such option; idqn has it"),
}
"""Settings of independent agents that agents with a common value do not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VDNConfig(IDQNConfig):
    """IDQN's settings; a transition is a step of a whole team."""

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = SHARED_ALONE

    buffer_size: int = 100_000
    """Capacity of the replay buffer in steps of a whole team, over all environments."""
    batch_size: int = 128
    """Steps of a whole team per update."""
    learns_jointly: ClassVar[bool] = True
    """Whether a step of a whole team is one transition; rows then contain which agents live."""


def team_td_loss(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return half the mean squared TD error of the team's values, weighted by importance.

        td   = targets - q_values
        loss = mean( weights td^2 ) / 2

    Not DQN's Huber loss: where no sum of the agents' values is the value of every joint action,
    squares make it the best fit on average, and absolute errors leave open which fit it is.
    ``td_errors`` is returned per row, for priorities.
    """
    q_values = batch["q_values"]
    td_errors = batch["targets"] - q_values
    return {
        "loss": 0.5 * (batch["weights"] * td_errors.square()).mean(),
        "q_mean": q_values.detach().mean(),
        "td_error": td_errors.detach().abs().mean(),
        "td_errors": td_errors.detach(),
    }


class TeamValues(Protocol):
    """What VDN and QMIX need of a model."""

    def agent_values(self, obs: Any) -> Tensor:
        """Return (teams, agents, actions): values of all actions of each agent."""
        ...

    def team_values(self, values: Tensor, obs: Any) -> Tensor:
        """Return the value of each team, given (teams, agents) values of the agents' actions."""
        ...


class VDN(DQN):
    """Q-learning of a team's value, which the model makes of the values of its agents."""

    def __init__(
        self,
        model: Any,
        config: VDNConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.team: TeamValues = model

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `team_td_loss` of the current networks on stored steps of teams.

        With Q_i the value of agent i, of its own observation, and mix the model's `team_values`:

            target = rewards + discounts mix_target( max_a Q_i_target(next_obs, a) )

        With ``double`` the action of each agent is argmax_a Q_i(next_obs, a).
        """
        after, target = batch["next_obs"], self.target.module
        with torch.no_grad():
            chooser = self.team.agent_values(after) if self.config.double else None
            best = best_values(target.agent_values(after), chooser)
            targets = batch["rewards"] + batch["discounts"] * target.team_values(best, after)
        chosen = values_of(batch["actions"], self.team.agent_values(batch["obs"]))
        q_values = self.team.team_values(chosen, batch["obs"])
        return team_td_loss({"q_values": q_values, "targets": targets, "weights": batch["weights"]})
