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
from rl_training.algorithms.random_shift import random_shift
from rl_training.algorithms.sequence_replay import SequenceReplayConfig
from rl_training.algorithms.update_noise import UpdateNoise
from rl_training.data.replay_buffer import Prioritization
from rl_training.errors import ConfigError
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
    noisy: bool = False
    """Learnt noise in the weights after the encoder explores, in place of epsilon, which is then 0
    after learning_starts (arXiv:1706.10295)."""
    random_shift: int = 0
    """Pixels by which updates move images at random, each way (DrQ: 4, arXiv:2004.13649); 0: none.
    """
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; unset: 120 84, none after images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("priority_alpha", "priority_beta"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        self._require(self.random_shift >= 0, "random_shift", "zero or more")

    def epsilon(self, progress: Progress) -> float:
        """Return the fraction of random actions: linear, then constant; 0 if noise explores."""
        return 0.0 if self.noisy else super().epsilon(progress)

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
            for name in ("dueling", "noisy"):
                self._require(not getattr(self, name), name, f"false with memory: {self.memory}")
            self._require(not self.random_shift, "random_shift", f"0 with memory: {self.memory}")


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

    def q_values(self, obs: Any, noise: Tensor | None = None) -> Tensor:
        """Return values of all actions, those of illegal ones at the least float."""
        ...


class DQN(QLearner):
    """Q-learning from single transitions.

    An update draws, where they are needed: noise of the weights for each network it evaluates
    ("online" and "target", with ``double`` also "chooser"), and shifts of images.
    """

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
        if config.random_shift and not model.sees_images:
            raise ConfigError(
                "'algo_kwargs.random_shift' moves images, and these observations have none: leave"
                " it at 0"
            )
        self.noise = UpdateNoise(self.noise_shapes())
        self.noise_shape = self.noise.shape

    def noise_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the random numbers of an update, by name."""
        model: Any = self.module
        shapes: dict[str, tuple[int, ...]] = {}
        if self.config.noisy:
            networks = ("online", "target", *(("chooser",) if self.config.double else ()))
            shapes |= dict.fromkeys(networks, (model.noise_size,))
        if self.config.random_shift:
            shapes["shifts"] = (2, self.samples, 2)
        return shapes

    def _beta(self, progress: Progress) -> float:
        first: float = self.config.priority_beta
        return first + progress.fraction * (1 - first)

    def observations(
        self, batch: Mapping[str, Any], noise: Mapping[str, Tensor]
    ) -> tuple[Any, Any]:
        """Return the observations before and after the transitions, with images shifted."""
        obs, next_obs = batch["obs"], batch["next_obs"]
        if not self.config.random_shift:
            return obs, next_obs
        before, after = noise["shifts"]
        return self._shifted(obs, before), self._shifted(next_obs, after)

    def _shifted(self, obs: Any, normal: Tensor) -> Any:
        model: Any = self.module
        pixels, images = self.config.random_shift, model.image_leaves
        if not isinstance(obs, Mapping):
            return random_shift(obs, normal, pixels)
        return {
            name: random_shift(leaf, normal, pixels) if name in images else leaf
            for name, leaf in obs.items()
        }

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `dqn_loss` of the current networks on stored data.

        target = rewards + discounts max_a Q_target(next_obs, a); with ``double`` the action is
        argmax_a Q(next_obs, a).
        """
        noise = self.noise.of(batch)
        obs, next_obs = self.observations(batch, noise)
        with torch.no_grad():
            following = self.target.module.q_values(next_obs, noise.get("target"))
            chooser = None
            if self.config.double:
                chooser = self.model.q_values(next_obs, noise.get("chooser"))
            targets = batch["rewards"] + batch["discounts"] * best_values(following, chooser)
        chosen = values_of(batch["actions"], self.model.q_values(obs, noise.get("online")))
        return dqn_loss({"q_values": chosen, "targets": targets, "weights": batch["weights"]})
