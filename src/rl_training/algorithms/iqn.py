"""IQN: quantiles of returns at random fractions (Dabney et al. 2018, arXiv:1806.06923)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl_training.algorithms.distributional import DistributionalDQN
from rl_training.algorithms.dqn import DQNSettings
from rl_training.algorithms.qrdqn import quantile_huber_loss
from rl_training.algorithms.update_noise import uniform_of
from rl_training.search_space import Choice, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class IQNConfig(DQNSettings):
    """IQN's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_quantiles": Choice((8, 16, 32, 64)),
    }
    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("network", "network_kwargs"), "quantiles at any fraction take an 'encoder' instead"
    )

    num_quantiles: int = 64
    """Random fractions of an update at which each return is estimated."""
    num_target_quantiles: int = 64
    """Random fractions of an update at which each target is computed."""
    num_policy_quantiles: int = 32
    """Fixed, equally spaced fractions whose mean quantile is the value of an action."""
    embedding_size: int = 64
    """Cosines of a fraction that the network is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            *("num_quantiles", "num_target_quantiles", "num_policy_quantiles", "embedding_size"),
        ):
            self._require(getattr(self, name) >= 1, name, "at least 1")

    @property
    def rows_per_update(self) -> int:
        """How many rows the largest network evaluates in an update, for the number of threads."""
        return self.samples_per_update * self.num_quantiles


class IQN(DistributionalDQN):
    """DQN of quantiles at fractions that every update draws, for each row and network anew."""

    def noise_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the random numbers of an update, by name."""
        return {
            **super().noise_shapes(),
            "online_fractions": (self.samples, self.config.num_quantiles),
            "target_fractions": (self.samples, self.config.num_target_quantiles),
        }

    def returns(
        self, model: Any, obs: Any, noise: Mapping[str, Tensor], name: str
    ) -> tuple[Tensor, Tensor]:
        """Return quantiles of all actions at the fractions of a network; and values."""
        fractions = uniform_of(noise[f"{name}_fractions"])
        quantiles, values = model.quantiles(obs, fractions, noise.get(name))
        return quantiles, values

    def return_loss(
        self,
        outputs: Tensor,
        following: Tensor,
        batch: Mapping[str, Any],
        noise: Mapping[str, Tensor],
    ) -> Tensor:
        """Return `quantile_huber_loss` of each row: target = rewards + discounts following."""
        fractions = uniform_of(noise["online_fractions"])
        targets = batch["rewards"][:, None] + batch["discounts"][:, None] * following
        return quantile_huber_loss(outputs, targets, fractions)
