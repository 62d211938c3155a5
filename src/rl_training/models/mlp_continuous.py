"""Networks of replay learners: a policy, an ensemble of critics, and a value function."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.communicator import ALONE, Communicator
from rl_training.models.action_heads import NumpyChoice, ReplayHead
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import ACTIVATIONS, MLP
from rl_training.models.observing import ObservingModule, update_normalizers
from rl_training.types import ObsSpec, Rows


class MLPActor(ObservingModule):
    """Maps observations to the parameters of an action in [-1, 1], or of a discrete one."""

    head: ReplayHead

    def __init__(
        self,
        obs_spec: ObsSpec,
        head: ReplayHead,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        self.net = MLP((self.num_features, *hidden_sizes, head.param_size), activation)

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return parameters of the action, and the action mask."""
        features, mask = self.encode(obs)
        return self.net(features), mask

    def actions(self, obs: Any) -> Tensor:
        """Return the most likely actions."""
        return self.head.mode(*self.policy(obs))

    def numpy_actor(self) -> NumpyChoice | None:
        """Return acting in NumPy (see `numpy_policy`), where that is possible."""
        return self.numpy_policy(self.net)


class EnsembleMLP(nn.Module):
    """MLPs of one shape, as batched matrices: (batch, in) to (size, batch, out).

    Weights are initialised as in `nn.Linear`, uniform within 1 / sqrt(inputs). With ``layer_norm``
    every hidden layer is followed by layer normalisation, then by the activation.
    """

    def __init__(
        self, size: int, sizes: tuple[int, ...], activation: str, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n_in, n_out in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(n_in)
            weight, bias = torch.empty(size, n_in, n_out), torch.empty(size, 1, n_out)
            self.weights.append(nn.Parameter(weight.uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(bias.uniform_(-bound, bound)))
        self.norms: nn.ModuleList | None = None
        if layer_norm:
            self.norms = nn.ModuleList(EnsembleLayerNorm(size, width) for width in sizes[1:-1])

    def forward(self, x: Tensor, members: int | None = None) -> Tensor:
        """Apply the first ``members`` networks (None: all) to the same rows."""
        activate = ACTIVATIONS[self.activation]
        layers = list(zip(self.weights, self.biases, strict=True))
        if members is not None:  # slicing all of them would copy every gradient once more
            layers = [(weight[:members], bias[:members]) for weight, bias in layers]
        *hidden, last = layers
        x = x.expand(len(last[0]), *x.shape)
        for i, (weight, bias) in enumerate(hidden):
            x = torch.baddbmm(bias, x, weight)
            if self.norms is not None:
                x = self.norms[i](x)
            x = activate(x)
        return torch.baddbmm(last[1], x, last[0])

    def of_pairs(self, x: Tensor, others: Tensor) -> Tensor:
        """Apply all networks to rows of ``x`` beside each of several rows: (size, samples, batch).

        ``x``: (batch, features), ``others``: (samples, batch, rest of the inputs). The features'
        part of the first layer is computed once. On a CPU, networks and pieces of the samples are
        evaluated one by one, so that activations stay in the cache: the gradient of 31 x 256 rows
        took 113 ms as one batch, and 80 ms in pieces, which is the time of the products alone.
        """
        if x.device.type != "cpu":
            return self._pairs(x, others, slice(None))
        pieces = torch.split(others, max(1, _ROWS_IN_CACHE // len(x)))
        return torch.cat(
            [
                torch.cat([self._pairs(x, piece, slice(i, i + 1)) for piece in pieces], 1)
                for i in range(len(self.weights[0]))
            ]
        )

    def _pairs(self, x: Tensor, others: Tensor, members: slice) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        weights = [weight[members] for weight in self.weights]
        biases = [bias[members] for bias in self.biases]
        size, (samples, batch), features = len(weights[0]), others.shape[:2], x.shape[1]
        base = torch.baddbmm(biases[0], x.expand(size, *x.shape), weights[0][:, :features])
        rows = others.flatten(0, 1)
        of_others = torch.bmm(rows.expand(size, *rows.shape), weights[0][:, features:])
        # Not a view: an activation in place would make autograd copy it.
        hidden = of_others.view(size, samples, batch, -1) + base[:, None]
        for i, (weight, bias) in enumerate(zip(weights[1:], biases[1:], strict=True)):
            if self.norms is not None:
                hidden = self.norms[i](hidden.view(size, samples * batch, -1), members)
            hidden = activate(hidden)
            hidden = torch.baddbmm(bias, hidden.view(size, samples * batch, -1), weight)
        return hidden.view(size, samples, batch)


_ROWS_IN_CACHE = 1024


class EnsembleLayerNorm(nn.Module):
    """Layer normalisation of each network of an ensemble, (size, batch, width)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1, width))
        self.bias = nn.Parameter(torch.zeros(size, 1, width))

    def forward(self, x: Tensor, members: slice | None = None) -> Tensor:
        """Normalise rows of some networks; None: of the first ones."""
        members = slice(len(x)) if members is None else members
        normed = functional.layer_norm(x, x.shape[-1:])
        return torch.addcmul(self.bias[members], normed, self.weight[members])


class MLPCritics(ObservingModule):
    """Action values by an ensemble of critics that share only the encoder.

    Continuous actions (``action_size`` numbers) are an input; of ``num_actions`` discrete ones all
    values are outputs.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_size: int,
        *,
        num_critics: int,
        hidden_sizes: tuple[int, ...],
        activation: str,
        layer_norm: bool = False,
        num_actions: int = 0,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None)
        self.num_actions = num_actions
        inputs = self.num_features + (0 if num_actions else action_size)
        sizes = (inputs, *hidden_sizes, num_actions or 1)
        self.net = EnsembleMLP(num_critics, sizes, activation, layer_norm)

    def forward(self, obs: Any, actions: Tensor, members: int | None = None) -> Tensor:
        """Return values (critics, batch) of actions in [-1, 1], or of discrete ones."""
        if self.num_actions:
            values = self.of_all(obs, members)
            index = actions.reshape(1, -1, 1).expand(len(values), -1, 1)
            return values.gather(-1, index).squeeze(-1)
        features, _ = self.encode(obs)
        rows = torch.cat([features, actions.reshape(len(actions), -1)], 1)
        return self.net(rows, members).squeeze(-1)  # type: ignore[no-any-return]

    def of_all(self, obs: Any, members: int | None = None) -> Tensor:
        """Return values (critics, batch, actions) of all discrete actions."""
        features, _ = self.encode(obs)
        return self.net(features, members)  # type: ignore[no-any-return]

    def of_samples(self, obs: Any, actions: Tensor) -> Tensor:
        """Return values (critics, samples, batch) of several continuous actions per observation."""
        features, _ = self.encode(obs)
        return self.net.of_pairs(features, actions.flatten(2))


class MLPValue(ObservingModule):
    """The value of an observation."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None)
        self.net = MLP((self.num_features, *hidden_sizes, 1), activation)

    def forward(self, obs: Any) -> Tensor:
        """Return values (batch)."""
        features, _ = self.encode(obs)
        return self.net(features).squeeze(-1)  # type: ignore[no-any-return]


class ActorCritics(nn.Module):
    """A policy and its critics."""

    def __init__(self, actor: MLPActor, critics: MLPCritics) -> None:
        super().__init__()
        self.actor, self.critics = actor, critics

    def update_normalizer(self, *rows: Rows, communicator: Communicator = ALONE) -> None:
        """Add flat rows of raw observations to the statistics of both."""
        update_normalizers(self, *rows, communicator=communicator)
