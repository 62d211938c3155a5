"""Base of DQN and DRQN: epsilon-greedy exploration, one gradient step, a target network."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from rl_training._internal.coerce import OldName
from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.exploration import EpsilonGreedyConfig
from rl_training.algorithms.gradient_step import GradientStep, Target
from rl_training.algorithms.off_policy import OffPolicyConfig, ReplayLearner, ValueConfig
from rl_training.algorithms.schedules import Schedule
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.search_space import Choice, Range, SearchSpace
from rl_training.types import Progress, StopRequest, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class QLearningConfig(OffPolicyConfig, EpsilonGreedyConfig):
    """Settings of every Q-learner."""

    SEARCH: ClassVar[SearchSpace] = {
        "batch_size": Choice((32, 64, 128, 256)),
        "train_freq": Choice((1, 4, 10, 16)),
        "target_update_interval_steps": Choice((100, 250, 500, 1000, 2500)),
        "exploration_fraction": Range(0.05, 0.6),
        "exploration_final_eps": Range(0.01, 0.1),
    }

    learning_rate: float = 2.5e-4
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    lr_schedule: Schedule | None = None
    """'constant', or 'linear' or 'cosine' decay to 0; unset: linear if anneal_lr, else constant."""
    buffer_size: int = 100_000
    """Capacity of the replay buffer in transitions, over all environments."""
    batch_size: int = 128
    """Transitions per update."""
    train_freq: int = 10
    """Run updates each time this many transitions have been collected."""
    anneal_lr: bool = False
    """Lower the learning rate linearly to zero over the run, where lr_schedule is unset."""
    tau: float = 1.0
    """Interpolation factor of target network updates; 1: copy."""
    target_update_interval_steps: int = 500
    """Transitions between target network updates."""
    target_update_interval: int | None = None
    """Deprecated: use target_update_interval_steps."""
    OLD_NAMES: ClassVar[Mapping[str, OldName]] = {
        "target_update_interval": OldName("target_update_interval_steps")
    }
    """Settings that have a new name."""
    max_grad_norm: float = 10.0
    """Clip gradients to this global norm."""
    double: bool = False
    """Double Q-learning (arXiv:1509.06461)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        interval = "target_update_interval_steps"
        self._require(self.target_update_interval_steps >= 1, interval, "at least 1")
        self._require(0 < self.tau <= 1, "tau", "above 0 and at most 1")
        self._require(self.max_grad_norm > 0, "max_grad_norm", "above 0")

    def exploration(self, progress: Progress) -> float:
        """Return `epsilon`, or 1 before ``learning_starts``."""
        return 1.0 if progress.step < self.learning_starts else self.epsilon(progress)


def best_values(following: Tensor, chooser: Tensor | None) -> Tensor:
    """Return max_a Q_target(next, a).

    With a ``chooser`` it is Q_target(next, argmax_a chooser(next, a)).
    """
    if chooser is None:
        return following.amax(-1)
    return following.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)


def values_of(actions: Tensor, values: Tensor) -> Tensor:
    """Return the values of the actions that were taken."""
    return values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class QLearner(ReplayLearner):
    """One network, its gradient step and its target network."""

    def __init__(
        self,
        model: Any,
        config: ValueConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.target: Target[Any] = Target(model)
        self.step = GradientStep(
            model,
            self.loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm if isinstance(config, QLearningConfig) else None,
            optimizer=config.optimizer_spec(),
            acceleration=acceleration,
            communicator=self.communicator,
        )
        self.gradient_steps = (self.step,)
        self._target_moved_at = 0

    @abstractmethod
    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the loss of the current networks on stored data, with its metrics."""

    def learn(
        self,
        experience: ReplayBuffer | Sequence[ReplayBuffer],
        progress: Progress,
        stop: StopRequest = never,
        *,
        updates: int = 1,
    ) -> int:
        """Make ``updates`` gradient steps; update the target network at its interval."""
        done = super().learn(experience, progress, stop, updates=updates)
        if done < updates:
            return done
        interval = self.config.target_update_interval_steps
        if progress.step // interval > self._target_moved_at // interval:
            self.target.follow(self.step.flat, self.config.tau)
        self._target_moved_at = progress.step
        return done

    def update(self, *batches: Mapping[str, Any], delayed: bool = False) -> dict[str, Any]:
        """Make one gradient step; ``delayed`` has no effect."""
        del delayed
        return self.step(*batches)

    def sync_targets(self) -> None:
        """Make the target network equal to the network."""
        self.target.copy(self.module)

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizer, random state and the position of the target's interval."""
        return {
            **super().state_dict(),
            "target": self.target.module.state_dict(),
            "optimizer": self.step.state_dict(),
            "target_moved_at": self._target_moved_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.target.module.load_state_dict(state["target"])
        self.step.load_state_dict(state["optimizer"])
        self._target_moved_at = int(state["target_moved_at"])
