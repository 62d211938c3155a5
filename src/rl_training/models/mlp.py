"""Fully connected layers, in torch and over the same weights in NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.types import Array

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu_,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
"""By the names that configs use; ``relu`` overwrites its input."""

NUMPY_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0.0, out=x),
}
"""These overwrite their input. A network with an activation missing here acts through torch."""

NoisyFunction = Callable[[Array, Array | None], Array]
"""From inputs and noise (None: without) to outputs, in NumPy."""


class MLP(nn.Module):
    """Linear layers with an activation after each but the last.

    With ``output_gain``, weights are initialised orthogonally (gain sqrt 2, ``output_gain`` in the
    last layer) and biases with zeros, as is usual for policy gradients. Without it they are
    initialised as in `nn.Linear`. With ``layer_norm`` every hidden layer is followed by layer
    normalisation, then by the activation.
    The layers are applied as functions: with the few rows of one environment step, calling each
    as a module would take longer than its arithmetic.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        activation: str,
        output_gain: float | None = None,
        layer_norm: bool = False,
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
        self.norms: nn.ModuleList | None = None
        if layer_norm:
            self.norms = nn.ModuleList(nn.LayerNorm(width) for width in sizes[1:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        return self.output(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Apply all layers but the last."""
        activate = ACTIVATIONS[self.activation]
        *hidden, _ = cast("Iterable[nn.Linear]", self.layers)
        for i, layer in enumerate(hidden):
            x = functional.linear(x, layer.weight, layer.bias)
            if self.norms is not None:
                x = self.norms[i](x)
            x = activate(x)
        return x

    def output(self, hidden: Tensor) -> Tensor:
        """Apply the last layer."""
        last = cast("nn.Linear", self.layers[-1])
        return functional.linear(hidden, last.weight, last.bias)

    def numpy_function(self, gate: Callable[[], Array] | None = None) -> Callable[[Array], Array]:
        """Return `forward` in NumPy, over views of the same weights.

        For the few rows of one environment step on a CPU it is several times faster than torch.
        The input of the last layer is multiplied by what ``gate`` returns.
        """
        activate = NUMPY_ACTIVATIONS[self.activation]
        *hidden, last = [
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
            for layer in cast("Iterable[nn.Linear]", self.layers)
        ]

        norms = [_numpy_norm(cast("nn.LayerNorm", norm)) for norm in self.norms or ()]

        def forward(x: Array) -> Array:
            for i, (weight, bias) in enumerate(hidden):
                x = x @ weight
                x += bias
                if norms:
                    x = norms[i](x)
                x = activate(x)
            if gate is not None:
                x = x * gate()
            return x @ last[0] + last[1]  # type: ignore[no-any-return]

        return forward

    def numpy_noisy(self, gate: Callable[[], Array] | None = None) -> NoisyFunction:
        """Return `numpy_function` with an argument for noise, which has no effect."""
        forward = self.numpy_function(gate)
        return lambda x, _: forward(x)


def _numpy_norm(norm: nn.LayerNorm) -> Callable[[Array], Array]:
    """Return layer normalisation in NumPy, over views of its weights; it overwrites its input."""
    weight, bias, eps = norm.weight.detach().numpy(), norm.bias.detach().numpy(), norm.eps

    def forward(x: Array) -> Array:
        x -= x.mean(-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
        x *= weight
        x += bias
        return x

    return forward
