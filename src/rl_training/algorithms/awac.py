"""Advantage-weighted actor-critic (Nair et al. 2020, arXiv:2006.09359)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.advantage_weighted import AdvantageWeightedLearner
from rl_training.algorithms.off_policy import CriticsConfig, OffPolicyConfig, ensemble_td_loss
from rl_training.algorithms.td3 import td3_targets
from rl_training.models.mlp_continuous import ActorCritics
from rl_training.search_space import Choice, Range, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class AWACConfig(CriticsConfig, OffPolicyConfig):
    """Settings of AWAC."""

    SEARCH: ClassVar[SearchSpace] = {
        "temperature": Range(0.1, 5.0, log=True),
        "batch_size": Choice((256, 512, 1024)),
    }

    batch_size: int = 1024
    """Transitions per update."""
    temperature: float = 1.0
    """Divisor of the advantage in the weights of the policy's loss."""
    log_std_init: float = -1.0
    """Initial logarithm of the policy's standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.temperature < math.inf, "temperature", "above 0 and finite")
        self._require(-5 <= self.log_std_init <= 2, "log_std_init", "from -5 to 2")


def awac_weights(advantages: Tensor, *, temperature: float) -> Tensor:
    """Return the weights of recorded actions, whose mean over the batch is 1.

    w = N softmax( A / temperature )
    """
    return len(advantages) * torch.softmax(advantages / temperature, 0)


class AWAC(AdvantageWeightedLearner):
    """The critics are those of the policy; it imitates recorded actions better than its own."""

    config: AWACConfig

    def __init__(
        self,
        model: ActorCritics,
        config: AWACConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.noise_shape = (2, self.samples, *model.actor.head.noise_shape)

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ensemble_td_loss` to `td3_targets` at an action sampled from the policy."""
        with torch.no_grad():
            actions = self._sample(batch["next_obs"], batch["noise"][0])
            next_q = self.target.module(batch["next_obs"], actions)
            targets = td3_targets({**batch, "next_q": next_q})
        q_values = self.model.critics(batch["obs"], batch["actions"])
        return {"loss": ensemble_td_loss(q_values, targets), "q_mean": q_values.detach().mean()}

    def weights(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `awac_weights` of A = min_i Q_i(s, a) - min_i Q_i(s, a'), a' from the policy."""
        with torch.no_grad():
            own = self._sample(batch["obs"], batch["noise"][1])
            q_values = self.model.critics(batch["obs"], batch["actions"]).amin(0)
            advantages = q_values - self.model.critics(batch["obs"], own).amin(0)
            return awac_weights(advantages, temperature=self.config.temperature)

    def _sample(self, obs: Any, noise: Tensor) -> Tensor:
        params, mask = self.model.actor.policy(obs)
        return self.model.actor.head.sample(params, noise, mask)  # type: ignore[no-any-return]
