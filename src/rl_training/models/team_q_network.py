"""Networks of VDN and QMIX: values of each agent's actions, and of them the value of the team."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl_training._internal.tree import tree_map
from rl_training.communicator import ALONE, Communicator
from rl_training.models.action_heads import NumpyChoice
from rl_training.models.central_actor_critic import own_part, own_spec
from rl_training.models.encoders import DEFAULT_ENCODER
from rl_training.models.mlp import MLP
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.observing import ObservingModule
from rl_training.types import TEAM_ALIVE, TEAM_STATE, ActionSpec, ObsSpec, Rows


class SummedQNetwork(MLPQNetwork):
    """A network that all agents of a team share; the team's value is the sum of theirs (VDN).

    Acting, it takes rows of agents. In `agent_values` and `team_values` what agents observe is
    (teams, agents, ...), and `TEAM_ALIVE` is which of them live: the values of others count as
    zero.
    """

    def __init__(self, obs_spec: ObsSpec, action_spec: ActionSpec, **settings: Any) -> None:
        own = own_spec(obs_spec)
        super().__init__(own, action_spec, **settings)
        self._own_spec = own
        self.num_agents = obs_spec.leaves[TEAM_ALIVE].size

    def outputs(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions, and the mask of the legal ones."""
        return super().outputs(own_part(self._own_spec, obs), noise)

    def agent_values(self, obs: Any) -> Tensor:
        """Return (teams, agents, actions): values of all actions of each agent."""
        own = own_part(self._own_spec, obs)
        rows = tree_map(lambda leaf: leaf.flatten(0, 1), own)
        values = self.q_values(rows)
        return values.view(-1, self.num_agents, values.shape[-1])

    def team_values(self, values: Tensor, obs: Any) -> Tensor:
        """Return the value of each team, given (teams, agents) values of the agents' actions."""
        total: Tensor = (values * obs[TEAM_ALIVE]).sum(-1)
        return total

    def update_normalizer(self, *rows: Rows, communicator: Communicator = ALONE) -> None:
        """Add the valid rows of each shard to the statistics of what agents observe."""
        own = [Rows(own_part(self._own_spec, one.obs), one.valid) for one in rows]
        super().update_normalizer(*own, communicator=communicator)

    def numpy_actor(self) -> NumpyChoice | None:
        """Return greedy acting in NumPy (see `numpy_policy`), where that is possible."""
        choose = super().numpy_actor()
        if choose is None:
            return None
        return lambda obs, noise: choose(own_part(self._own_spec, obs), noise)


class MixedQNetwork(SummedQNetwork):
    """A network that all agents of a team share, and a mixer of their values (QMIX)."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        mixing_size: int,
        hypernet_hidden_sizes: tuple[int, ...] = (),
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
        **settings: Any,
    ) -> None:
        super().__init__(
            obs_spec, action_spec, normalize_obs=normalize_obs, clip_obs=clip_obs, **settings
        )
        self.mixer = MonotonicMixer(
            ObsSpec({TEAM_STATE: obs_spec.leaves[TEAM_STATE]}),
            self.num_agents,
            size=mixing_size,
            hidden_sizes=hypernet_hidden_sizes,
            clip_obs=clip_obs if normalize_obs else None,
        )

    def team_values(self, values: Tensor, obs: Any) -> Tensor:
        """Return the value of each team, given (teams, agents) values of the agents' actions."""
        mixed: Tensor = self.mixer(values * obs[TEAM_ALIVE], obs[TEAM_STATE])
        return mixed


class MonotonicMixer(ObservingModule):
    """QMIX's mixer: a value of the team that falls with the value of no agent.

        hidden = elu( |W1(s)| values + b1(s) ),  mix = |w2(s)| hidden + V(s)

    W1, w2, b1 and V are networks of the state s; b1 is linear, V has a hidden layer with ReLU.
    """

    def __init__(
        self,
        state_spec: ObsSpec,
        num_agents: int,
        *,
        size: int,
        hidden_sizes: tuple[int, ...] = (),
        clip_obs: float | None = None,
    ) -> None:
        super().__init__(state_spec, DEFAULT_ENCODER, clip_obs)
        features = self.num_features
        self._shape = (num_agents, size)
        self.weights = MLP((features, *hidden_sizes, num_agents * size), "relu")
        self.bias = MLP((features, size), "relu")
        self.final_weights = MLP((features, *hidden_sizes, size), "relu")
        self.state_value = MLP((features, size, 1), "relu")

    def forward(self, values: Tensor, state: Tensor) -> Tensor:
        """Return the value of each team, given (teams, agents) values and the states."""
        features, _ = self.encode({TEAM_STATE: state})
        weights = self.weights(features).abs().view(-1, *self._shape)
        mixed = torch.bmm(values.unsqueeze(1), weights).squeeze(1)
        hidden = functional.elu(mixed + self.bias(features))
        final = self.final_weights(features).abs()
        total: Tensor = (hidden * final).sum(-1) + self.state_value(features).squeeze(-1)
        return total
