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

    ``quantiles`` is (rows, n), ``targets`` (rows, m), ``fractions`` (n) or (rows, n). The gradient
    is computed with the loss, since that of each pair need not be kept: it is -abs(...) clip(u_ij).
    """
    below, above = 1 - fractions.unsqueeze(-1), fractions.unsqueeze(-1)
    with torch.no_grad():
        errors = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)
        slopes = errors.clamp(-1, 1)
        weighted = torch.where(errors < 0, below, above) * slopes
        values = (weighted * (errors - 0.5 * slopes)).mean(-1).sum(-1)
        slopes = weighted.mean(-1)
    # The value of the loss and, as a function of the quantiles, its gradient.
    linear = (slopes * quantiles).sum(-1)
    return values - (linear - linear.detach())


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
