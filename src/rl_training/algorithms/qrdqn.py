"""QR-DQN: quantile regression of returns (Dabney et al. 2018, arXiv:1710.10044)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.distributional import DistributionalDQN
from rl_training.algorithms.dqn import DQNSettings
from rl_training.search_space import Choice, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class QRDQNConfig(DQNSettings):
    """QR-DQN's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_quantiles": Choice((10, 25, 50, 100, 200)),
    }

    num_quantiles: int = 200
    """Quantiles of the return of each action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.num_quantiles >= 1, "num_quantiles", "at least 1")


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, fractions: Tensor) -> Tensor:
    """Return the quantile Huber loss of each row.

    With quantiles q_i at ``fractions`` t_i and samples of the target y_j:

        u_ij = y_j - q_i
        loss = sum_i mean_j abs( t_i - 1{u_ij < 0} ) huber(u_ij)
        huber(x) = x^2/2 where abs(x) < 1, else abs(x) - 1/2

    ``quantiles`` is (rows, n), ``targets`` (rows, m), ``fractions`` (n) or (rows, n). Nothing of
    the n m pairs is kept for the backward pass: the loss is computed with its gradient, which is
    - mean_j abs( t_i - 1{u_ij < 0} ) clip(u_ij, -1, 1). Errors above and below 0 are summed apart,
    since each kind has one weight for all j.
    """
    with torch.no_grad():
        errors = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)
        above = errors.clamp(0, 1)
        slopes = fractions * above.mean(-1)
        # huber(u) = c (u - c/2) with c = clip(u, -1, 1). In place: there are many pairs.
        values = fractions * above.mul_(errors.sub(above, alpha=0.5)).mean(-1)
        below = errors.clamp(-1, 0)
        slopes += (1 - fractions) * below.mean(-1)
        values += (1 - fractions) * below.mul_(errors.sub_(below, alpha=0.5)).mean(-1)
    # The value of the loss; as a function of the quantiles it has the gradient above.
    linear = (slopes * quantiles).sum(-1)
    return values.sum(-1) - (linear - linear.detach())


class QRDQN(DistributionalDQN):
    """DQN of quantiles at fixed fractions (i + 1/2) / n."""

    def return_loss(
        self,
        outputs: Tensor,
        following: Tensor,
        batch: Mapping[str, Any],
        noise: Mapping[str, Tensor],
    ) -> Tensor:
        """Return `quantile_huber_loss` of each row: target = rewards + discounts following."""
        del noise
        number = outputs.shape[-1]
        fractions = (torch.arange(number, device=outputs.device) + 0.5) / number
        targets = batch["rewards"][:, None] + batch["discounts"][:, None] * following
        return quantile_huber_loss(outputs, targets, fractions)
