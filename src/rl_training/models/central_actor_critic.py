"""MAPPO's network: a policy that sees an observation, a value function that sees the team."""

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
from rl_training.types import ActionSpec, ObsSpec, Rows

_OBSERVATION, _AGENT, STATE, ALIVE = "observation", "agent", "state", "team_alive"
"""Keys of a row's observation (`envs.team_layout`)."""


def own_spec(spec: ObsSpec) -> ObsSpec:
    """Return the part of a row's observation that its agent sees: all but what the team shares."""
    leaves = {name: leaf for name, leaf in spec.leaves.items() if name not in (STATE, ALIVE)}
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


class CentralActorCritic(FeedForwardActorCritic):
    """The policy sees an agent's own observation, the value function the state of the team.

    With ``normalize_values`` the value network computes values divided by the running standard
    deviation of the returns, around their mean; `value` and `evaluate` return them in the scale of
    rewards.
    """

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
        seen = {name: obs_spec.leaves[name] for name in (STATE, _AGENT) if name in obs_spec.leaves}
        self._seen_by_critic = tuple(seen)
        self.observer = ObservingModule(ObsSpec(seen), DEFAULT_ENCODER, clip)
        critic_sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = MLP((self.observer.num_features, *critic_sizes, 1), activation, 1.0)
        self.value_norm = RunningNorm((), torch.inf) if normalize_values else None

    def _own(self, obs: Any) -> Any:
        """Return what the agent sees."""
        return own_part(self._own_spec, obs)

    def _critics(self, obs: Any) -> Tensor:
        features, _ = self.observer.encode({name: obs[name] for name in self._seen_by_critic})
        return features

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
        values: Tensor = self.critic(features).squeeze(-1)
        if self.value_norm is None:
            return values
        return values / self.value_norm.scale + self.value_norm.shift

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
