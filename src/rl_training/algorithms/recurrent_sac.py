"""SAC with memory: the same losses along sequences, by a recurrent policy and recurrent critics.

Policy and critics remember by themselves (Ni et al. 2022, arXiv:2110.05038, find that sharing a
memory between them harms both). Sequences begin with the states that were stored when they were
collected, and with a burn-in (Kapturowski et al. 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_training.algorithms.sac import SAC, SACConfig, SACModel, soft_values
from rl_training.algorithms.sequence_replay import sequence_targets
from rl_training.models.recurrent.continuous import acting_state_size, along


class RecurrentSAC(SAC):
    """SAC on sequences (time, batch); losses are means over the steps whose ``mask`` is 1."""

    def __init__(self, model: SACModel, config: SACConfig, **rest: Any) -> None:
        super().__init__(model, config, **rest)
        shape = model.actor.head.noise_shape
        self.noise_shape = (2, config.sequence_length, self.samples, *shape)

    @property
    def state_size(self) -> int:
        """Numbers of the state that is stored with sequences: the policy's and the critics'."""
        return acting_state_size(self.module)

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ensemble_td_loss` of the critics along sequences."""
        return super().critic_loss(along(batch))

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `sac_actor_loss` and `sac_temperature_loss` along sequences."""
        return super().actor_loss(along(batch))

    def soft_targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return `sequence_targets` of the soft values of what followed each step."""
        actions, logprobs = self._sample(batch["next_obs"], batch["noise"][0])
        next_q = self.target.module(batch["next_obs"], actions)
        values = soft_values({"next_q": next_q, "next_logprobs": logprobs}, self._ent_coef())
        return sequence_targets(batch, values, self.config.n_step)

    def _sample(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        params, _ = self.model.actor.policy(obs)
        shape = params.shape[:2]
        rows = params.flatten(0, 1), noise.flatten(0, 1)
        actions, logprobs = self.model.actor.head.sample_logprob(*rows)  # type: ignore[operator]
        return actions.view(*shape, *actions.shape[1:]), logprobs.view(shape)
