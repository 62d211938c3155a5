"""Means over the rows that count: neither reset-only rows nor the padding of sequences do."""

from __future__ import annotations

from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of ``x`` where ``mask`` is 1; of all of it without one."""
    return x.mean() if mask is None else (x * mask).sum() / mask.sum().clamp(min=1.0)
