"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783), synchronous.

The paper's workers update shared weights asynchronously; here all environments are stepped
together and their transitions make up one update, so that a run is deterministic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from rl_training._internal.coerce import require
from rl_training.algorithms.advantages import combine_minibatches
from rl_training.algorithms.masking import masked_mean
from rl_training.algorithms.ppo import OnPolicyConfig, OnPolicyLearner, RolloutMemoryConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import Paused
from rl_training.search_space import Choice, SearchSpace
from rl_training.types import Progress, RunSettings, StopRequest, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class A2CConfig(RolloutMemoryConfig):
    """A2C's settings; the defaults are Stable-Baselines3's, but the value loss is halved."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_steps": Choice((5, 8, 16, 32, 64)),
        "norm_adv": Choice((False, True)),
    }

    learning_rate: float = 7e-4
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    optimizer: Literal["adam", "adamw", "rmsprop", "radam"] = "rmsprop"
    """Optimizer, as in torch.optim (RMSprop without momentum)."""
    optimizer_betas: tuple[float, float] = (0.9, 0.99)
    """Adam's betas; rmsprop uses only the second, which torch calls alpha."""
    num_steps: int = 5
    """Steps each environment takes per rollout, which is one update."""
    sequence_length: int = 5
    """Steps that gradients flow back through, with memory; a divisor of num_steps."""
    gae_lambda: float = 1.0
    """Decay of generalised advantage estimation; 1: the return of the whole rollout, as in the
    paper."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    norm_adv: bool = False
    """Standardise advantages within each rollout."""

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        super().check_run(run)
        rows = run.num_envs * self.num_steps
        require(
            not self.norm_adv or rows > 1,
            "algo_kwargs.norm_adv",
            "false where a rollout is one transition (num_envs * num_steps = 1)",
            self.norm_adv,
        )


def a2c_loss(batch: Mapping[str, Any], *, ent_coef: float, vf_coef: float) -> dict[str, Tensor]:
    """The policy gradient, value and entropy losses of a rollout.

    Mnih et al. 2016, arXiv:1602.01783, section 4 and algorithm S3. With advantage A, a constant:

        policy_loss  = -mean( A logprobs )
        value_loss   = mean( (new_values - returns)^2 ) / 2
        entropy_loss = mean( entropy )
        loss         = policy_loss + vf_coef value_loss - ent_coef entropy_loss

    Rows are weighted by ``mask`` where there is one.
    """
    mask = batch.get("mask")
    policy_loss = -masked_mean(batch["advantages"] * batch["logprobs"], mask)
    value_loss = 0.5 * masked_mean((batch["new_values"] - batch["returns"]).square(), mask)
    entropy_loss = masked_mean(batch["entropy"], mask)
    return {
        "loss": policy_loss + vf_coef * value_loss - ent_coef * entropy_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
    }


class A2C(OnPolicyLearner):
    """One gradient step per rollout, on all of it."""

    config: OnPolicyConfig

    def learn(
        self,
        experience: RolloutBuffer | Sequence[RolloutBuffer],
        progress: Progress,
        stop: StopRequest = never,
        *,
        updates: int = 1,
    ) -> int:
        """Take one gradient step on a rollout, and return 1, whatever ``updates``.

        ``progress`` is that of the run when the rollout began. Raises `Paused` where ``stop``
        requests it before the step; the state before the call must then be restored.
        """
        del updates
        rollouts = self.prepare(experience, progress)
        if stop():
            raise Paused
        whole = [[rollout.batch()] for rollout in rollouts]
        for batches in combine_minibatches(whole, self.communicator, norm_adv=self.config.norm_adv):
            self.update(*batches)
        self.finish(rollouts)
        return 1

    def loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `a2c_loss` of the current model on stored data."""
        full = self.evaluated(minibatch)
        return a2c_loss(full, ent_coef=self.config.ent_coef, vf_coef=self.config.vf_coef)
