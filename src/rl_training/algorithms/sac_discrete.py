"""Soft actor-critic for discrete actions (Christodoulou 2019, arXiv:1910.07207).

The critics have a value for every action and the policy a probability, so expectations over
actions are sums: nothing is sampled in an update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.off_policy import OffPolicyConfig
from rl_training.algorithms.sac import SAC, SACModel, SACSettings, sac_temperature_loss
from rl_training.search_space import Range, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class SACDiscreteConfig(SACSettings, OffPolicyConfig):
    """Discrete SAC's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "target_entropy_scale": Range(0.1, 0.98),
    }

    target_entropy: float | None = None
    """Entropy to keep in every observation; unset: target_entropy_scale times the largest."""
    target_entropy_scale: float = 0.89
    """Entropy to keep over the largest possible, the logarithm of the number of legal actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.target_entropy_scale <= 1, "target_entropy_scale", "in (0, 1]")
        usual = type(self).target_entropy_scale
        unused = self.target_entropy is None or self.target_entropy_scale == usual
        self._require(unused, "target_entropy_scale", "unset with target_entropy")


_IMPOSSIBLE = -1000.0
"""A log-probability whose probability is 0, and small enough that its gradient is finite."""


def entropies(logprobs: Tensor) -> Tensor:
    """Return H = -sum_a p(a) log p(a) of each row, given log-probabilities of all actions.

    Those of illegal actions are the least float; their summands and gradients are 0.
    """
    return -(logprobs.exp() * logprobs.clamp(min=_IMPOSSIBLE)).sum(-1)


def soft_values(q: Tensor, logprobs: Tensor, *, ent_coef: Tensor) -> Tensor:
    """Return the soft value of each row, an exact expectation over the policy's actions.

        V(s) = sum_a p(a) min_i q_i(s, a) + ent_coef H(p)

    ``q``: (critics, batch, actions), ``logprobs``: (batch, actions).
    """
    return (logprobs.exp() * q.amin(0)).sum(-1) + ent_coef * entropies(logprobs)


def discrete_sac_targets(batch: Mapping[str, Tensor], *, ent_coef: Tensor) -> Tensor:
    """Return the critics' targets, rewards + discounts V(next_obs) by `soft_values`.

    ``next_q`` are the target critics' values (critics, batch, actions), ``next_logprobs`` the
    policy's log-probabilities (batch, actions).
    """
    following = soft_values(batch["next_q"], batch["next_logprobs"], ent_coef=ent_coef)
    return batch["rewards"] + batch["discounts"] * following


class SACDiscrete(SAC):
    """SAC's update with a categorical policy and exact expectations over its actions."""

    config: SACDiscreteConfig

    def __init__(
        self,
        model: SACModel,
        config: SACDiscreteConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.noise_shape = None
        if config.target_entropy is None:
            self.target_entropy = config.target_entropy_scale * math.log(model.critics.num_actions)

    def soft_targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `discrete_sac_targets` of the policy's next actions."""
        logprobs, _ = self._distribution(batch["next_obs"])
        next_q = self.target.module.of_all(batch["next_obs"])
        followed = {**batch, "next_q": next_q, "next_logprobs": logprobs}
        return discrete_sac_targets(followed, ent_coef=self._ent_coef())

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return minus the mean of `soft_values`, plus the temperature's loss where it is learnt.

        They share no parameter, so one step on their sum is a step on each.
        """
        logprobs, legal = self._distribution(batch["obs"])
        with torch.no_grad():
            q = self.model.critics.of_all(batch["obs"])
        ent_coef = self._ent_coef()
        loss = actor_loss = -soft_values(q, logprobs, ent_coef=ent_coef).mean()
        entropy = entropies(logprobs)
        if self.config.ent_coef is None:
            log_ent_coef = self.model.temperature.log_ent_coef
            loss = loss + sac_temperature_loss(-entropy, log_ent_coef, self._entropy_to_keep(legal))
        return {
            "loss": loss,
            "actor_loss": actor_loss,
            "entropy": entropy.mean(),
            "ent_coef": ent_coef,
        }

    def _distribution(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities of all actions, and which actions are legal."""
        params, mask = self.model.actor.policy(obs)
        return self.model.actor.head.distribution(params, mask), mask  # type: ignore[operator]

    def _entropy_to_keep(self, legal: Tensor | None) -> float | Tensor:
        """Return the target entropy; unless one is given, that of each row's legal actions."""
        if legal is None or self.config.target_entropy is not None:
            return self.target_entropy
        return self.config.target_entropy_scale * legal.sum(-1).clamp(min=1).log()
