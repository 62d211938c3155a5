"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training._internal.coerce import OldName
from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.gradient_step import GradientStep, Target, trainable
from rl_training.algorithms.masking import masked_mean, padded_mean
from rl_training.algorithms.off_policy import (
    CriticsConfig,
    ReplayLearner,
    ensemble_td_loss,
)
from rl_training.algorithms.sequence_replay import SequenceReplayConfig
from rl_training.models.mlp_continuous import ActorCritics


@dataclasses.dataclass(frozen=True, kw_only=True)
class SACSettings(CriticsConfig):
    """Settings of SAC's update, wherever its batches come from."""

    target_update_interval_updates: int = 1
    """Updates between target network updates."""
    target_update_interval: int | None = None
    """Deprecated: use target_update_interval_updates."""
    OLD_NAMES: ClassVar[Mapping[str, OldName]] = {
        "target_update_interval": OldName("target_update_interval_updates")
    }
    """Settings that have a new name."""
    ent_coef: float | None = None
    """Weight of the entropy; unset: learnt, so that the entropy meets target_entropy."""
    ent_coef_init: float = 1.0
    """Initial value of a learnt weight."""
    target_entropy: float | None = None
    """Entropy to keep (actions in [-1, 1]); unset: minus the number of action components."""

    def __post_init__(self) -> None:
        super().__post_init__()
        interval = "target_update_interval_updates"
        self._require(self.target_update_interval_updates >= 1, interval, "at least 1")
        self._require(0 < self.ent_coef_init < math.inf, "ent_coef_init", "above 0 and finite")
        if self.ent_coef is not None:
            self._require(0 <= self.ent_coef < math.inf, "ent_coef", "zero or more, and finite")
        if self.target_entropy is not None:
            self._require(math.isfinite(self.target_entropy), "target_entropy", "finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SACConfig(SACSettings, SequenceReplayConfig):
    """SAC's settings."""


def sac_targets(batch: Mapping[str, Tensor], *, ent_coef: Tensor) -> Tensor:
    """Return the critics' targets: rewards and the soft value of the next observation.

        target = rewards + discounts ( min_i next_q_i - ent_coef next_logprobs )

    ``next_q`` is (critics, batch), of the target critics at actions the policy would take.
    """
    return batch["rewards"] + batch["discounts"] * soft_values(batch, ent_coef)


def soft_values(batch: Mapping[str, Tensor], ent_coef: Tensor) -> Tensor:
    """Return the soft values of the next observations: min_i next_q_i - ent_coef next_logprobs."""
    return batch["next_q"].amin(0) - ent_coef * batch["next_logprobs"]


def sac_actor_loss(batch: Mapping[str, Tensor], *, ent_coef: Tensor) -> Tensor:
    """Return the policy's loss: mean( ent_coef logprobs - min_i q_i ), a `padded_mean`."""
    losses = ent_coef * batch["logprobs"] - batch["q"].amin(0)
    return padded_mean(losses, batch.get("mask"))


def sac_temperature_loss(
    logprobs: Tensor,
    log_ent_coef: Tensor,
    target_entropy: float | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Return a loss that raises the entropy's weight below the target entropy, lowers it above.

    loss = -log_ent_coef mean( logprobs + target_entropy ), a `padded_mean`
    """
    return -padded_mean(log_ent_coef * (logprobs.detach() + target_entropy), mask)


class Temperature(nn.Module):
    """The weight of the entropy: learnt as its logarithm, or fixed."""

    def __init__(self, config: SACSettings) -> None:
        super().__init__()
        value = config.ent_coef_init if config.ent_coef is None else config.ent_coef
        logarithm = torch.tensor(math.log(value) if value > 0 else -math.inf)
        self.log_ent_coef = nn.Parameter(logarithm, requires_grad=config.ent_coef is None)


class SACModel(nn.Module):
    """Policy, critics and temperature."""

    def __init__(self, networks: ActorCritics, config: SACSettings) -> None:
        super().__init__()
        self.actor, self.critics = networks.actor, networks.critics
        self.temperature = Temperature(config)


class SAC(ReplayLearner):
    """One update: the critics, then the policy against the moved critics, then the targets."""

    config: SACSettings

    def __init__(
        self,
        model: SACModel,
        config: SACSettings,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.model = model
        shape = model.actor.head.noise_shape
        self.noise_shape = (2, self.samples, *shape)
        self.target_entropy = (
            -float(math.prod(shape)) if config.target_entropy is None else config.target_entropy
        )
        self.target = Target(model.critics)
        self._critic_numbers = sum(p.numel() for p in trainable(model.critics))
        shared: dict[str, Any] = {
            "learning_rate": config.learning_rate,
            "optimizer": config.optimizer_spec(),
            "acceleration": acceleration,
            "communicator": self.communicator,
        }
        self.critic_step = self.make_critic_step(shared)
        self.actor_step = GradientStep(
            nn.ModuleList([model.actor, model.temperature]),
            self.actor_loss,
            rate_scale=config.actor_rate_scale,
            no_decay=model.temperature.parameters(),
            **shared,
        )
        self.gradient_steps = (self.critic_step, self.actor_step)

    def make_critic_step(self, settings: Mapping[str, Any]) -> GradientStep:
        """Return the gradient step of the critics."""
        return GradientStep(self.model.critics, self.critic_loss, **settings)

    def update(self, *batches: Mapping[str, Any], delayed: bool = True) -> dict[str, Any]:
        """Take one step of every network; the delayed part moves the target critics."""
        critic = self.critic_step(*batches)
        actor = self.actor_step(*batches)
        if delayed:
            self.target.follow(self.critic_step.flat[: self._critic_numbers], self.config.tau)
        del actor["loss"]  # with that of the temperature; "actor_loss" is without it
        return {"critic_loss": critic.pop("loss"), **critic, **actor}

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ensemble_td_loss` of the critics to `sac_targets`."""
        with torch.no_grad():
            targets = self.soft_targets(batch)
        q_values, mask = self.model.critics(batch["obs"], batch["actions"]), batch.get("mask")
        return {
            "loss": ensemble_td_loss(q_values, targets, mask),
            "q_mean": masked_mean(q_values.detach(), mask),
        }

    def soft_targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `sac_targets` at actions sampled from the policy."""
        actions, logprobs = self._sample(batch["next_obs"], batch["noise"][0])
        next_q = self.target.module(batch["next_obs"], actions)
        followed = {**batch, "next_q": next_q, "next_logprobs": logprobs}
        return sac_targets(followed, ent_coef=self._ent_coef())

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `sac_actor_loss`, plus `sac_temperature_loss` where the temperature is learnt.

        They share no parameter, so one step on their sum is a step on each.
        """
        actions, logprobs = self._sample(batch["obs"], batch["noise"][1])
        q_values, mask = self.model.critics(batch["obs"], actions), batch.get("mask")
        chosen = {"logprobs": logprobs, "q": q_values}
        if mask is not None:
            chosen["mask"] = mask
        ent_coef = self._ent_coef()
        loss = actor_loss = sac_actor_loss(chosen, ent_coef=ent_coef)
        if self.config.ent_coef is None:
            log_ent_coef = self.model.temperature.log_ent_coef
            loss = loss + sac_temperature_loss(logprobs, log_ent_coef, self.target_entropy, mask)
        return {
            "loss": loss,
            "actor_loss": actor_loss,
            "entropy": -masked_mean(logprobs, mask),
            "ent_coef": ent_coef,
        }

    def _sample(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        params, _ = self.model.actor.policy(obs)
        return self.model.actor.head.sample_logprob(params, noise)  # type: ignore[operator]

    def _ent_coef(self) -> Tensor:
        return self.model.temperature.log_ent_coef.detach().exp()

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from the networks of another run, with this run's temperature."""
        own = {f"temperature.{k}": v for k, v in self.model.temperature.state_dict().items()}
        super().load_weights({**weights, **own})

    def _runs_delayed(self) -> bool:
        return self.num_updates % self.config.target_update_interval_updates == 0

    def sync_targets(self) -> None:
        """Make the target critics equal to the critics."""
        self.target.copy(self.model.critics)

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizers, random state and the number of updates."""
        return {
            **super().state_dict(),
            "target": self.target.module.state_dict(),
            "critic_optimizer": self.critic_step.state_dict(),
            "actor_optimizer": self.actor_step.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.target.module.load_state_dict(state["target"])
        self.critic_step.load_state_dict(state["critic_optimizer"])
        self.actor_step.load_state_dict(state["actor_optimizer"])
