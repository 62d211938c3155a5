"""Learning from rollouts of an older policy: V-trace in place of GAE, for IMPALA and APPO."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.ppo import OnPolicyConfig, OnPolicyLearner
from rl_training.algorithms.returns import vtrace
from rl_training.communicator import add_in_order
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.search_space import Choice, SearchSpace
from rl_training.types import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class VTraceConfig(OnPolicyConfig):
    """Settings of every algorithm that corrects for an older policy by V-trace."""

    SEARCH: ClassVar[SearchSpace] = {
        "rho_bar": Choice((1.0, 2.0)),
    }

    rho_bar: float = 1.0
    """Largest weight of a TD error and of an advantage: the probability ratio is clipped to it."""
    c_bar: float = 1.0
    """Largest factor per step of the trace: how far TD errors propagate back; at most rho_bar."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rho_bar", "c_bar"):
            self._require(0 < getattr(self, name) < math.inf, name, "above 0 and finite")
        self._require(self.c_bar <= self.rho_bar, "c_bar", f"at most rho_bar = {self.rho_bar:g}")


class VTraceLearner(OnPolicyLearner):
    """An `OnPolicyLearner` whose targets are corrected for the policy that acted.

    The policy that acted is known by the log-probabilities in the rollout. Values are always those
    of the current weights. Where the current weights acted, all ratios are one and the targets are
    those of GAE, bit for bit.
    """

    config: Any

    def __init__(
        self, model: Any, config: VTraceConfig, *, lagged: bool = False, **rest: Any
    ) -> None:
        super().__init__(model, config, **rest)
        self._lagged = lagged
        """Whether recorded log-probabilities and values may be those of older weights."""
        self._ratios: list[Tensor] = []
        """Of each shard's rollout: the sum of the importance ratios, and their number."""

    def prepare(self, experience: Any, progress: Progress) -> Sequence[RolloutBuffer]:
        """Set the learning rate; evaluate the rollouts of the shards, which are returned."""
        self._ratios.clear()
        return super().prepare(experience, progress)

    @torch.no_grad()
    def _evaluate_rollout(self, rollout: RolloutBuffer) -> None:
        """Compute values and V-trace targets with the current weights, which may not have acted."""
        if self._lagged or not {"logprobs", "values"} <= rollout.recorded:
            now = self._evaluate(rollout.whole())
            rollout.keep_evaluation(now.logprob, now.value)
            self._set_targets(rollout, now.logprob, now.value)
        else:
            self._set_targets(rollout, rollout.logprobs.flatten(), rollout.values.flatten())

    @torch.no_grad()
    def _evaluate_again(self, rollout: RolloutBuffer) -> None:
        """Compute the targets with weights that changed since `_evaluate_rollout`."""
        now = self._evaluate(rollout.whole())
        self._set_targets(rollout, now.logprob, now.value)

    def _set_targets(self, rollout: RolloutBuffer, logprobs: Tensor, values: Tensor) -> None:
        shape = rollout.rewards.shape
        logprobs, values = logprobs.reshape(shape).clone(), values.reshape(shape).clone()
        rollout.fill_bootstrap(self.model.value)
        returns, advantages = vtrace(
            rollout.logprobs,
            logprobs,
            rollout.rewards,
            values,
            rollout.dones,
            rollout.bootstrap,
            self._last_value(rollout),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            rho_bar=self.config.rho_bar,
            c_bar=self.config.c_bar,
        )
        rollout.keep_targets(logprobs, values, advantages, returns)
        ratios = torch.exp(logprobs - rollout.logprobs)[rollout.valid]
        self._ratios.append(torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))]))

    def finish(self, experience: Any, **metrics: float | Tensor) -> None:
        """Add the mean importance ratio, before the first update, to the metrics."""
        before = torch.stack(self._ratios[: len(self.communicator.local)])
        total, count = add_in_order(self.communicator.gather(before))
        super().finish(experience, ratio_mean=total / count, **metrics)
