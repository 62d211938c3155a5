"""IQN's network: quantiles of the return at any fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.action_heads import NumpyChoice
from rl_training.models.mlp import MLP
from rl_training.models.mlp_q_network import MLPQNetwork, legal_values
from rl_training.models.noisy_mlp import given
from rl_training.types import ActionSpec, Array, ObsSpec


class CosineEmbedding(nn.Module):
    """phi(t) = relu( W c(t) + b ) of fractions t, with c(t)_i = cos(pi i t), i from 0."""

    frozen_between_updates = True
    frequencies: Tensor
    midpoints: Tensor

    def __init__(self, size: int, width: int, num_midpoints: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, width)
        self.register_buffer("frequencies", math.pi * torch.arange(size), persistent=False)
        middles = (torch.arange(num_midpoints) + 0.5) / num_midpoints
        self.register_buffer("midpoints", middles, persistent=False)

    def forward(self, fractions: Tensor) -> Tensor:
        """Return phi, with one more dimension than the fractions."""
        cosines = torch.cos(fractions.unsqueeze(-1) * self.frequencies)
        return torch.relu(functional.linear(cosines, self.linear.weight, self.linear.bias))

    def numpy_mean(self) -> Callable[[], Array]:
        """Return a function without arguments: the mean of phi at the midpoints, in NumPy."""
        cosines = torch.cos(self.midpoints.unsqueeze(-1) * self.frequencies).numpy()
        weight, bias = self.linear.weight.detach().numpy().T, self.linear.bias.detach().numpy()
        return lambda: np.maximum(cosines @ weight + bias, 0.0).mean(0)


class IQNNetwork(MLPQNetwork):
    """Quantiles of each action's return at given fractions t (arXiv:1806.06923).

        Z_t(o) = f( psi(o) phi(t) ),  a product element by element

    psi is the encoder with the hidden layers, phi a `CosineEmbedding` and f the last layer, which
    is linear. Dueling, state value and advantages have hidden layers of their own and share phi.

    An action's value is the mean of its quantiles at ``num_policy_quantiles`` fixed fractions, the
    middles of equal parts of [0, 1]: acting needs no random fractions. Since f is linear, it is
    computed from the mean of phi.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        num_policy_quantiles: int,
        embedding_size: int,
        **settings: Any,
    ) -> None:
        super().__init__(obs_spec, action_spec, **settings)
        width = (self.num_features, *settings["hidden_sizes"])[-1]
        self.embedding = CosineEmbedding(embedding_size, width, num_policy_quantiles)

    def outputs(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions, and the mask of the legal ones."""
        states, noises, mask = self._states(obs, noise)
        return self._last_layer(states, noises, self._mean_embedding()), mask

    def quantiles(
        self, obs: Any, fractions: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return quantiles at (rows, number) fractions, (rows, actions, number), and values."""
        states, noises, mask = self._states(obs, noise)
        values = legal_values(self._last_layer(states, noises, self._mean_embedding()), mask)
        per_row = noise is not None and noise.ndim == 2
        wide = [one.unsqueeze(1) if one is not None and per_row else one for one in noises]
        quantiles = self._last_layer(
            [state.unsqueeze(1) for state in states], wide, self.embedding(fractions)
        )
        return quantiles.transpose(1, 2), values

    def _states(
        self, obs: Any, noise: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor | None], Tensor | None]:
        """Return psi and the noise of the advantages, and of the state value; and the mask."""
        features, mask = self.encode(obs)
        networks = self._networks()
        noises: list[Tensor | None] = [None] * len(networks)
        if noise is not None:
            noises = list(torch.split(noise, self._noise_sizes, -1))
        pairs = zip(networks, noises, strict=True)
        return [network.hidden(features, *given(own)) for network, own in pairs], noises, mask

    def _last_layer(
        self, states: list[Tensor], noises: list[Tensor | None], embedded: Tensor
    ) -> Tensor:
        triples = zip(self._networks(), states, noises, strict=True)
        parts = [net.output(state * embedded, *given(own)) for net, state, own in triples]
        if len(parts) == 1:
            return parts[0]
        advantages, state_values = parts
        return state_values + advantages - advantages.mean(-1, keepdim=True)

    def _networks(self) -> list[MLP]:
        return [self.advantage] if self.state_value is None else [self.advantage, self.state_value]

    def _mean_embedding(self) -> Tensor:
        mean: Tensor = self.embedding(self.embedding.midpoints).mean(0)
        return mean

    def numpy_actor(self) -> NumpyChoice | None:
        """Return acting in NumPy, where that is possible; its noise is the network's."""
        choose = self.numpy_choice(self.advantage.activation)
        if choose is None:
            return None
        # A state's value does not change which action is best.
        values = self.advantage.numpy_noisy(self.embedding.numpy_mean())
        first = self._noise_sizes[0] if self.noise_size else 0
        normalize = self.numpy_normalize()

        def act(obs: Array, noise: Array | None) -> Array:
            x = obs if normalize is None else normalize(obs)
            return choose(values(x, None if noise is None else noise[..., :first]), None)

        return act
