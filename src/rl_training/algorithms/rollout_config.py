"""Settings of learning from one rollout at a time, whatever is learnt from it."""

from __future__ import annotations

import dataclasses

from rl_training._internal.coerce import require
from rl_training.algorithms.network_config import CustomNetworkConfig
from rl_training.types import RunSettings, envs_of_shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(CustomNetworkConfig):
    """Settings of every algorithm that learns from one rollout at a time."""

    num_steps: int = 128
    """Steps each environment takes per rollout."""
    gamma: float = 0.99
    """Discount factor."""
    max_grad_norm: float = 0.5
    """Clip gradients to this global norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.num_steps >= 1, "num_steps", "at least 1")
        self._require(0 <= self.gamma <= 1, "gamma", "between 0 and 1")
        self._require(self.max_grad_norm > 0, "max_grad_norm", "above 0")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the rest of a config."""


def check_minibatches(run: RunSettings, num_steps: int, num_minibatches: int) -> int:
    """Refuse a number of minibatches that does not divide a shard's rollout; return its rows."""
    num_envs, name = envs_of_shard(run)
    rows = num_envs * num_steps
    require(
        rows % num_minibatches == 0,
        "algo_kwargs.num_minibatches",
        f"a divisor of the rollout, {name} * num_steps = {num_envs} * {num_steps} = {rows}",
        num_minibatches,
    )
    return rows
