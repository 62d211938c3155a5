"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.gradient_step import GradientStep, Target
from rl_training.algorithms.masking import masked_mean, padded_mean
from rl_training.algorithms.off_policy import (
    CriticsConfig,
    ReplayLearner,
    ensemble_td_loss,
)
from rl_training.algorithms.sequence_replay import SequenceReplayConfig
from rl_training.models.mlp_continuous import ActorCritics
from rl_training.search_space import Choice, Range, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class TD3Settings(CriticsConfig):
    """Settings of TD3's update; noise is in units of half the action range."""

    SEARCH: ClassVar[SearchSpace] = {
        "policy_delay": Choice((1, 2, 3)),
        "target_policy_noise": Range(0.1, 0.4),
    }

    policy_delay: int = 2
    """Critic updates per update of the policy and of the targets."""
    target_policy_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions."""
    target_noise_clip: float = 0.5
    """Largest magnitude of that noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.policy_delay >= 1, "policy_delay", "at least 1")
        for name in ("target_policy_noise", "target_noise_clip"):
            self._require(0 <= getattr(self, name) < math.inf, name, "zero or more, and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TD3Config(TD3Settings, SequenceReplayConfig):
    """TD3's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "exploration_noise": Range(0.05, 0.4),
    }

    exploration_noise: float = 0.1
    """Standard deviation of the noise on actions while collecting, in units of half the range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.exploration_noise
        self._require(0 <= noise < math.inf, "exploration_noise", "zero or more, and finite")


def smoothed_actions(actions: Tensor, noise: Tensor, *, deviation: float, clip: float) -> Tensor:
    """Return nearby actions, so that targets are smooth: clamp(a + clamp(deviation noise))."""
    return (actions + (deviation * noise).clamp(-clip, clip)).clamp(-1.0, 1.0)


def td3_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the critics' targets: rewards + discounts min_i next_q_i."""
    return batch["rewards"] + batch["discounts"] * batch["next_q"].amin(0)


def td3_actor_loss(q_values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the policy's loss: -mean( q ), by the first critic; a `padded_mean`."""
    return -padded_mean(q_values, mask)


class TD3(ReplayLearner):
    """One update: the critics; every ``policy_delay``-th time the policy and the targets too."""

    config: TD3Settings
    actor_metrics: tuple[str, ...] = ("actor_loss",)
    """Metrics of the policy's loss, which are those of its last step in updates without one."""

    def __init__(
        self,
        model: ActorCritics,
        config: TD3Settings,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.model = model
        self.noise_shape = (self.samples, *model.actor.head.noise_shape)
        self.target_actor, self.target_critics = Target(model.actor), Target(model.critics)
        shared: dict[str, Any] = {
            "learning_rate": config.learning_rate,
            "optimizer": config.optimizer_spec(),
            "acceleration": acceleration,
            "communicator": self.communicator,
        }
        self.critic_step = GradientStep(model.critics, self.critic_loss, **shared)
        self.actor_step = GradientStep(
            model.actor, self.actor_loss, rate_scale=config.actor_rate_scale, **shared
        )
        self.gradient_steps = (self.critic_step, self.actor_step)
        self._last_actor = {
            name: torch.zeros((), device=self._device) for name in self.actor_metrics
        }

    def update(self, *batches: Mapping[str, Any], delayed: bool = True) -> dict[str, Any]:
        """Take one step of the critics; the delayed part steps the policy and moves the targets."""
        critic = self.critic_step(*batches)
        if delayed:
            actor = self.actor_step(*batches)
            for name, last in self._last_actor.items():
                last.copy_(actor["loss" if name == "actor_loss" else name])
            self.target_critics.follow(self.critic_step.flat, self.config.tau)
            self.target_actor.follow(self.actor_step.flat, self.config.tau)
        return {
            "critic_loss": critic["loss"],
            "q_mean": critic["q_mean"],
            **self._last_actor,
        }

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ensemble_td_loss` of the critics to `td3_targets` at `smoothed_actions`."""
        with torch.no_grad():
            targets = self.targets(batch)
        q_values, mask = self.model.critics(batch["obs"], batch["actions"]), batch.get("mask")
        return {
            "loss": ensemble_td_loss(q_values, targets, mask),
            "q_mean": masked_mean(q_values.detach(), mask),
        }

    def targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the critics' targets."""
        actions = self.next_actions(batch)
        next_q = self.target_critics.module(batch["next_obs"], actions)
        return td3_targets({**batch, "next_q": next_q})

    def next_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `smoothed_actions` of the target policy in the next observations."""
        return smoothed_actions(
            self.target_actor.module.actions(batch["next_obs"]),
            batch["noise"],
            deviation=self.config.target_policy_noise,
            clip=self.config.target_noise_clip,
        )

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `td3_actor_loss` of the policy's own actions."""
        actions = self.model.actor.actions(batch["obs"])
        q_values = self.model.critics(batch["obs"], actions, members=1)
        return {"loss": td3_actor_loss(q_values, batch.get("mask"))}

    def _runs_delayed(self) -> bool:
        return self.num_updates % self.config.policy_delay == 0

    def sync_targets(self) -> None:
        """Make the target networks equal to the networks."""
        self.target_critics.copy(self.model.critics)
        self.target_actor.copy(self.model.actor)

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizers, random state and the number of updates."""
        return {
            **super().state_dict(),
            "target_actor": self.target_actor.module.state_dict(),
            "target_critics": self.target_critics.module.state_dict(),
            "critic_optimizer": self.critic_step.state_dict(),
            "actor_optimizer": self.actor_step.state_dict(),
            **{f"last_{name}": value for name, value in self._last_actor.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.target_actor.module.load_state_dict(state["target_actor"])
        self.target_critics.module.load_state_dict(state["target_critics"])
        self.critic_step.load_state_dict(state["critic_optimizer"])
        self.actor_step.load_state_dict(state["actor_optimizer"])
        for name, value in self._last_actor.items():
            value.copy_(state[f"last_{name}"])
