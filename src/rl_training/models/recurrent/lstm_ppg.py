"""PPG's network with memory: the trunk is the policy's, and the critic remembers by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.models.mlp import MLP
from rl_training.models.mlp_ppg import Joint
from rl_training.models.recurrent.lstm_actor_critic import LSTMActorCritic
from rl_training.types import ActionSpec, ObsSpec


class LSTMPPGModel(LSTMActorCritic):
    """The policy's recurrent layer and hidden layers are the trunk of the auxiliary values.

    The value function has a recurrent layer and layers (``value_sizes``) of its own. Its gradients
    do not reach the encoder, so that what the trunk sees serves the policy alone; those of the
    auxiliary values do.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        value_sizes: tuple[int, ...],
        lstm_size: int,
        activation: str = "tanh",
        **settings: Any,
    ) -> None:
        super().__init__(
            obs_spec,
            action_spec,
            hidden_sizes=hidden_sizes,
            critic_hidden_sizes=value_sizes,
            lstm_size=lstm_size,
            activation=activation,
            **settings,
        )
        self.aux_critic = MLP(((lstm_size, *hidden_sizes)[-1], 1), activation, 1.0)

    def critic_features(self, obs: Any, features: Tensor) -> Tensor:
        """Return what the value function sees: the same as the policy, without a gradient."""
        del obs
        return features.detach()

    def joint(self, obs: Any, state: Tensor) -> Joint:
        """Return the action distribution, values and auxiliary values along sequences.

        All are (time, batch, ...); ``state`` holds the states before the first step.
        """
        along = self.along(obs, state)
        trunk = self.actor.hidden(along.policy)
        policy = self.head.distribution(self.actor.output(trunk), along.mask)
        shape = along.shape
        return Joint(
            policy.view(*shape, *policy.shape[1:]),
            self._values(along.value).view(shape),
            self.aux_critic(trunk).view(shape),
        )
