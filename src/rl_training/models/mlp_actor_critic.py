"""A policy and a value function: two MLPs on vectors, or on one encoder of images."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.action_heads import ActionHead, NumpyChoice, make_action_head
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig, FlattenEncoder
from rl_training.models.observing import ObservingModule
from rl_training.types import ActionSpec, Array, ObsSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu_,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


NUMPY_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0.0, out=x),
}
"""In place; an activation missing here acts through torch."""


class Evaluation(NamedTuple):
    """What a model says of stored actions, one number per row."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor


class MLP(nn.Module):
    """Linear layers, the last without activation.

    With ``output_gain`` weights are orthogonal (gain sqrt 2, the last ``output_gain``) and biases
    zero, as policy gradients want them; without it they are as torch makes them.
    The layers are applied as functions: calling each as a module costs more than its arithmetic
    while a few environments are stepped.
    """

    def __init__(
        self, sizes: tuple[int, ...], activation: str, output_gain: float | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList()
        for number, (n_in, n_out) in enumerate(itertools.pairwise(sizes), start=2):
            layer = nn.Linear(n_in, n_out)
            if output_gain is not None:
                is_last = number == len(sizes)
                nn.init.orthogonal_(layer.weight, output_gain if is_last else math.sqrt(2))
                nn.init.zeros_(layer.bias)
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        return self.output(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Apply all layers but the last."""
        activate = ACTIVATIONS[self.activation]
        *hidden, _ = cast("Iterable[nn.Linear]", self.layers)
        for layer in hidden:
            x = activate(functional.linear(x, layer.weight, layer.bias))
        return x

    def output(self, hidden: Tensor) -> Tensor:
        """Apply the last layer."""
        last = cast("nn.Linear", self.layers[-1])
        return functional.linear(hidden, last.weight, last.bias)

    def numpy_function(self) -> Callable[[Array], Array]:
        """The same function over NumPy views of the same weights.

        For the few rows of one vector step on a CPU it is several times faster than torch.
        """
        activate = NUMPY_ACTIVATIONS[self.activation]
        *hidden, last = [
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
            for layer in cast("Iterable[nn.Linear]", self.layers)
        ]

        def forward(x: Array) -> Array:
            for weight, bias in hidden:
                x = x @ weight
                x += bias
                x = activate(x)
            return x @ last[0] + last[1]  # type: ignore[no-any-return]

        return forward


def numpy_policy(encoder: nn.Module, net: MLP, head: ActionHead) -> NumpyChoice | None:
    """Observations and noise (None: greedy) to actions over the same weights, in NumPy.

    None where that cannot be: it takes plain vectors, on a CPU, and known activations.
    """
    plain = isinstance(encoder, FlattenEncoder) and encoder.single_vector
    on_cpu = next(net.parameters()).device.type == "cpu"
    if not (plain and on_cpu and net.activation in NUMPY_ACTIVATIONS):
        return None
    choose = head.numpy_choice()
    if choose is None:
        return None
    forward = net.numpy_function()
    return lambda obs, noise: choose(forward(obs), noise)


class FeedForwardActorCritic(ObservingModule, ABC):
    """Acts and judges row by row; what becomes of features is the subclass's own."""

    actor: MLP
    """From features to the parameters of the action distribution."""

    @abstractmethod
    def judge(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the action distribution, and state values, one per row."""

    @abstractmethod
    def value(self, obs: Any) -> Tensor:
        """State values, one per row."""

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Parameters of the action distribution, and the action mask."""
        features, mask = self.encode(obs)
        return self.actor(features), mask

    def act(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The actions that ``noise`` selects, their log-probabilities, and values."""
        features, mask = self.encode(obs)
        params, values = self.judge(features)
        actions = self.head.sample(params, noise, mask)
        logprobs, _ = self.head.logprob_entropy(params, actions, mask)
        return actions, logprobs, values

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Observations and noise (None: greedy) to actions, in NumPy; None where that cannot be.

        It reads the weights as they are when this is called. Vectors on a CPU only.
        """
        act = numpy_policy(self.encoder, self.actor, self.head)
        normalize = self.numpy_normalize() if act is not None else None
        if act is None or normalize is None:
            return act
        return lambda obs, noise: act(normalize(obs), noise)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> Evaluation:
        """Log-probability and entropy of ``actions``, and values, at ``obs``."""
        features, mask = self.encode(obs)
        params, values = self.judge(features)
        return Evaluation(*self.head.logprob_entropy(params, actions, mask), values)

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """`evaluate_actions` of a batch's ``obs`` and ``actions``."""
        return self.evaluate_actions(batch["obs"], batch["actions"])


class MLPActorCritic(FeedForwardActorCritic):
    """Separate policy and value networks over (normalised) observations.

    What encodes them is shared by both: nothing for vectors, a `NatureCNN` for each image, or the
    user's own. Without ``hidden_sizes`` the two are linear on that.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...] = (64, 64),
        activation: str = "tanh",
        log_std_init: float = 0.0,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = make_action_head(action_spec, log_std_init)
        super().__init__(head, obs_spec, encoder, clip_obs if normalize_obs else None)
        features = self.num_features
        self.actor = MLP((features, *hidden_sizes, head.param_size), activation, 0.01)
        self.critic = MLP((features, *hidden_sizes, 1), activation, 1.0)

    def judge(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the action distribution, and state values, one per row."""
        return self.actor(features), self.critic(features).squeeze(-1)

    def value(self, obs: Any) -> Tensor:
        """State values, one per row."""
        features, _ = self.encode(obs)
        return self.critic(features).squeeze(-1)  # type: ignore[no-any-return]
