"""Conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779): SAC-based, and DQN-based."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.bc import action_distance
from rl_training.algorithms.dqn import dqn_loss
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.off_policy import ReplayLearner, ensemble_td_loss
from rl_training.algorithms.q_learning import QLearner, best_values, values_of
from rl_training.algorithms.sac import SAC, SACModel, SACSettings
from rl_training.algorithms.td3 import td3_targets
from rl_training.search_space import Range, SearchSpace

_BOX_WEIGHT, _DISCRETE_WEIGHT = 5.0, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CQLConfig(SACSettings):
    """Settings of CQL; those of the policy, its entropy and its samples are for Box actions."""

    SEARCH: ClassVar[SearchSpace] = {
        "actor_learning_rate": Range(1e-5, 1e-3, log=True),
        "conservative_weight": Range(0.1, 10.0, log=True),
    }

    actor_learning_rate: float | None = 1e-4
    """Step size of the policy's optimizer; unset: learning_rate. It has the same schedule."""
    conservative_weight: float | None = None
    """Weight of the conservative loss; unset: 5 for Box actions, 1 for Discrete ones."""
    conservative_threshold: float | None = None
    """Learn a further factor of the weight, so that the conservative loss of each critic stays
    near this value (Box actions); unset: the weight is fixed."""
    num_action_samples: int = 10
    """Actions sampled from each of three distributions to estimate the conservative loss: the
    policy at the observation, the policy at the next one, and the uniform one."""
    soft_backup: bool = False
    """Targets with an action sampled from the policy and its entropy, as in SAC; false: with the
    policy's most likely action and no entropy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.num_action_samples >= 1, "num_action_samples", "at least 1")
        weight = self.conservative_weight
        if weight is not None:
            self._require(0 <= weight < math.inf, "conservative_weight", "zero or more, and finite")
        threshold = self.conservative_threshold
        if threshold is not None:
            self._require(math.isfinite(threshold), "conservative_threshold", "finite")

    @property
    def rows_per_update(self) -> int:
        """How many rows the critics evaluate in an update."""
        return self.batch_size * (1 + 3 * self.num_action_samples)


def conservative_gap(q_samples: Tensor, sample_logprobs: Tensor, q_data: Tensor) -> Tensor:
    """Return by how much each critic values sampled actions above the recorded ones.

        gap_i = mean_batch( logsumexp_k( q_i(s, a_k) - log p(a_k) ) - q_i(s, a_data) )

    q_samples: (critics, samples, batch), sample_logprobs: (samples, batch), q_data: (critics,
    batch).
    """
    return (torch.logsumexp(q_samples - sample_logprobs, 1) - q_data).mean(-1)


class LearntWeight(nn.Module):
    """A factor of the conservative loss, learnt as its logarithm."""

    _LARGEST = math.log(1e6)

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        """Return the factor; its limit stops no gradient, so that it can decrease again."""
        beyond = (self.logarithm - self._LARGEST).clamp(min=0).detach()
        return (self.logarithm - beyond).exp()


class CQL(SAC):
    """SAC whose critics are pushed down at sampled actions and up at the recorded ones."""

    config: CQLConfig

    def __init__(
        self,
        model: SACModel,
        config: CQLConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        self.learnt_weight: LearntWeight | None = None
        if config.conservative_threshold is not None:
            self.learnt_weight = LearntWeight().to(next(model.parameters()).device)
        weight = config.conservative_weight
        self.conservative_weight = _BOX_WEIGHT if weight is None else weight
        super().__init__(model, config, acceleration=acceleration, **shards)
        shape = model.actor.head.noise_shape
        self._log_uniform = -math.prod(shape) * math.log(2)
        self.noise_shape = (2 + 3 * config.num_action_samples, self.samples, *shape)

    def make_critic_step(self, settings: Mapping[str, Any]) -> GradientStep:
        """Return the step of the critics, and of the weight where it is learnt."""
        if self.learnt_weight is None:
            return super().make_critic_step(settings)
        both = nn.ModuleList([self.model.critics, self.learnt_weight])
        learnt = self.learnt_weight.parameters()
        return GradientStep(both, self.critic_loss, no_decay=learnt, **settings)

    def critic_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the TD error and the weighted conservative loss, summed over critics.

        loss = sum_i mean( (q_i - target)^2 ) + weight sum_i gap_i

        With a threshold, gap_i - threshold takes the place of gap_i, and the weight has a further
        factor that gradient ascent learns.
        """
        with torch.no_grad():
            targets = self.targets(batch)
            samples, logprobs = self.sampled_actions(batch)
        actions = torch.cat([batch["actions"][None], samples])
        values = self.model.critics.of_samples(batch["obs"], actions)
        q_values, q_samples = values[:, 0], values[:, 1:]
        td_loss = 2 * ensemble_td_loss(q_values, targets)
        gaps = conservative_gap(q_samples, logprobs, q_values)
        loss, metrics = self._weighted(gaps)
        return {
            "loss": td_loss + loss,
            "td_loss": td_loss,
            "conservative_loss": gaps.mean(),
            "q_mean": q_values.detach().mean(),
            **metrics,
        }

    def _weighted(self, gaps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        threshold = self.config.conservative_threshold
        if self.learnt_weight is None or threshold is None:
            return self.conservative_weight * gaps.sum(), {}
        excess = self.conservative_weight * (gaps - threshold).sum()
        factor = self.learnt_weight()
        # The two have no parameter in common: one step on the sum is a step on each.
        return factor.detach() * excess - factor * excess.detach(), {"learnt_weight": factor}

    def targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the critics' targets: `td3_targets` without noise, or `sac_targets`."""
        if self.config.soft_backup:
            return self.soft_targets(batch)
        actions = self.model.actor.actions(batch["next_obs"])
        next_q = self.target.module(batch["next_obs"], actions)
        return td3_targets({**batch, "next_q": next_q})

    def sampled_actions(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return actions (3 samples, batch, ...) and their log-probabilities (3 samples, batch)."""
        of_policy, of_next, uniform = batch["noise"][2:].chunk(3)
        parts = [
            self._sample_many(batch["obs"], of_policy),
            self._sample_many(batch["next_obs"], of_next),
        ]
        random = torch.erf(uniform / math.sqrt(2))  # of a normal number: uniform in [-1, 1]
        flat = random.new_full(random.shape[:2], self._log_uniform)
        actions, logprobs = zip(*parts, (random, flat), strict=True)
        return torch.cat(actions), torch.cat(logprobs)

    def _sample_many(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        params, _ = self.model.actor.policy(obs)
        rows = params.expand(len(noise), *params.shape).flatten(0, 1)
        actions, logprobs = self.model.actor.head.sample_logprob(rows, noise.flatten(0, 1))  # type: ignore[operator]
        return actions.view_as(noise), logprobs.view(noise.shape[:2])

    def actor_loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return SAC's loss, with the distance of the policy to the recorded actions."""
        metrics = super().actor_loss(batch)
        with torch.no_grad():
            actions = self.model.actor.actions(batch["obs"])
        return {**metrics, "action_distance": action_distance(actions, batch["actions"])}

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizers, random state, updates, and the learnt weight."""
        state = super().state_dict()
        if self.learnt_weight is not None:
            state["learnt_weight"] = self.learnt_weight.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        if self.learnt_weight is not None:
            self.learnt_weight.load_state_dict(state["learnt_weight"])


class DiscreteCQL(QLearner):
    """Double Q-learning whose values are pushed down, and up at the recorded actions."""

    config: CQLConfig

    def __init__(
        self,
        model: Any,
        config: CQLConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self.model = model
        weight = config.conservative_weight
        self.conservative_weight = _DISCRETE_WEIGHT if weight is None else weight

    learn = ReplayLearner.learn

    def update(self, *batches: Mapping[str, Any], delayed: bool = True) -> dict[str, Any]:
        """Make one gradient step; the delayed part moves the target network."""
        metrics = self.step(*batches)
        if delayed:
            self.target.follow(self.step.flat, self.config.tau)
        return metrics

    def _runs_delayed(self) -> bool:
        return self.num_updates % self.config.target_update_interval_updates == 0

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `dqn_loss` plus the weighted conservative loss.

        target = rewards + discounts Q_target(next_obs, argmax_a Q(next_obs, a))
        gap    = mean( logsumexp_a Q(s, a) - Q(s, a_data) )
        """
        with torch.no_grad():
            following = self.target.module.q_values(batch["next_obs"])
            chooser = self.model.q_values(batch["next_obs"])
            targets = batch["rewards"] + batch["discounts"] * best_values(following, chooser)
        values = self.model.q_values(batch["obs"])
        chosen = values_of(batch["actions"], values)
        td = dqn_loss({"q_values": chosen, "targets": targets, "weights": batch["weights"]})
        gap = (torch.logsumexp(values, -1) - chosen).mean()
        return {
            "loss": td["loss"] + self.conservative_weight * gap,
            "td_loss": td["loss"],
            "conservative_loss": gap,
            "q_mean": td["q_mean"],
            "action_match": (values.argmax(-1) == batch["actions"]).float().mean(),
        }
