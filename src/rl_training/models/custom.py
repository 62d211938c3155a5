"""Whole networks of the user's own: a policy with a value function, or action values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.models.action_heads import CategoricalHead, NumpyChoice, make_action_head
from rl_training.models.mlp_actor_critic import FeedForwardActorCritic
from rl_training.models.mlp_q_network import FeedForwardQNetwork
from rl_training.models.user_class import PROBE_ROWS, UserClass, is_floats, probe_observations
from rl_training.models.value_distributions import ValueDistribution
from rl_training.types import ActionSpec, ObsSpec


class CustomActorCritic(FeedForwardActorCritic):
    """A policy and a value function computed by one network of the user's own.

    It is made from the `ObsSpec` and the number of parameters of the action distribution: logits
    of all choices, means of a Box (its standard deviation is learnt here). It maps a batch of
    observations to those parameters, (batch, number), and to values, (batch,) or (batch, 1).
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        network: UserClass,
        *,
        log_std_init: float = 0.0,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = make_action_head(action_spec, log_std_init)
        super().__init__(obs_spec, None, clip_obs if normalize_obs else None, head)
        self.network = network.make(obs_spec=obs_spec, num_outputs=head.param_size)
        obs = probe_observations(obs_spec, normalized=normalize_obs)
        output = network.probe(self.network, obs)
        rows, size = PROBE_ROWS, head.param_size
        if not (
            isinstance(output, tuple)
            and len(output) == 2
            and is_floats(output[0], (rows, size))
            and is_floats(output[1], (rows,), (rows, 1))
        ):
            expected = f"a tuple of action parameters (batch, {size}) and values (batch,), floats"
            raise network.wrong_output(expected, output, obs)

    def encode(self, obs: Any) -> tuple[Any, Tensor | None]:
        """Return what the network computes, and the action mask where there is one."""
        obs, mask = self.observe(obs)
        params, values = self.network(obs)
        return (params, values.reshape(len(params))), mask

    def policy_and_value(self, features: Any) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution, and state values, one per row."""
        params, values = features
        return params, values

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return parameters of the action distribution, and the action mask."""
        (params, _), mask = self.encode(obs)
        return params, mask

    def value(self, obs: Any) -> Tensor:
        """Return state values, one per row."""
        (_, values), _ = self.encode(obs)
        return values  # type: ignore[no-any-return]

    def numpy_actor(self) -> NumpyChoice | None:
        """Return None: the network acts through torch."""
        return None


class CustomQNetwork(FeedForwardQNetwork):
    """Action values computed by a network of the user's own.

    It is made from the `ObsSpec` and the number of actions, and maps a batch of observations to
    values of all actions, (batch, number). With a ``distribution`` the number is that of all
    actions times its size: those of the first action come first.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        network: UserClass,
        *,
        distribution: ValueDistribution | None = None,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = CategoricalHead(action_spec.nvec, ())
        super().__init__(obs_spec, None, clip_obs if normalize_obs else None, head)
        self.distribution = distribution
        size = head.param_size * (1 if distribution is None else distribution.size)
        self._shape = () if distribution is None else (head.param_size, distribution.size)
        self.network = network.make(obs_spec=obs_spec, num_outputs=size)
        obs = probe_observations(obs_spec, normalized=normalize_obs)
        output = network.probe(self.network, obs)
        if not is_floats(output, (PROBE_ROWS, size)):
            expected = f"values of all actions (batch, {size}), floats"
            raise network.wrong_output(expected, output, obs)

    def outputs(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions or what describes their returns, and the mask."""
        del noise
        obs, mask = self.observe(obs)
        values = self.network(obs)
        return (values.reshape(-1, *self._shape) if self._shape else values), mask

    def numpy_actor(self) -> NumpyChoice | None:
        """Return None: the network acts through torch."""
        return None
