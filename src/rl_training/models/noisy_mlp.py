"""Fully connected layers with learnt noise (NoisyNet), which is an input of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.mlp import ACTIVATIONS, MLP, NUMPY_ACTIVATIONS, NoisyFunction
from rl_training.types import Array


def given(noise: Tensor | None) -> tuple[Tensor, ...]:
    """Return the noise of a layer as its arguments: none for a layer without."""
    return () if noise is None else (noise,)


class NoisyMLP(MLP):
    """An `MLP` with factorised noise in every layer (Fortunato et al. 2018, arXiv:1706.10295).

    A layer with p inputs and q outputs takes p + q standard normal numbers e:

        y = W x + b + g(e_out) (S (g(e_in) x) + s),  g(e) = sign(e) sqrt(abs(e))

    with products element by element, which equals adding S times g(e_out) g(e_in)^T to the weights.
    S and s are learnt too; they begin at ``scale`` / sqrt(p). Noise is one vector for all rows, or
    one for each; without noise this is the `MLP` of W and b.
    """

    def __init__(self, sizes: tuple[int, ...], activation: str, scale: float = 0.5) -> None:
        super().__init__(sizes, activation)
        self.scales = nn.ModuleList()
        for n_in, n_out in itertools.pairwise(sizes):
            layer = nn.Linear(n_in, n_out)
            nn.init.constant_(layer.weight, scale / math.sqrt(n_in))
            nn.init.constant_(layer.bias, scale / math.sqrt(n_in))
            self.scales.append(layer)
        each = [size for pair in itertools.pairwise(sizes) for size in pair]
        self._ends = [0, *itertools.accumulate(each)]
        self.noise_size = self._ends[-1]
        """Numbers of noise that all layers take."""

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Apply all layers."""
        return self.output(self.hidden(x, noise), noise)

    def hidden(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Apply all layers but the last."""
        if noise is None:
            return super().hidden(x)
        activate = ACTIVATIONS[self.activation]
        for number in range(len(self.layers) - 1):
            x = activate(self._layer(number, x, noise))
        return x

    def output(self, hidden: Tensor, noise: Tensor | None = None) -> Tensor:
        """Apply the last layer."""
        if noise is None:
            return super().output(hidden)
        return self._layer(len(self.layers) - 1, hidden, noise)

    def _layer(self, number: int, x: Tensor, noise: Tensor) -> Tensor:
        mean, scale = cast(
            "tuple[nn.Linear, nn.Linear]", (self.layers[number], self.scales[number])
        )
        start, middle, end = self._ends[2 * number : 2 * number + 3]
        factors = noise[..., start:end]
        factors = factors.sign() * factors.abs().sqrt()
        inner, outer = factors[..., : middle - start], factors[..., middle - start :]
        noisy = functional.linear(inner * x, scale.weight, scale.bias)
        return functional.linear(x, mean.weight, mean.bias) + outer * noisy

    def numpy_noisy(self, gate: Callable[[], Array] | None = None) -> NoisyFunction:
        """Return `forward` in NumPy, with or without noise, over views of the same weights."""
        activate, plain, ends = (
            NUMPY_ACTIVATIONS[self.activation],
            self.numpy_function(gate),
            self._ends,
        )
        means, scales = (
            [
                (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
                for layer in cast("Iterable[nn.Linear]", layers)
            ]
            for layers in (self.layers, self.scales)
        )

        def forward(x: Array, noise: Array | None) -> Array:
            if noise is None:
                return plain(x)
            factors = np.sign(noise) * np.sqrt(np.abs(noise))
            parts = np.split(factors, ends[1:-1], -1)
            for number, (mean, scale) in enumerate(zip(means, scales, strict=True)):
                if gate is not None and number == len(means) - 1:
                    x = x * gate()
                inner, outer = parts[2 * number : 2 * number + 2]
                noisy = (inner * x) @ scale[0] + scale[1]
                x = x @ mean[0] + mean[1]
                x += outer * noisy
                if number < len(means) - 1:
                    x = activate(x)
            return x

        return forward
