"""Base of QR-DQN, C51 and IQN: Q-learning of distributions of returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.dqn import DQN, DQNSettings


def returns_of(actions: Tensor, outputs: Tensor) -> Tensor:
    """Return what describes the returns of one action per row, given (rows, actions, size)."""
    index = actions[:, None, None].expand(-1, 1, outputs.shape[-1])
    return outputs.gather(1, index).squeeze(1)


class ReturnNetwork(Protocol):
    """What the learners of distributions need of a model."""

    distribution: Any

    def q_values(self, obs: Any, noise: Tensor | None = None) -> Tensor:
        """Return values of all actions, those of illegal ones at the least float."""
        ...

    def returns(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what describes the returns of all actions, and `q_values`."""
        ...


class DistributionalDQN(DQN):
    """DQN whose networks describe the distribution of each action's return.

    Actions are chosen by its mean, also those of targets. Subclasses define `return_loss`.
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
        self.model: ReturnNetwork = model

    def returns(
        self, model: Any, obs: Any, noise: Mapping[str, Tensor], name: str
    ) -> tuple[Tensor, Tensor]:
        """Return what a network, by ``name`` in the noise, computes of all actions; and values."""
        outputs, values = model.returns(obs, noise.get(name))
        return outputs, values

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `return_loss` of the current networks on stored data.

        The action after a transition is argmax_a Q_target(next_obs, a), or with ``double``
        argmax_a Q(next_obs, a), with Q the mean of the distribution.
        """
        noise = self.noise.of(batch)
        obs, next_obs = self.observations(batch, noise)
        with torch.no_grad():
            following, values = self.returns(self.target.module, next_obs, noise, "target")
            if self.config.double:
                values = self.model.q_values(next_obs, noise.get("chooser"))
            following = returns_of(values.argmax(-1), following)
        outputs, values = self.returns(self.model, obs, noise, "online")
        losses = self.return_loss(returns_of(batch["actions"], outputs), following, batch, noise)
        return {
            "loss": (batch["weights"] * losses).mean(),
            "q_mean": values.detach().gather(-1, batch["actions"].unsqueeze(-1)).mean(),
            "td_errors": losses.detach(),
        }

    @abstractmethod
    def return_loss(
        self,
        outputs: Tensor,
        following: Tensor,
        batch: Mapping[str, Any],
        noise: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the loss of each row, which is also its priority.

        ``outputs`` describes the return of the action taken, ``following`` that of the best action
        after it, in which no gradient flows.
        """
