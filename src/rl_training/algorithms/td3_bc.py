"""TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl_training.algorithms.bc import action_distance, cloning_loss
from rl_training.algorithms.td3 import TD3, TD3Settings
from rl_training.search_space import Range, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class TD3BCConfig(TD3Settings):
    """Settings of TD3+BC."""

    SEARCH: ClassVar[SearchSpace] = {
        "alpha": Range(0.5, 10.0, log=True),
    }

    alpha: float = 2.5
    """Weight of the critic, whose values are divided by their mean magnitude, against cloning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.alpha < math.inf, "alpha", "zero or more, and finite")


def normalized_value_loss(q_values: Tensor) -> Tensor:
    """Return -mean( q ) / mean( |q| ); no gradient flows through the denominator."""
    return -q_values.mean() / q_values.abs().mean().detach()


def td3_bc_actor_loss(
    q_values: Tensor, actions: Tensor, data_actions: Tensor, *, alpha: float
) -> Tensor:
    """Return the policy's loss: high values, near to the recorded actions.

    loss = -alpha mean( q ) / mean( |q| ) + mean( (a - a_data)^2 )
    """
    return alpha * normalized_value_loss(q_values) + cloning_loss(actions, data_actions)


class TD3BC(TD3):
    """TD3 whose policy also imitates the recorded actions."""

    config: TD3BCConfig
    actor_metrics = ("actor_loss", "action_distance")

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `td3_bc_actor_loss`, by the first critic."""
        actions = self.model.actor.actions(batch["obs"])
        q_values = self.model.critics(batch["obs"], actions, members=1)
        loss = td3_bc_actor_loss(q_values, actions, batch["actions"], alpha=self.config.alpha)
        return {"loss": loss, "action_distance": action_distance(actions, batch["actions"])}
