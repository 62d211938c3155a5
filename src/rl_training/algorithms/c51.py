"""C51: a categorical distribution of returns (Bellemare et al. 2017, arXiv:1707.06887)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.distributional import DistributionalDQN
from rl_training.algorithms.dqn import DQNSettings
from rl_training.search_space import Choice, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class C51Config(DQNSettings):
    """C51's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_atoms": Choice((21, 51, 101)),
    }

    num_atoms: int = 51
    """Returns that the distribution of each action is over, equally spaced."""
    v_min: float = -10.0
    """Least of them. Smaller returns count as this: set both limits to what the task can return,
    discounted."""
    v_max: float = 10.0
    """Largest of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.num_atoms >= 2, "num_atoms", "at least 2")
        ordered = math.isfinite(self.v_min) and self.v_min < self.v_max < math.inf
        self._require(ordered, "v_max", f"finite and above v_min = {self.v_min}")


def projected(probabilities: Tensor, returns: Tensor, support: Tensor) -> Tensor:
    """Return the distribution on ``support`` of given returns with given probabilities.

    With the distance d between neighbours of the support z, and returns g_j of probability p_j,
    clipped to the support's limits:

        m_i = sum_j p_j max(0, 1 - abs(g_j - z_i) / d)

    Each return is shared between its two neighbours in the support, and belongs wholly to one that
    it hits exactly: no probability is lost.
    """
    low, high = support[0], support[-1]
    distance = (high - low) / (len(support) - 1)
    clipped = returns.clamp(low, high)
    shares = 1 - (clipped.unsqueeze(-2) - support.unsqueeze(-1)).abs() / distance
    return (shares.clamp(min=0) * probabilities.unsqueeze(-2)).sum(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return - sum_i m_i log p_i of each row, with p the softmax of ``logits``."""
    return -(targets * torch.log_softmax(logits, -1)).sum(-1)


class C51(DistributionalDQN):
    """DQN of the probabilities of fixed returns."""

    def return_loss(
        self,
        outputs: Tensor,
        following: Tensor,
        batch: Mapping[str, Any],
        noise: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the `cross_entropy` of each row with the `projected` target.

        The target has the probabilities of the best action that follows, and the returns
        rewards + discounts support.
        """
        del noise
        support = self.model.distribution.support
        returns = batch["rewards"][:, None] + batch["discounts"][:, None] * support
        targets = projected(torch.softmax(following, -1), returns, support)
        return cross_entropy(outputs, targets)
