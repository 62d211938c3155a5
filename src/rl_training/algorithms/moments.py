"""Count, mean and sum of squared deviations of numbers, computed in parts and merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Moments of some numbers, or elementwise of some rows: tensors, or plain numbers."""

    count: Any
    mean: Any
    m2: Any
    """Sum of squared deviations from the mean."""

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets together (Chan et al. 1983)."""
        total = self.count + other.count
        divisor = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
        delta = other.mean - self.mean
        spread = delta * delta * (self.count * other.count / divisor)
        return Moments(
            total,
            self.mean + delta * (other.count / divisor),
            self.m2 + (other.m2 + spread),
        )

    def variance(self, correction: int = 0) -> Any:
        """Return the variance; with ``correction`` 1 the unbiased estimate."""
        count = self.count - correction
        divisor = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return self.m2 / divisor


def moments_of(numbers: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return count, mean and m2 of all numbers, or of those where ``mask`` is 1, as one tensor."""
    if mask is None:
        count = numbers.numel()
        variance, mean = torch.var_mean(numbers, correction=0)
        return torch.stack((torch.full_like(mean, count), mean, variance * count))
    total = mask.sum()
    mean = (numbers * mask).sum() / total.clamp(min=1)
    m2 = ((numbers - mean).square() * mask).sum()
    return torch.stack((total, mean, m2))


def merged_rows(rows: Tensor) -> Moments:
    """Merge tables of `moments_of` in order: the first axis is merged, the last one is the triple.

    A sum over an axis would round differently for another number of rows per process.
    """
    first, *others = rows.unbind(0)
    result = Moments(*first.unbind(-1))
    for other in others:
        result = result.merged(Moments(*other.unbind(-1)))
    return result
