"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): an actor-critic that corrects for lag.

Actors collect with weights that are some updates old; V-trace corrects the targets of values and
policy for the difference. The network and the losses are those of A2C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rl_training._internal.coerce import require
from rl_training.algorithms.a2c import A2C
from rl_training.algorithms.rollout_config import check_minibatches
from rl_training.algorithms.vtrace_learner import VTraceConfig, VTraceLearner
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.search_space import Choice, SearchSpace
from rl_training.types import Progress, RunSettings, StopRequest, never, until


@dataclasses.dataclass(frozen=True, kw_only=True)
class IMPALAConfig(VTraceConfig):
    """IMPALA's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_steps": Choice((8, 16, 20, 32, 64)),
        "num_minibatches": Choice((1, 2, 4)),
    }

    learning_rate: float = 5e-4
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    num_steps: int = 20
    """Steps each environment takes per rollout."""
    gae_lambda: float = 1.0
    """Decay of the trace; the paper's algorithm has 1."""
    num_minibatches: int = 1
    """Minibatches a rollout is split into, each one update; the paper has 1."""
    update_epochs: int = 1
    """Epochs per rollout; the targets are corrected anew before each."""
    norm_adv: bool = False
    """Standardise advantages within each minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_minibatches", "update_epochs"):
            self._require(getattr(self, name) >= 1, name, "at least 1")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        super().check_run(run)
        rows = check_minibatches(run, self.num_steps, self.num_minibatches)
        require(
            not self.norm_adv or rows > self.num_minibatches,
            "algo_kwargs.norm_adv",
            "false where a minibatch is one transition",
            self.norm_adv,
        )


class IMPALA(VTraceLearner, A2C):
    """Minibatches of each rollout, with `a2c_loss` on V-trace targets."""

    config: IMPALAConfig

    def learn(
        self,
        experience: RolloutBuffer | Sequence[RolloutBuffer],
        progress: Progress,
        stop: StopRequest = never,
        *,
        updates: int = 1,
    ) -> int:
        """Learn from a rollout; ``progress`` is that of the run when the rollout began.

        Returns the number of updates, which the config determines, not ``updates``. Raises `Paused`
        where ``stop`` requests it; the state before the call must then be restored.
        """
        del updates
        config, rollouts = self.config, self.prepare(experience, progress)
        for epoch in range(config.update_epochs):
            if epoch:
                for rollout in rollouts:
                    self._evaluate_again(rollout)
            for minibatches in until(stop, self.epoch(rollouts, config.num_minibatches)):
                self.update(*minibatches)
        self.finish(rollouts)
        return config.update_epochs * config.num_minibatches
