"""Means over the rows that count: neither reset-only rows nor the padding of sequences do."""

from __future__ import annotations

from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of ``x`` where ``mask`` is 1; of all of it without one."""
    if mask is None:
        return x.mean()
    return (x * mask).sum() / mask.expand_as(x).sum().clamp(min=1.0)


def padded_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of ``x``, with zeros where ``mask`` is 0.

    Its divisor is a constant, so that a step has the same weight in every batch of sequences.
    """
    return x.mean() if mask is None else (x * mask).mean()
