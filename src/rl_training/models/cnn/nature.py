"""The convolutional network of DQN's Nature paper (Mnih et al. 2015)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.errors import ConfigError

_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Filters, their size, their stride."""
_SMALLEST = 36
"""Height and width that leave the last layer one place."""


class NatureCNN(nn.Module):
    """Images (batch, channels, height, width) to vectors of ``feature_size``.

    Bytes are scaled to [0, 1]. Weights lie channel last in memory, as (filters, height, width,
    channels), which is the layout that convolutions are fastest in, on a CPU and on a GPU alike;
    the features before the linear layer follow the same order. Orthogonal weights (gain sqrt 2,
    biases zero) are those of policy gradients; else they are as torch makes them. With
    ``layer_norm`` all numbers of a layer's output are normalised before its activation.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        feature_size: int = 512,
        *,
        orthogonal: bool = False,
        bfloat16: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < _SMALLEST:
            raise ConfigError(
                f"images of {height} x {width} are too small for NatureCNN, which needs"
                f" {_SMALLEST} x {_SMALLEST} at least: enlarge them with a wrapper"
                " (gymnasium.wrappers:ResizeObservation), use them as a vector"
                " (gymnasium.wrappers:FlattenObservation), or set algo_kwargs.encoder"
            )
        self.output_size = feature_size
        self._half = bfloat16
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        outputs: list[tuple[int, ...]] = []
        for filters, size, stride in _LAYERS:
            layer = nn.Conv2d(channels, filters, size)
            self.weights.append(layer.weight.detach().permute(0, 2, 3, 1).contiguous())
            self.biases.append(layer.bias)
            height, width = ((side - size) // stride + 1 for side in (height, width))
            channels = filters
            outputs.append((height, width, channels))
        self.linear = nn.Linear(channels * height * width, feature_size)
        if orthogonal:
            for weight in (*self.weights, self.linear.weight):
                nn.init.orthogonal_(weight, math.sqrt(2))
            for bias in (*self.biases, self.linear.bias):
                nn.init.zeros_(bias)
        self.norms: nn.ModuleList | None = None
        if layer_norm:
            self.norms = nn.ModuleList(map(nn.LayerNorm, [*outputs, (feature_size,)]))

    def forward(self, images: Tensor) -> Tensor:
        """Features of each image."""
        half = self._half and images.is_cuda
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            # Scaling the few weights of the first layer is cheaper than scaling the pixels.
            scale = 1 / 255 if images.dtype == torch.uint8 else 1.0
            dtype = torch.bfloat16 if half else torch.float32
            x = images.to(dtype, memory_format=torch.channels_last)
            layers = zip(self.weights, self.biases, _LAYERS, strict=True)
            for i, (weight, bias, (_, _, stride)) in enumerate(layers):
                filters = weight.permute(0, 3, 1, 2)
                if scale != 1.0:
                    filters = filters * scale
                x = functional.conv2d(x, filters, bias, stride)
                if self.norms is not None:
                    x = self.norms[i](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
                x = x.relu_()
                scale = 1.0
            flat = x.permute(0, 2, 3, 1).flatten(1)
            features = functional.linear(flat, self.linear.weight, self.linear.bias)
            if self.norms is not None:
                features = self.norms[-1](features)
        return features.relu_().float()
