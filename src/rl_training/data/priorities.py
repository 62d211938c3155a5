"""Proportional prioritised replay (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rl_training.data.sum_tree import SumTree
from rl_training.types import Array


@dataclasses.dataclass(frozen=True)
class Prioritization:
    """How TD errors become priorities: (abs(error) + epsilon)^alpha."""

    alpha: float = 0.6
    """Exponent of priorities: 0 samples uniformly, 1 in proportion to them."""
    epsilon: float = 1e-6
    """Added to every error, so that every transition can be sampled again."""


def importance_weights(probabilities: Array, smallest: float, beta: float) -> Array:
    """Return w = (N P)^-beta, divided by the largest, that of the ``smallest`` probability.

    The number of transitions N cancels out.
    """
    weights: Array = ((probabilities / smallest) ** -beta).astype(np.float32)
    return weights


class Priorities(SumTree):
    """The priorities of a ring's transitions; zero where no transition may be sampled."""

    def __init__(self, size: int, rule: Prioritization) -> None:
        super().__init__(size)
        self._rule = rule
        self.largest = 1.0
        """The largest priority so far, which new transitions get."""

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays it owns."""
        yield self._nodes

    def draw(self, count: int, generator: torch.Generator) -> tuple[Array, Array]:
        """Return indices sampled in proportion to their priorities, and their probabilities."""
        if self.total <= 0:
            raise ValueError("the replay buffer contains no transition to sample")
        uniform = torch.rand(count, generator=generator, dtype=torch.float64).numpy()
        index = self.find(uniform * self.total)
        return index, self.get(index) / self.total

    def update(self, index: Array, errors: Tensor) -> None:
        """Set priorities from TD errors."""
        raw = errors.detach().abs().cpu().numpy().astype(np.float64) + self._rule.epsilon
        priorities = raw**self._rule.alpha
        self.largest = max(self.largest, float(priorities.max()))
        self.set(index, priorities)
