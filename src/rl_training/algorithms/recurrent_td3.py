"""TD3 with memory: the same losses along sequences, by a recurrent policy and recurrent critics.

Both remember by themselves, and so do their target networks; see `recurrent_sac`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_training.algorithms.sequence_replay import sequence_targets
from rl_training.algorithms.td3 import TD3, TD3Config
from rl_training.models.recurrent.continuous import acting_state_size, along


class RecurrentTD3(TD3):
    """TD3 on sequences (time, batch); losses are means over the steps whose ``mask`` is 1."""

    def __init__(self, model: Any, config: TD3Config, **rest: Any) -> None:
        super().__init__(model, config, **rest)
        shape = model.actor.head.noise_shape
        self.noise_shape = (config.sequence_length, self.samples, *shape)

    @property
    def state_size(self) -> int:
        """Numbers of the state that is stored with sequences: the policy's and the critics'."""
        return acting_state_size(self.module)

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ensemble_td_loss` of the critics along sequences."""
        return super().critic_loss(along(batch))

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `td3_actor_loss` along sequences."""
        return super().actor_loss(along(batch))

    def targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `sequence_targets` of the least value of what followed each step."""
        actions = self.next_actions(batch)
        next_q = self.target_critics.module(batch["next_obs"], actions)
        n_step: int = self.config.n_step
        return sequence_targets(batch, next_q.amin(0), n_step)
