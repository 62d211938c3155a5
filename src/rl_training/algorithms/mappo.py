"""MAPPO (Yu et al. 2022, arXiv:2103.01955): PPO for several agents with a centralised critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from rl_training.algorithms.ippo import IPPOConfig
from rl_training.algorithms.ppo import PPO
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.types import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class MAPPOConfig(IPPOConfig):
    """IPPO's settings, and those of the critic."""

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("network", "network_kwargs"), "mappo takes an 'encoder' instead"),
        "shared_lstm": "the critic sees the state of the team, the policy what its agent sees",
    }

    normalize_values: bool = False
    """Let the critic compute returns standardised by their running mean and deviation, which are
    updated once per rollout, before its epochs."""
    uses_state: ClassVar[bool] = True
    """Whether rows contain the state of the whole team."""


class MAPPO(PPO):
    """PPO whose critic sees the state of the team, in the scale of normalised returns if set."""

    config: MAPPOConfig

    def prepare(self, experience: Any, progress: Progress) -> Sequence[RolloutBuffer]:
        """Evaluate the rollouts of the shards, then update the statistics of the returns."""
        rollouts = super().prepare(experience, progress)
        norm = getattr(self.model, "value_norm", None)
        if norm is not None:
            returns = [rollout.returns[rollout.learnt] for rollout in rollouts]
            norm.update(*returns, communicator=self.communicator)
        return rollouts

    def evaluated(self, minibatch: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored data with what the current model computes, values in the critic's scale."""
        full = super().evaluated(minibatch)
        norm = getattr(self.model, "value_norm", None)
        if norm is not None:
            scale: Tensor = norm.scale
            full |= {name: full[name] * scale for name in ("new_values", "values", "returns")}
        return full
