"""What Q-learners share: exploring by epsilon, one gradient step, a target network."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.gradient_step import GradientStep, Target
from rl_training.algorithms.off_policy import OffPolicyConfig, ReplayLearner
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.types import Progress, StopRequest, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class QLearningConfig(OffPolicyConfig):
    """The knobs of every Q-learner."""

    learning_rate: float = 2.5e-4
    """Adam's step size."""
    buffer_size: int = 100_000
    """Transitions kept for replay, over all environments."""
    batch_size: int = 128
    """Transitions per update."""
    train_freq: int = 10
    """Learn at every crossing of a multiple of this many transitions."""
    anneal_lr: bool = False
    """Lower the learning rate linearly to zero over the run."""
    tau: float = 1.0
    """How far the target network moves towards the network; 1 copies it."""
    target_update_interval: int = 500
    """Transitions between moves of the target network; it moves after learning, if at all."""
    exploration_fraction: float = 0.5
    """Share of the run over which epsilon falls."""
    exploration_initial_eps: float = 1.0
    """Share of random actions at the start."""
    exploration_final_eps: float = 0.05
    """Share of random actions once exploration_fraction of the run is done."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to at most this norm."""
    double: bool = False
    """The network chooses the next action, the target network values it (arXiv:1509.06461)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.tau <= 1, "tau", "above 0 and at most 1")
        self._require(self.target_update_interval >= 1, "target_update_interval", "at least 1")
        self._require(self.max_grad_norm > 0, "max_grad_norm", "above 0")
        self._require(0 < self.exploration_fraction <= 1, "exploration_fraction", "in (0, 1]")
        for name in ("exploration_initial_eps", "exploration_final_eps"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")

    def epsilon(self, progress: Progress) -> float:
        """Share of random actions: a straight line, then constant."""
        done = min(1.0, progress.fraction / self.exploration_fraction)
        first, last = self.exploration_initial_eps, self.exploration_final_eps
        return first + done * (last - first)

    def exploration(self, progress: Progress) -> float:
        """`epsilon`, but all actions are random in the warm-up."""
        return 1.0 if progress.step < self.learning_starts else self.epsilon(progress)


def best_values(following: Tensor, chooser: Tensor | None) -> Tensor:
    """max_a Q_target(next, a); with a ``chooser`` Q_target(next, argmax_a chooser(next, a))."""
    if chooser is None:
        return following.amax(-1)
    return following.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)


def values_of(actions: Tensor, values: Tensor) -> Tensor:
    """The values of the actions that were taken."""
    return values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class QLearner(ReplayLearner):
    """The network, its target, and what one call of `learn` does with replay."""

    def __init__(
        self,
        model: Any,
        config: QLearningConfig,
        *,
        generator: torch.Generator | None = None,
        acceleration: Acceleration = "eager",
    ) -> None:
        super().__init__(model, config, generator=generator, acceleration=acceleration)
        self.config: Any = config
        self.target: Target[Any] = Target(model)
        self.step = GradientStep(
            model,
            self.loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            acceleration=acceleration,
        )
        self._target_moved_at = 0

    @abstractmethod
    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The loss of the current networks on stored data, with its metrics."""

    def learn(
        self, replay: ReplayBuffer, updates: int, progress: Progress, stop: StopRequest = never
    ) -> int:
        """Take ``updates`` steps; the target network moves where its interval was crossed."""
        if self.config.anneal_lr:
            self.step.learning_rate = self.config.learning_rate * (1 - progress.fraction)
        done = super().learn(replay, updates, progress, stop)
        if done < updates:
            return done
        interval = self.config.target_update_interval
        if progress.step // interval > self._target_moved_at // interval:
            self.target.follow(self.step.flat, self.config.tau)
        self._target_moved_at = progress.step
        return done

    def update(self, batch: Mapping[str, Any], *, due: bool = False) -> dict[str, Tensor]:
        """One gradient step."""
        del due
        return self.step(batch)

    def sync_targets(self) -> None:
        """Copy the network."""
        self.target.copy(self.module)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        return {
            **super().state_dict(),
            "target": self.target.module.state_dict(),
            "optimizer": self.step.state_dict(),
            "target_moved_at": self._target_moved_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a saved state back."""
        super().load_state_dict(state)
        self.target.module.load_state_dict(state["target"])
        self.step.load_state_dict(state["optimizer"])
        self._target_moved_at = int(state["target_moved_at"])
