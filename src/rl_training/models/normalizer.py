"""Running normalisation: of observations inside networks, of rewards while collecting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.types import Array

_EPSILON = 1e-8


class RunningNorm(nn.Module):
    """Standardises by the mean and variance of all rows passed to :meth:`update`."""

    frozen_between_updates = True
    """Its buffers change only in `update`, never in `forward`: while experience is collected and
    learnt from, a network with this module is a fixed function of its parameters."""

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move what `forward` uses; the moments stay float64 on the CPU (MPS has no float64)."""
        del recurse
        self.shift, self.scale = fn(self.shift), fn(self.scale)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Standardise and clip."""
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Add a batch to the statistics (Chan et al.'s parallel form of Welford's sums)."""
        if rows.shape[0] == 0:
            return
        rows = rows.cpu().double()
        count = rows.shape[0]
        mean = rows.mean(0)
        m2 = (rows - mean).square().sum(0)
        total = self.count + count
        delta = mean - self.mean
        self.m2 += m2 + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.rsqrt(self.m2 / self.count + _EPSILON))


class RewardNormalizer:
    """Divides rewards by the running deviation of the discounted return."""

    def __init__(self, num_envs: int, gamma: float, clip: float) -> None:
        self.gamma = gamma
        self.clip = clip
        self._returns = np.zeros(num_envs)
        self._count = 0.0
        self._mean = 0.0
        self._m2 = 0.0

    def __call__(self, reward: Array, done: Array, valid: Array) -> Array:
        """Add one step's rewards to the statistics and return them normalised."""
        self._returns = self._returns * self.gamma + reward
        seen = self._returns[valid]
        if seen.size:
            total = self._count + seen.size
            mean = float(seen.mean())
            delta = mean - self._mean
            self._m2 += float(np.square(seen - mean).sum())
            self._m2 += delta * delta * self._count * seen.size / total
            self._mean += delta * seen.size / total
            self._count = total
        self._returns[done] = 0.0
        if not math.isfinite(self._m2):
            return (
                reward  # unchanged: the check for NaNs then names the environment of the first one
            )
        scale = np.sqrt(self._m2 / max(self._count, 1.0) + _EPSILON)
        normalized: Array = np.clip(reward / scale, -self.clip, self.clip)
        return normalized

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, for a checkpoint."""
        return {
            "returns": self._returns.copy(),
            "moments": [self._count, self._mean, self._m2],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved statistics."""
        self._returns = np.array(state["returns"], np.float64)
        self._count, self._mean, self._m2 = state["moments"]
