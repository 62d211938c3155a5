"""Deep Q-learning (Mnih et al. 2015), and its usual refinements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.network_config import CustomNetworkConfig
from rl_training.algorithms.q_learning import (
    QLearner,
    QLearningConfig,
    best_values,
    values_of,
)
from rl_training.algorithms.sequence_replay import SequenceReplayConfig
from rl_training.data.replay_buffer import Prioritization
from rl_training.search_space import Choice, SearchSpace
from rl_training.types import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNSettings(QLearningConfig, CustomNetworkConfig):
    """Settings of DQN without memory."""

    SEARCH: ClassVar[SearchSpace] = {
        "n_step": Choice((1, 3, 5)),
    }

    dueling: bool = False
    """Separate state values and advantages (arXiv:1511.06581)."""
    prioritized: bool = False
    """Replay transitions in proportion to their TD errors (arXiv:1511.05952)."""
    priority_alpha: float = 0.6
    """Exponent of the priorities, from 0 (uniform sampling) to 1."""
    priority_beta: float = 0.4
    """Exponent of the importance-sampling weights, 0 to 1; it rises to 1 over the run."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; unset: 120 84, none after images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("priority_alpha", "priority_beta"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")

    def prioritization(self) -> Prioritization | None:
        """Return how the replay is prioritised; None: every transition is equally likely."""
        return Prioritization(self.priority_alpha) if self.prioritized else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNConfig(DQNSettings, SequenceReplayConfig):
    """DQN's settings. With memory it is DRQN."""

    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; unset: 120 84, with memory 64 before it; none after images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_memory:
            self._require(not self.dueling, "dueling", f"false with memory: {self.memory}")


def dqn_loss(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the Huber loss of TD errors, weighted by importance.

        td   = targets - q_values
        loss = mean( weights huber(td) ),  huber(x) = x^2/2 where |x| < 1, else |x| - 1/2

    ``td_errors`` is returned per row, for priorities.
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
        """Return values of all actions, those of illegal ones at the least float."""
        ...


class DQN(QLearner):
    """Q-learning from single transitions."""

    def __init__(
        self,
        model: Any,
        config: DQNSettings,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.model: QNetwork = model

    def _beta(self, progress: Progress) -> float:
        first: float = self.config.priority_beta
        return first + progress.fraction * (1 - first)

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `dqn_loss` of the current networks on stored data.

        target = rewards + discounts max_a Q_target(next_obs, a); with ``double`` the action is
        argmax_a Q(next_obs, a).
        """
        with torch.no_grad():
            following = self.target.module.q_values(batch["next_obs"])
            chooser = self.model.q_values(batch["next_obs"]) if self.config.double else None
            targets = batch["rewards"] + batch["discounts"] * best_values(following, chooser)
        chosen = values_of(batch["actions"], self.model.q_values(batch["obs"]))
        return dqn_loss({"q_values": chosen, "targets": targets, "weights": batch["weights"]})
