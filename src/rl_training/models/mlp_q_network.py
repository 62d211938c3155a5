"""DQN's network: action values, plain or dueling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from rl_training.models.action_heads import CategoricalHead, NumpyChoice
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP
from rl_training.models.observing import ObservingModule
from rl_training.types import ActionSpec, ObsSpec


def legal_values(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values of all actions; those of illegal ones are the least float.

    Where the mask allows nothing (as it may in the final observation of an episode) it is ignored.
    """
    if mask is None:
        return values
    mask = mask | ~mask.any(-1, keepdim=True)
    return values.masked_fill(~mask, torch.finfo(values.dtype).min)


class FeedForwardQNetwork(ObservingModule, ABC):
    """One value per discrete action, without memory; subclasses compute them."""

    head: CategoricalHead

    @abstractmethod
    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions, and the mask of the legal ones."""

    def q_values(self, obs: Any) -> Tensor:
        """Return the `legal_values` of all actions."""
        return legal_values(*self.policy(obs))

    def value(self, obs: Any) -> Tensor:
        """Return the value of each observation: that of its best legal action."""
        return self.q_values(obs).amax(-1)


class MLPQNetwork(FeedForwardQNetwork):
    """One value per discrete action, by MLPs.

    Dueling (Wang et al. 2016, arXiv:1511.06581): Q = V + A - mean(A), each a network of its own.
    With ``layer_norm`` every hidden layer is followed by layer normalisation.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        dueling: bool = False,
        layer_norm: bool = False,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = CategoricalHead(action_spec.nvec, ())
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        (self.num_actions,) = action_spec.nvec
        features = self.num_features

        def mlp(outputs: int) -> MLP:
            return MLP((features, *hidden_sizes, outputs), activation, layer_norm=layer_norm)

        self.advantage = mlp(self.num_actions)
        self.state_value = mlp(1) if dueling else None

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions, and the mask of the legal ones."""
        features, mask = self.encode(obs)
        values: Tensor = self.advantage(features)
        if self.state_value is not None:
            values = self.state_value(features) + values - values.mean(-1, keepdim=True)
        return values, mask

    def numpy_actor(self) -> NumpyChoice | None:
        """Return greedy acting in NumPy (see `numpy_policy`), where that is possible.

        It needs the advantages alone: a state's value does not change which action is best.
        """
        return self.numpy_policy(self.advantage)
