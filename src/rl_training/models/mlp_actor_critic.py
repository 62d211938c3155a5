"""A policy and a value function: two MLPs on vectors, or on one encoder of images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.errors import ConfigError
from rl_training.models.action_heads import ActionHead, NumpyChoice, make_action_head
from rl_training.models.encoders import (
    DEFAULT_ENCODER,
    EncoderConfig,
    FlattenEncoder,
    make_encoder,
    split_mask,
)
from rl_training.models.normalizer import RunningNorm
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
        activate = ACTIVATIONS[self.activation]
        *hidden, last = cast("Iterable[nn.Linear]", self.layers)
        for layer in hidden:
            x = activate(functional.linear(x, layer.weight, layer.bias))
        return functional.linear(x, last.weight, last.bias)

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


class MLPActorCritic(nn.Module):
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
        super().__init__()
        self.head = make_action_head(action_spec, log_std_init)
        self.encoder, features = make_encoder(obs_spec, encoder)
        self.sees_images = obs_spec.has_images
        self.norm: nn.ModuleDict | None = None
        if normalize_obs:
            vectors = {k: leaf for k, leaf in obs_spec.encoded.items() if not leaf.is_image}
            if not vectors:
                raise ConfigError("'normalize_obs' is for vectors: images are scaled as they are")
            # Module names may be neither empty nor hold dots: leaves are named by position.
            self._leaf_names = {
                key: f"leaf{i}" for i, key in enumerate(obs_spec.encoded) if key in vectors
            }
            self.norm = nn.ModuleDict(
                {
                    self._leaf_names[key]: RunningNorm(leaf.shape, clip_obs)
                    for key, leaf in vectors.items()
                }
            )
        self.actor = MLP((features, *hidden_sizes, self.head.param_size), activation, 0.01)
        self.critic = MLP((features, *hidden_sizes, 1), activation, 1.0)

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Parameters of the action distribution, and the action mask."""
        features, mask = self._encode(obs)
        return self.actor(features), mask

    def act(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The actions that ``noise`` selects, their log-probabilities, and values."""
        features, mask = self._encode(obs)
        params = self.actor(features)
        actions = self.head.sample(params, noise, mask)
        logprobs, _ = self.head.logprob_entropy(params, actions, mask)
        return actions, logprobs, self.critic(features).squeeze(-1)

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Observations and noise (None: greedy) to actions, in NumPy; None where that cannot be.

        It reads the weights as they are when this is called. Vectors on a CPU only.
        """
        act = numpy_policy(self.encoder, self.actor, self.head)
        if act is None or self.norm is None:
            return act
        norm = cast("RunningNorm", self.norm[self._leaf_names[""]])
        shift, scale, clip = norm.shift.numpy(), norm.scale.numpy(), norm.clip
        return lambda obs, noise: act(np.clip((obs - shift) * scale, -clip, clip), noise)

    def value(self, obs: Any) -> Tensor:
        """State values, one per row."""
        features, _ = self._encode(obs)
        return self.critic(features).squeeze(-1)  # type: ignore[no-any-return]

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """Log-probability and entropy of ``batch["actions"]``, and values, at ``batch["obs"]``."""
        features, mask = self._encode(batch["obs"])
        logprob, entropy = self.head.logprob_entropy(self.actor(features), batch["actions"], mask)
        return Evaluation(logprob, entropy, self.critic(features).squeeze(-1))

    def _encode(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        obs, mask = split_mask(obs)
        if self.norm is not None:
            obs = self._normalize(obs)
        return self.encoder(obs), mask

    def _normalize(self, obs: Any) -> Any:
        norm = self.norm
        assert norm is not None  # noqa: S101 - narrows the type
        if isinstance(obs, dict):
            return {
                key: norm[self._leaf_names[key]](leaf) if key in self._leaf_names else leaf
                for key, leaf in obs.items()
            }
        return norm[self._leaf_names[""]](obs)

    def update_normalizer(self, obs: Any, valid: Tensor) -> None:
        """Show the normaliser a rollout (flat rows; those not ``valid`` are left out)."""
        if self.norm is None:
            return
        for key, name in self._leaf_names.items():
            leaf = obs[key] if key else obs
            self.norm[name].update(leaf[valid])  # type: ignore[operator]
