"""PPG's network: a trunk trained by the policy and an auxiliary value function, and a critic."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rl_training.models.action_heads import make_action_head
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP
from rl_training.models.mlp_actor_critic import FeedForwardActorCritic
from rl_training.types import ActionSpec, ObsSpec


class Joint(NamedTuple):
    """The outputs that the auxiliary phase trains together."""

    policy: Tensor
    """The heads' `distribution`, one row per observation."""
    value: Tensor
    aux_value: Tensor


class MLPPPGModel(FeedForwardActorCritic):
    """A shared trunk on the encoder, with three heads: policy, value and auxiliary value.

    Gradients of the value head do not reach the trunk, so that its features serve the policy
    alone. Those of the auxiliary head do, in a phase of its own that also penalises any change
    of the policy. Without ``hidden_sizes`` the encoder alone is the trunk.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...] = (64, 64),
        value_sizes: tuple[int, ...] = (64,),
        activation: str = "tanh",
        log_std_init: float = 0.0,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = make_action_head(action_spec, log_std_init)
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        # Trunk and policy head are one MLP, as `numpy_policy` expects.
        self.actor = MLP((self.num_features, *hidden_sizes, head.param_size), activation, 0.01)
        width = (self.num_features, *hidden_sizes)[-1]
        self.critic = MLP((width, *value_sizes, 1), activation, 1.0)
        self.aux_critic = MLP((width, 1), activation, 1.0)

    def policy_and_value(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution, and state values, one per row."""
        trunk = self.actor.hidden(features)
        return self.actor.output(trunk), self._value(trunk)

    def value(self, obs: Any) -> Tensor:
        """Return state values, one per row."""
        features, _ = self.encode(obs)
        return self._value(self.actor.hidden(features))

    def joint(self, obs: Any) -> Joint:
        """Return the action distribution, values and auxiliary values."""
        features, mask = self.encode(obs)
        trunk = self.actor.hidden(features)
        return Joint(
            self.head.distribution(self.actor.output(trunk), mask),
            self._value(trunk),
            self.aux_critic(trunk).squeeze(-1),
        )

    def _value(self, trunk: Tensor) -> Tensor:
        return self.critic(trunk.detach()).squeeze(-1)  # type: ignore[no-any-return]
