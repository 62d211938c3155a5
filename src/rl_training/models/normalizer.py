"""Running normalisation: of observations inside networks, of rewards while collecting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.moments import Moments
from rl_training.communicator import ALONE, Communicator
from rl_training.types import Array

EPSILON = 1e-8
"""Added to variances before the square root."""


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
    def update(self, *shards: Tensor, communicator: Communicator = ALONE) -> None:
        """Add the rows of each shard to the statistics, in the order of shards."""
        batches = communicator.gather(torch.stack([_moments_of_rows(rows) for rows in shards]))
        merged, shape = Moments(self.count, self.mean, self.m2), self.mean.shape
        for batch in batches:
            mean, m2 = batch[1:].view(2, *shape).unbind()
            if batch[0] > 0:
                merged = merged.merged(Moments(batch[0], mean, m2))
        if merged.count == 0:
            return
        for buffer, value in zip((self.count, self.mean, self.m2), merged, strict=True):
            buffer.copy_(value)
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.rsqrt(self.m2 / self.count + EPSILON))


def _moments_of_rows(rows: Tensor) -> Tensor:
    """Return the number of rows, and their means and sums of squared deviations, in one row."""
    rows = rows.cpu().double()
    if not len(rows):
        return torch.zeros(1 + 2 * rows[0:1].sum(0).numel(), dtype=torch.float64)
    mean = rows.mean(0)
    m2 = (rows - mean).square().sum(0)
    count = torch.tensor([float(len(rows))], dtype=torch.float64)
    return torch.cat((count, mean.reshape(-1), m2.reshape(-1)))


class RewardNormalizer:
    """Divides rewards by the running deviation of the discounted return.

    The moments since the last `end_rollout` are kept apart from those before it.
    """

    def __init__(self, num_envs: int, gamma: float, clip: float) -> None:
        self.gamma = gamma
        self.clip = clip
        self._returns = np.zeros(num_envs)
        self._before = self._rollout = Moments(0.0, 0.0, 0.0)

    def __call__(self, reward: Array, done: Array, valid: Array) -> Array:
        """Add one step's rewards to the statistics and return them normalised."""
        self._returns = self._returns * self.gamma + reward
        seen = self._returns[valid]
        if seen.size:
            mean = float(seen.mean())
            step = Moments(float(seen.size), mean, float(np.square(seen - mean).sum()))
            self._rollout = self._rollout.merged(step)
        self._returns[done] = 0.0
        moments = self.moments
        if not math.isfinite(moments.m2):
            return (
                reward  # unchanged: the check for NaNs then names the environment of the first one
            )
        scale = np.sqrt(moments.variance() + EPSILON)
        normalized: Array = np.clip(reward / scale, -self.clip, self.clip)
        return normalized

    @property
    def moments(self) -> Moments:
        """The moments of all discounted returns so far."""
        return self._before.merged(self._rollout)

    @property
    def rollout_moments(self) -> Moments:
        """The moments since the last `end_rollout`."""
        return self._rollout

    def end_rollout(self, shards: Sequence[Moments]) -> None:
        """Add the moments of every shard's rollout, this one's included, to those before."""
        for moments in shards:
            self._before = self._before.merged(moments)
        self._rollout = Moments(0.0, 0.0, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, for a checkpoint."""
        return {
            "returns": self._returns.copy(),
            "moments": list(self._before),
            "rollout": list(self._rollout),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved statistics."""
        self._returns = np.array(state["returns"], np.float64)
        self._before = Moments(*state["moments"])
        # Earlier versions had only the moments of everything.
        self._rollout = Moments(*state.get("rollout", (0.0, 0.0, 0.0)))
