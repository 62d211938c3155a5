"""MAPPO's networks: a policy that sees an observation, a value function that sees the team."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.communicator import ALONE, Communicator
from rl_training.models.action_heads import NumpyChoice, make_action_head
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP
from rl_training.models.mlp_actor_critic import FeedForwardActorCritic
from rl_training.models.normalizer import RunningNorm
from rl_training.models.observing import ObservingModule
from rl_training.models.recurrent.lstm_actor_critic import LSTMActorCritic
from rl_training.types import TEAM_ALIVE, TEAM_STATE, ActionSpec, ObsSpec, Rows

_OBSERVATION, _AGENT = "observation", "agent"
"""Keys of a row's observation (`envs.team_layout`)."""


def own_spec(spec: ObsSpec) -> ObsSpec:
    """Return the part of a row's observation that its agent sees: all but what the team shares."""
    leaves = {
        name: leaf for name, leaf in spec.leaves.items() if name not in (TEAM_STATE, TEAM_ALIVE)
    }
    return (
        ObsSpec({"": leaves[_OBSERVATION]}) if list(leaves) == [_OBSERVATION] else ObsSpec(leaves)
    )


def own_part(spec: ObsSpec, obs: Any) -> Any:
    """Return what an agent sees of a row's observation; ``spec`` is the `own_spec`."""
    if not isinstance(obs, dict):
        return obs
    if not spec.is_dict:
        return obs[_OBSERVATION]
    return {name: obs[name] for name in spec.leaves}


class TeamView:
    """What the policy and the value function each see of a row, and the scale of values.

    With a ``value_norm`` the value network computes values divided by the running standard
    deviation of the returns, around their mean; ``value`` and ``evaluate`` return them in the scale
    of rewards.
    """

    observer: ObservingModule
    """What normalises and encodes the state for the value function."""
    value_norm: RunningNorm | None
    _own_spec: ObsSpec

    def _own(self, obs: Any) -> Any:
        """Return what the agent sees, of a row or of the agent's own observation."""
        return own_part(self._own_spec, obs)

    def _critics(self, obs: Any) -> Tensor:
        """Return the features of the value function."""
        shown = {name: obs[name] for name in (TEAM_STATE, _AGENT) if name in obs}
        features, _ = self.observer.encode(shown)
        return features

    def _in_scale_of_rewards(self, values: Tensor) -> Tensor:
        if self.value_norm is None:
            return values
        return values / self.value_norm.scale + self.value_norm.shift


def _observer(obs_spec: ObsSpec, clip: float | None) -> ObservingModule:
    """Return what encodes the state of the team, and the number of the agent where it is known."""
    seen = {name: obs_spec.leaves[name] for name in (TEAM_STATE, _AGENT) if name in obs_spec.leaves}
    return ObservingModule(ObsSpec(seen), DEFAULT_ENCODER, clip)


class CentralActorCritic(TeamView, FeedForwardActorCritic):
    """The policy sees an agent's own observation, the value function the state of the team."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...] = (64, 64),
        critic_hidden_sizes: tuple[int, ...] | None = None,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
        normalize_values: bool = False,
    ) -> None:
        head = make_action_head(action_spec, log_std_init)
        self._own_spec = own_spec(obs_spec)
        clip = clip_obs if normalize_obs else None
        super().__init__(self._own_spec, encoder, clip, head)
        sizes = (self.num_features, *hidden_sizes, head.param_size)
        self.actor = MLP(sizes, activation, 0.01)
        self.observer = _observer(obs_spec, clip)
        critic_sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = MLP((self.observer.num_features, *critic_sizes, 1), activation, 1.0)
        self.value_norm = RunningNorm((), torch.inf) if normalize_values else None

    def encode(self, obs: Any) -> tuple[Any, Tensor | None]:
        """Return the features of the policy and of the value function, and the action mask."""
        features, mask = super().encode(self._own(obs))
        return (features, self._critics(obs)), mask

    def policy_and_value(self, features: Any) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution, and state values, one per row."""
        own, team = features
        return self.actor(own), self._value(team)

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return parameters of the action distribution, and the action mask."""
        features, mask = super().encode(self._own(obs))
        return self.actor(features), mask

    def value(self, obs: Any) -> Tensor:
        """Return state values, one per row."""
        return self._value(self._critics(obs))

    def _value(self, features: Tensor) -> Tensor:
        return self._in_scale_of_rewards(self.critic(features).squeeze(-1))

    def update_normalizer(self, *rows: Rows, communicator: Communicator = ALONE) -> None:
        """Add the valid rows of each shard to the statistics of both."""
        own = [Rows(self._own(one.obs), one.valid) for one in rows]
        super().update_normalizer(*own, communicator=communicator)
        self.observer.update_normalizer(*rows, communicator=communicator)

    def numpy_actor(self) -> NumpyChoice | None:
        """Return acting in NumPy (see `numpy_policy`), where that is possible."""
        choose = self.numpy_policy(self.actor)
        if choose is None:
            return None
        return lambda obs, noise: choose(self._own(obs), noise)


class CentralLSTMActorCritic(TeamView, LSTMActorCritic):
    """The same with memory: an LSTM over what the agent sees, and one over the state of the team.

    The value function needs a memory too: the state is often the joined observations of the agents,
    which tell no more of the past than each of them.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
        normalize_values: bool = False,
        **layers: Any,
    ) -> None:
        own, observer = own_spec(obs_spec), _observer(obs_spec, clip_obs if normalize_obs else None)
        super().__init__(
            own,
            action_spec,
            normalize_obs=normalize_obs,
            clip_obs=clip_obs,
            critic_inputs=observer.num_features,
            **layers,
        )
        self._own_spec = own
        self.observer = observer
        self.value_norm = RunningNorm((), torch.inf) if normalize_values else None

    def encode(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the features of the policy, and the action mask."""
        return super().encode(self._own(obs))

    def critic_features(self, obs: Any, features: Tensor) -> Tensor:
        """Return the state of the team as the value function's LSTM sees it."""
        del features
        return self._critics(obs)

    def _values(self, outputs: Tensor) -> Tensor:
        return self._in_scale_of_rewards(super()._values(outputs))

    def policy_step(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return parameters of the action distribution, the action mask, and the next states.

        This needs no state of the team: the value function's memory stays as it is.
        """
        features, mask = self.encode(obs)
        own, other = state[:, : self._split], state[:, self._split :]
        remembered, own = self.actor_lstm(features.unsqueeze(0), own)
        return self.actor(remembered[0]), mask, torch.cat((own, other), -1)

    def act(
        self, obs: Any, state: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return actions, next states, and what a rollout may record: nothing without a state."""
        if isinstance(obs, dict) and TEAM_STATE in obs:
            return super().act(obs, state, noise)
        params, mask, after = self.policy_step(obs, state)
        if noise is None:
            return self.head.mode(params, mask), after, {}
        return self.head.sample(params, noise, mask), after, {}

    def update_normalizer(self, *rows: Rows, communicator: Communicator = ALONE) -> None:
        """Add the valid rows of each shard to the statistics of both."""
        own = [Rows(self._own(one.obs), one.valid) for one in rows]
        super().update_normalizer(*own, communicator=communicator)
        self.observer.update_normalizer(*rows, communicator=communicator)

    def numpy_actor(self) -> None:
        """Return None: rows are dicts, which are seen through torch."""
