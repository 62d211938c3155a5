"""Actors and critics for continuous actions: the actor is one MLP, the critics are a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.action_heads import SquashedGaussianHead, TanhHead
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig, make_encoder, split_mask
from rl_training.models.mlp_actor_critic import ACTIVATIONS, MLP, numpy_policy
from rl_training.types import Array, ObsSpec


class MLPActor(nn.Module):
    """Observations to the parameters of an action, in [-1, 1]."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        head: SquashedGaussianHead | TanhHead,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        encoder: EncoderConfig = DEFAULT_ENCODER,
    ) -> None:
        super().__init__()
        self.head = head
        self.encoder, features = make_encoder(obs_spec, encoder)
        self.sees_images = obs_spec.has_images
        self.net = MLP((features, *hidden_sizes, head.param_size), activation)

    def policy(self, obs: Any) -> tuple[Tensor, None]:
        """Parameters of the action; continuous actions have no mask."""
        obs, _ = split_mask(obs)
        return self.net(self.encoder(obs)), None

    def actions(self, obs: Any) -> Tensor:
        """The most likely actions."""
        return self.head.mode(self.policy(obs)[0], None)

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Observations and noise (None: greedy) to actions, in NumPy, where that is possible."""
        return numpy_policy(self.encoder, self.net, self.head)


class EnsembleMLP(nn.Module):
    """MLPs of one shape, as batched matrices: (batch, in) to (size, batch, out).

    Weights start as torch's own linear layers do, uniform within 1 / sqrt(inputs).
    """

    def __init__(self, size: int, sizes: tuple[int, ...], activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n_in, n_out in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(n_in)
            weight, bias = torch.empty(size, n_in, n_out), torch.empty(size, 1, n_out)
            self.weights.append(nn.Parameter(weight.uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(bias.uniform_(-bound, bound)))

    def forward(self, x: Tensor, members: int | None = None) -> Tensor:
        """Apply the first ``members`` of them (unset: all) to the same rows."""
        activate = ACTIVATIONS[self.activation]
        layers = list(zip(self.weights, self.biases, strict=True))
        if members is not None:  # slicing all of them would copy every gradient once more
            layers = [(weight[:members], bias[:members]) for weight, bias in layers]
        *hidden, last = layers
        x = x.expand(len(last[0]), *x.shape)
        for weight, bias in hidden:
            x = activate(torch.baddbmm(bias, x, weight))
        return torch.baddbmm(last[1], x, last[0])


class MLPCritics(nn.Module):
    """Action values by an ensemble that shares only the encoder."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_size: int,
        *,
        num_critics: int,
        hidden_sizes: tuple[int, ...],
        activation: str,
        encoder: EncoderConfig = DEFAULT_ENCODER,
    ) -> None:
        super().__init__()
        self.encoder, features = make_encoder(obs_spec, encoder)
        self.net = EnsembleMLP(num_critics, (features + action_size, *hidden_sizes, 1), activation)

    def forward(self, obs: Any, actions: Tensor, members: int | None = None) -> Tensor:
        """Values (critics, batch) of actions in [-1, 1]."""
        obs, _ = split_mask(obs)
        rows = torch.cat([self.encoder(obs), actions.reshape(len(actions), -1)], 1)
        return self.net(rows, members).squeeze(-1)  # type: ignore[no-any-return]


class ActorCritics(nn.Module):
    """A policy and its critics."""

    def __init__(self, actor: MLPActor, critics: MLPCritics) -> None:
        super().__init__()
        self.actor, self.critics = actor, critics
