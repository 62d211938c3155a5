"""ReBRAC: TD3+BC with penalties in policy and critics (Tarasov et al. 2023, arXiv:2305.09836)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl_training.algorithms.bc import action_distance
from rl_training.algorithms.td3 import TD3, TD3Settings, td3_targets
from rl_training.algorithms.td3_bc import normalized_value_loss
from rl_training.search_space import Choice, Range, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReBRACConfig(TD3Settings):
    """Settings of ReBRAC."""

    SEARCH: ClassVar[SearchSpace] = {
        "actor_penalty": Range(5e-4, 0.1, log=True),
        "critic_penalty": Range(5e-4, 0.1, log=True),
        "batch_size": Choice((256, 512, 1024)),
    }

    learning_rate: float = 1e-3
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    batch_size: int = 1024
    """Transitions per update."""
    hidden_sizes: tuple[int, ...] | None = (256, 256, 256)
    """Widths of the hidden layers of every network, after vectors and images alike; null in YAML:
    256 256 after vectors, none after images."""
    critic_layer_norm: bool = True
    """Layer normalisation after every hidden layer of the critics (arXiv:2302.02948)."""
    actor_penalty: float = 0.001
    """Weight of the distance to the recorded actions in the policy's loss; it depends on the data,
    from 0.0005 to 1."""
    critic_penalty: float = 0.01
    """Weight of the distance to the next recorded action in the critics' targets; it depends on
    the data, from 0 to 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actor_penalty", "critic_penalty"):
            self._require(0 <= getattr(self, name) < math.inf, name, "zero or more, and finite")


def rebrac_actor_loss(
    q_values: Tensor, actions: Tensor, data_actions: Tensor, *, penalty: float
) -> Tensor:
    """Return the policy's loss; q_values: (critics, batch).

    loss = -mean( min_i q_i ) / mean( |min_i q_i| ) + penalty mean( |a - a_data|^2 )
    """
    return normalized_value_loss(q_values.amin(0)) + penalty * action_distance(
        actions, data_actions
    )


def rebrac_targets(batch: Mapping[str, Tensor], actions: Tensor, *, penalty: float) -> Tensor:
    """Return the critics' targets.

        target = rewards + discounts ( min_i next_q_i - penalty |a' - a'_data|^2 )

    ``actions`` a' are the smoothed ones of the target policy, a'_data is ``next_actions``, the
    action that was recorded after the transition. Where none was recorded, because the episode was
    truncated (``next_recorded`` 0), the penalty is left out.
    """
    difference = (actions - batch["next_actions"]).reshape(len(actions), -1)
    distance = difference.square().sum(-1) * batch["next_recorded"]
    return td3_targets(batch) - batch["discounts"] * penalty * distance


class ReBRAC(TD3):
    """TD3 with a penalty for leaving the recorded actions, in the policy and in the targets."""

    config: ReBRACConfig
    actor_metrics = ("actor_loss", "action_distance")
    needs_next_actions = True

    def targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `rebrac_targets`."""
        actions = self.next_actions(batch)
        next_q = self.target_critics.module(batch["next_obs"], actions)
        penalty = self.config.critic_penalty
        return rebrac_targets({**batch, "next_q": next_q}, actions, penalty=penalty)

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `rebrac_actor_loss`, by all critics."""
        actions = self.model.actor.actions(batch["obs"])
        q_values = self.model.critics(batch["obs"], actions)
        penalty = self.config.actor_penalty
        loss = rebrac_actor_loss(q_values, actions, batch["actions"], penalty=penalty)
        return {"loss": loss, "action_distance": action_distance(actions, batch["actions"])}
