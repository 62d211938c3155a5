"""Action values, plain or dueling, over vectors or encoded images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.action_heads import CategoricalHead
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig, make_encoder, split_mask
from rl_training.models.mlp_actor_critic import MLP, numpy_policy
from rl_training.types import ActionSpec, Array, ObsSpec


class MLPQNetwork(nn.Module):
    """One value per discrete action.

    Dueling (Wang et al. 2016, arXiv:1511.06581): Q = V + A - mean(A), each a network of its own.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        dueling: bool = False,
        encoder: EncoderConfig = DEFAULT_ENCODER,
    ) -> None:
        super().__init__()
        (self.num_actions,) = action_spec.nvec
        self.head = CategoricalHead(action_spec.nvec, ())
        self.encoder, features = make_encoder(obs_spec, encoder)
        self.sees_images = obs_spec.has_images
        self.advantage = MLP((features, *hidden_sizes, self.num_actions), activation)
        self.state_value = MLP((features, *hidden_sizes, 1), activation) if dueling else None

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """The values of all actions, and the mask of the legal ones."""
        obs, mask = split_mask(obs)
        features = self.encoder(obs)
        values: Tensor = self.advantage(features)
        if self.state_value is not None:
            values = self.state_value(features) + values - values.mean(-1, keepdim=True)
        return values, mask

    def q_values(self, obs: Any) -> Tensor:
        """The values of all actions; those of illegal ones are the least float.

        Where nothing is legal (an ended episode's last observation may say so) all values count.
        """
        values, mask = self.policy(obs)
        if mask is None:
            return values
        mask = mask | ~mask.any(-1, keepdim=True)
        return values.masked_fill(~mask, torch.finfo(values.dtype).min)

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Greedy actions in NumPy over the same weights, where that is possible.

        The value stream of a dueling network moves all actions alike: it has no say here.
        """
        return numpy_policy(self.encoder, self.advantage, self.head)
