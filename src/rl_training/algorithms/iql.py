"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.advantage_weighted import AdvantageWeightedLearner
from rl_training.algorithms.off_policy import CriticsConfig, OffPolicyConfig, ensemble_td_loss
from rl_training.models.mlp_continuous import ActorCritics, MLPValue
from rl_training.search_space import Range, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class IQLConfig(CriticsConfig, OffPolicyConfig):
    """Settings of IQL."""

    SEARCH: ClassVar[SearchSpace] = {
        "expectile": Range(0.5, 0.95),
        "inverse_temperature": Range(0.5, 10.0, log=True),
    }

    expectile: float = 0.7
    """Expectile of the action values that the state value estimates: 0.5 is their mean, values
    near 1 approach their maximum over the recorded actions."""
    inverse_temperature: float = 3.0
    """Factor of the advantage in the weights of the policy's loss, exp(factor x advantage)."""
    max_weight: float = 100.0
    """Largest of these weights."""
    log_std_init: float = -1.0
    """Initial logarithm of the policy's standard deviation (Box actions)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.expectile < 1, "expectile", "between 0 and 1")
        for name in ("inverse_temperature", "max_weight"):
            self._require(0 < getattr(self, name) < math.inf, name, "above 0 and finite")
        self._require(-5 <= self.log_std_init <= 2, "log_std_init", "from -5 to 2")


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return the asymmetric squared error: mean( |expectile - 1(difference < 0)| difference^2 )."""
    weights = torch.where(difference < 0, 1 - expectile, expectile)
    return (weights * difference.square()).mean()


def iql_weights(advantages: Tensor, *, inverse_temperature: float, max_weight: float) -> Tensor:
    """Return the weights of recorded actions: min( exp(inverse_temperature A), max_weight )."""
    return (inverse_temperature * advantages).exp().clamp(max=max_weight)


class IQLModel(nn.Module):
    """Policy, critics and state value."""

    def __init__(self, networks: ActorCritics, value: MLPValue) -> None:
        super().__init__()
        self.actor, self.critics, self.value = networks.actor, networks.critics, value


class IQL(AdvantageWeightedLearner):
    """Learns values of recorded actions alone: no action of the policy is ever evaluated."""

    config: IQLConfig
    model: IQLModel

    def value_networks(self) -> nn.Module:
        """Return critics and state value, which share no parameters: one step trains both."""
        return nn.ModuleList([self.model.critics, self.model.value])

    def update(self, *batches: Mapping[str, Any], delayed: bool = True) -> dict[str, Any]:
        """Take one step of every network and move the target critics."""
        with torch.no_grad():  # both losses need it
            valued = [{**batch, "target_q": self._target_q(batch)} for batch in batches]
        return super().update(*valued, delayed=delayed)

    def _target_q(self, batch: Mapping[str, Any]) -> Tensor:
        return self.target.module(batch["obs"], batch["actions"]).amin(0)  # type: ignore[no-any-return]

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ensemble_td_loss` of the critics plus `expectile_loss` of the state value.

        target = rewards + discounts V(next_obs)
        difference = min_i Q_target_i(s, a) - V(s)
        """
        with torch.no_grad():
            targets = batch["rewards"] + batch["discounts"] * self.model.value(batch["next_obs"])
        q_values = self.model.critics(batch["obs"], batch["actions"])
        values = self.model.value(batch["obs"])
        td_loss = ensemble_td_loss(q_values, targets)
        value_loss = expectile_loss(batch["target_q"] - values, self.config.expectile)
        return {
            "loss": td_loss + value_loss,
            "critic_loss": td_loss,
            "value_loss": value_loss,
            "q_mean": q_values.detach().mean(),
            "value_mean": values.detach().mean(),
        }

    def weights(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `iql_weights` of min_i Q_target_i(s, a) - V(s)."""
        with torch.no_grad():
            return iql_weights(
                batch["target_q"] - self.model.value(batch["obs"]),
                inverse_temperature=self.config.inverse_temperature,
                max_weight=self.config.max_weight,
            )
