"""Base of IQL and AWAC: critics, and a policy that imitates actions with an advantage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.bc import action_distance
from rl_training.algorithms.gradient_step import GradientStep, Target, trainable
from rl_training.algorithms.off_policy import CriticsConfig, ReplayLearner
from rl_training.models.action_heads import CategoricalHead


def weighted_cloning_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the policy's loss: -mean( weights log pi(a | s) )."""
    return -(weights * logprobs).mean()


class AdvantageWeightedLearner(ReplayLearner):
    """One update: the critics, then the policy, then the target critics."""

    def __init__(
        self,
        model: Any,
        config: CriticsConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.model = model
        self.target = Target(model.critics)
        self._critic_numbers = sum(p.numel() for p in trainable(model.critics))
        shared: dict[str, Any] = {
            "learning_rate": config.learning_rate,
            "optimizer": config.optimizer_spec(),
            "acceleration": acceleration,
            "communicator": self.communicator,
        }
        self.critic_step = GradientStep(self.value_networks(), self.critic_loss, **shared)
        self.actor_step = GradientStep(
            model.actor, self.actor_loss, rate_scale=config.actor_rate_scale, **shared
        )
        self.gradient_steps = (self.critic_step, self.actor_step)

    def value_networks(self) -> nn.Module:
        """Return what the critics' step trains, the critics first."""
        return nn.ModuleList([self.model.critics])

    @abstractmethod
    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the loss of the value networks, with its metrics."""

    @abstractmethod
    def weights(self, batch: Mapping[str, Any]) -> Tensor:
        """Return how much each recorded action is imitated; no gradient flows through it."""

    def update(self, *batches: Mapping[str, Any], delayed: bool = True) -> dict[str, Any]:
        """Take one step of every network and move the targets; ``delayed`` has no effect."""
        del delayed
        critic = self.critic_step(*batches)
        actor = self.actor_step(*batches)
        self.target.follow(self.critic_step.flat[: self._critic_numbers], self.config.tau)
        return {
            "critic_loss": critic.pop("loss"),
            **critic,
            "actor_loss": actor.pop("loss"),
            **actor,
        }

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `weighted_cloning_loss` of the recorded actions."""
        actor, data_actions = self.model.actor, batch["actions"]
        params, mask = actor.policy(batch["obs"])
        logprobs = actor.head.logprob(params, data_actions, mask)
        weights = self.weights(batch).detach()
        chosen = actor.head.mode(params, mask)
        metrics = {
            "loss": weighted_cloning_loss(logprobs, weights),
            "advantage_weight": weights.mean(),
        }
        if isinstance(actor.head, CategoricalHead):
            return {**metrics, "action_match": (chosen == data_actions).float().mean()}
        return {**metrics, "action_distance": action_distance(chosen, data_actions)}

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
