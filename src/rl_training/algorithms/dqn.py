"""Deep Q-learning (Mnih et al. 2015), with its usual refinements as typed switches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.gradient_step import GradientStep, Target
from rl_training.algorithms.off_policy import OffPolicyConfig, ReplayLearner
from rl_training.data.replay_buffer import Prioritization, ReplayBuffer
from rl_training.types import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNConfig(OffPolicyConfig):
    """DQN's knobs."""

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
    dueling: bool = False
    """Separate state values and advantages (arXiv:1511.06581)."""
    prioritized: bool = False
    """Replay transitions in proportion to their TD errors (arXiv:1511.05952)."""
    priority_alpha: float = 0.6
    """How much priorities matter, 0 to 1."""
    priority_beta: float = 0.4
    """Correction for priorities at the start; annealed to 1 over the run."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; unset: 120 84, none after images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.tau <= 1, "tau", "above 0 and at most 1")
        self._require(self.target_update_interval >= 1, "target_update_interval", "at least 1")
        self._require(self.max_grad_norm > 0, "max_grad_norm", "above 0")
        self._require(0 < self.exploration_fraction <= 1, "exploration_fraction", "in (0, 1]")
        shares = ("exploration_initial_eps", "exploration_final_eps", "priority_alpha")
        for name in (*shares, "priority_beta"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")

    def prioritization(self) -> Prioritization | None:
        """How replay is prioritised, if at all."""
        return Prioritization(self.priority_alpha) if self.prioritized else None

    def epsilon(self, progress: Progress) -> float:
        """Share of random actions: a straight line, then constant."""
        done = min(1.0, progress.fraction / self.exploration_fraction)
        first, last = self.exploration_initial_eps, self.exploration_final_eps
        return first + done * (last - first)


def dqn_loss(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Huber loss of TD errors, weighted by importance.

        td   = targets - q_values
        loss = mean( weights huber(td) ),  huber(x) = x^2/2 where |x| < 1, else |x| - 1/2

    ``td_errors`` comes back per row, for priorities.
    """
    q_values, targets = batch["q_values"], batch["targets"]
    losses = functional.smooth_l1_loss(q_values, targets, reduction="none")
    td_errors = (targets - q_values).detach()
    return {
        "loss": (batch["weights"] * losses).mean(),
        "q_mean": q_values.detach().mean(),
        "td_error": td_errors.abs().mean(),
        "td_errors": td_errors,
    }


class QNetwork(Protocol):
    """What DQN needs of a model."""

    def q_values(self, obs: Any) -> Tensor:
        """Values of all actions, illegal ones at the least float."""
        ...


class DQN(ReplayLearner):
    """The network, its target, and what one call of `learn` does with replay."""

    def __init__(
        self,
        model: Any,
        config: DQNConfig,
        *,
        generator: torch.Generator | None = None,
        acceleration: Acceleration = "eager",
    ) -> None:
        super().__init__(model, config, generator=generator, acceleration=acceleration)
        self.model: QNetwork = model
        self.config = config
        self.target: Target[Any] = Target(model)
        self.step = GradientStep(
            model,
            self.loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            acceleration=acceleration,
        )
        self._target_moved_at = 0

    def learn(self, replay: ReplayBuffer, updates: int, progress: Progress) -> None:
        """Take ``updates`` steps; the target network moves where its interval was crossed."""
        if self.config.anneal_lr:
            self.step.learning_rate = self.config.learning_rate * (1 - progress.fraction)
        super().learn(replay, updates, progress)
        interval = self.config.target_update_interval
        if progress.step // interval > self._target_moved_at // interval:
            self.target.follow(self.step.flat, self.config.tau)
        self._target_moved_at = progress.step

    def update(self, batch: Mapping[str, Any], *, due: bool = False) -> dict[str, Tensor]:
        """One gradient step."""
        del due
        return self.step(batch)

    def _beta(self, progress: Progress) -> float:
        first = self.config.priority_beta
        return first + progress.fraction * (1 - first)

    def sync_targets(self) -> None:
        """Copy the network."""
        self.target.copy(self.module)

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """`dqn_loss` of the current networks on stored data.

        target = rewards + discounts max_a Q_target(next_obs, a); with ``double`` the action is
        argmax_a Q(next_obs, a).
        """
        with torch.no_grad():
            following = self.target.module.q_values(batch["next_obs"])
            if self.config.double:
                choice = self.model.q_values(batch["next_obs"]).argmax(-1, keepdim=True)
                best = following.gather(-1, choice).squeeze(-1)
            else:
                best = following.amax(-1)
            targets = batch["rewards"] + batch["discounts"] * best
        values = self.model.q_values(batch["obs"])
        chosen = values.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
        return dqn_loss({"q_values": chosen, "targets": targets, "weights": batch["weights"]})

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
