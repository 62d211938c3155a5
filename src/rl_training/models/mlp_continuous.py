"""SAC's and TD3's networks: an actor for continuous actions, and an ensemble of critics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.communicator import ALONE, Communicator
from rl_training.models.action_heads import NumpyChoice, SquashedGaussianHead, TanhHead
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import ACTIVATIONS, MLP
from rl_training.models.observing import ObservingModule, update_normalizers
from rl_training.types import ObsSpec, Rows


class MLPActor(ObservingModule):
    """Maps observations to the parameters of an action in [-1, 1]."""

    head: SquashedGaussianHead | TanhHead

    def __init__(
        self,
        obs_spec: ObsSpec,
        head: SquashedGaussianHead | TanhHead,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        self.net = MLP((self.num_features, *hidden_sizes, head.param_size), activation)

    def policy(self, obs: Any) -> tuple[Tensor, None]:
        """Return parameters of the action; continuous actions have no mask."""
        features, _ = self.encode(obs)
        return self.net(features), None

    def actions(self, obs: Any) -> Tensor:
        """Return the most likely actions."""
        return self.head.mode(self.policy(obs)[0], None)

    def numpy_actor(self) -> NumpyChoice | None:
        """Return acting in NumPy (see `numpy_policy`), where that is possible."""
        return self.numpy_policy(self.net)


class EnsembleMLP(nn.Module):
    """MLPs of one shape, as batched matrices: (batch, in) to (size, batch, out).

    Weights are initialised as in `nn.Linear`, uniform within 1 / sqrt(inputs).
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
        """Apply the first ``members`` networks (None: all) to the same rows."""
        activate = ACTIVATIONS[self.activation]
        layers = list(zip(self.weights, self.biases, strict=True))
        if members is not None:  # slicing all of them would copy every gradient once more
            layers = [(weight[:members], bias[:members]) for weight, bias in layers]
        *hidden, last = layers
        x = x.expand(len(last[0]), *x.shape)
        for weight, bias in hidden:
            x = activate(torch.baddbmm(bias, x, weight))
        return torch.baddbmm(last[1], x, last[0])


class MLPCritics(ObservingModule):
    """Action values by an ensemble of critics that share only the encoder."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_size: int,
        *,
        num_critics: int,
        hidden_sizes: tuple[int, ...],
        activation: str,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None)
        inputs = self.num_features + action_size
        self.net = EnsembleMLP(num_critics, (inputs, *hidden_sizes, 1), activation)

    def forward(self, obs: Any, actions: Tensor, members: int | None = None) -> Tensor:
        """Return values (critics, batch) of actions in [-1, 1]."""
        features, _ = self.encode(obs)
        rows = torch.cat([features, actions.reshape(len(actions), -1)], 1)
        return self.net(rows, members).squeeze(-1)  # type: ignore[no-any-return]


class ActorCritics(nn.Module):
    """A policy and its critics."""

    def __init__(self, actor: MLPActor, critics: MLPCritics) -> None:
        super().__init__()
        self.actor, self.critics = actor, critics

    def update_normalizer(self, *rows: Rows, communicator: Communicator = ALONE) -> None:
        """Add flat rows of raw observations to the statistics of both."""
        update_normalizers(self, *rows, communicator=communicator)
