"""Distributions of returns: what a network's numbers for an action describe, and their mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.types import Array


class ValueDistribution(Protocol):
    """What the numbers of one action describe."""

    size: int
    """Numbers per action."""
    is_linear: bool
    """Whether the mean is linear in the numbers; a dueling state value then changes no choice."""

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the values of actions, given (..., size)."""
        ...

    def numpy_mean(self) -> Callable[[Array], Array]:
        """Return `mean` in NumPy."""
        ...


class Quantiles(nn.Module):
    """Quantiles of the return, all equally likely (Dabney et al. 2018, arXiv:1710.10044)."""

    is_linear = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the mean of the quantiles."""
        return outputs.mean(-1)

    def numpy_mean(self) -> Callable[[Array], Array]:
        """Return `mean` in NumPy."""
        return lambda outputs: outputs.mean(-1)


class Atoms(nn.Module):
    """Logits of fixed returns, equally spaced (Bellemare et al. 2017, arXiv:1707.06887)."""

    is_linear = False
    frozen_between_updates = True
    support: Tensor

    def __init__(self, low: float, high: float, size: int) -> None:
        super().__init__()
        self.low, self.high, self.size = low, high, size
        self.register_buffer("support", torch.linspace(low, high, size), persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the expected return."""
        return (torch.softmax(outputs, -1) * self.support).sum(-1)

    def numpy_mean(self) -> Callable[[Array], Array]:
        """Return `mean` in NumPy."""
        support = self.support.numpy()

        def mean(outputs: Array) -> Array:
            likely = np.exp(outputs - outputs.max(-1, keepdims=True))
            values: Array = likely @ support / likely.sum(-1)
            return values

        return mean
