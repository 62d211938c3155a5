"""Behavioural cloning: supervised learning of the recorded actions (Pomerleau 1991)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.off_policy import ReplayConfig, ReplayLearner
from rl_training.models.action_heads import CategoricalHead
from rl_training.models.mlp_continuous import MLPActor


@dataclasses.dataclass(frozen=True, kw_only=True)
class BCConfig(ReplayConfig):
    """Settings of behavioural cloning."""

    learning_rate: float = 1e-3
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    top_fraction: float = 1.0
    """Learn only from this fraction of the episodes, those with the highest returns."""

    gamma: ClassVar[float] = 0.0
    n_step: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.top_fraction <= 1, "top_fraction", "above 0 and at most 1")


def action_distance(actions: Tensor, data_actions: Tensor) -> Tensor:
    """Return the mean squared distance of two batches of continuous actions.

    distance = mean_batch( sum_components( (a - a_data)^2 ) )
    """
    difference = (actions - data_actions).reshape(len(actions), -1)
    return difference.square().sum(-1).mean()


def cloning_loss(actions: Tensor, data_actions: Tensor) -> Tensor:
    """Return the mean squared error of continuous actions, over batch and components."""
    return (actions - data_actions).square().mean()


class BCModel(nn.Module):
    """A policy alone."""

    def __init__(self, actor: MLPActor) -> None:
        super().__init__()
        self.actor = actor


class BC(ReplayLearner):
    """One update: a step of the policy towards the recorded actions."""

    config: BCConfig

    def __init__(
        self,
        model: BCModel,
        config: BCConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.model = model
        self.step = GradientStep(
            model,
            self.loss,
            learning_rate=config.learning_rate,
            optimizer=config.optimizer_spec(),
            acceleration=acceleration,
            communicator=self.communicator,
        )
        self.gradient_steps = (self.step,)

    def update(self, *batches: Mapping[str, Any], delayed: bool = False) -> dict[str, Any]:
        """Make one gradient step; ``delayed`` has no effect."""
        del delayed
        return self.step(*batches)

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `cloning_loss`; for discrete actions the cross-entropy, -mean( log pi(a | s) )."""
        params, mask = self.model.actor.policy(batch["obs"])
        head, data_actions = self.model.actor.head, batch["actions"]
        chosen = head.mode(params, mask)
        if isinstance(head, CategoricalHead):
            loss = -head.logprob(params, data_actions, mask).mean()
            return {"loss": loss, "action_match": (chosen == data_actions).float().mean()}
        loss = cloning_loss(chosen, data_actions)
        return {"loss": loss, "action_distance": action_distance(chosen, data_actions)}

    def sync_targets(self) -> None:
        """Do nothing: there are no target networks."""

    def state_dict(self) -> dict[str, Any]:
        """Return network, optimizer, random state and the number of updates."""
        return {**super().state_dict(), "optimizer": self.step.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.step.load_state_dict(state["optimizer"])
