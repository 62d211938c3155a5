"""Phasic policy gradient (Cobbe et al. 2020, arXiv:2009.04416)."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training._internal.coerce import require
from rl_training._internal.tree import tree_map, tree_stack
from rl_training.algorithms.acceleration import Acceleration, graphed_update
from rl_training.algorithms.advantages import combine_minibatches
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.masking import masked_mean
from rl_training.algorithms.metrics import MetricSums
from rl_training.algorithms.ppo import PPO, PPOConfig, ppo_loss
from rl_training.communicator import per_shard_state, shards_of, state_of_each
from rl_training.data.rollout_buffer import RolloutBuffer, shuffled
from rl_training.models.mlp_ppg import Joint, MLPPPGModel
from rl_training.search_space import Choice, Range, SearchSpace
from rl_training.types import Progress, RunSettings, StopRequest, envs_of_shard, never, until

_IMAGES_AT_ONCE = 1024
"""Rows whose policy before an auxiliary phase is computed at once, where they contain images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPGConfig(PPOConfig):
    """PPO's settings for the policy phase, and those of the auxiliary phase."""

    SEARCH: ClassVar[SearchSpace] = {
        "policy_phases": Choice((8, 16, 32)),
        "aux_epochs": Choice((3, 6, 9)),
        "beta_clone": Range(0.3, 3.0, log=True),
    }

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = {
        "critic_hidden_sizes": "ppg has value_sizes instead",
        "network": "ppg takes an 'encoder' instead",
        "network_kwargs": "ppg takes an 'encoder' instead",
        "shared_lstm": "the value function must not train the policy's memory",
    }

    policy_phases: int = 32
    """Rollouts learnt from before each auxiliary phase."""
    aux_epochs: int = 6
    """Passes of an auxiliary phase over the rollouts since the last one."""
    num_aux_minibatches: int = 16
    """Minibatches those rollouts are split into."""
    beta_clone: float = 1.0
    """Weight of the KL term that keeps the policy close to that before the auxiliary phase."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the trunk's layers, which policy and values share; unset: 64 64, with memory 64
    after it; none after images."""
    value_sizes: tuple[int, ...] = (64,)
    """Widths of the value function's own layers on the trunk; with memory, on its own memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("policy_phases", "aux_epochs", "num_aux_minibatches"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(0 <= self.beta_clone < math.inf, "beta_clone", "zero or more, and finite")
        self._require(self.hidden_sizes != (), "hidden_sizes", "one width or more")
        for width in self.value_sizes:
            self._require(width >= 1, "value_sizes", "widths of at least 1")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        super().check_run(run)
        num_envs, name = envs_of_shard(run)
        per_env, what = self.num_steps, "num_steps"
        if self.has_memory:
            per_env, what = self.num_steps // self.sequence_length, "num_steps / sequence_length"
        rows = self.policy_phases * num_envs * per_env
        require(
            rows % self.num_aux_minibatches == 0,
            "algo_kwargs.num_aux_minibatches",
            f"a divisor of policy_phases * {name} * {what} = {self.policy_phases} *"
            f" {num_envs} * {per_env} = {rows}",
            self.num_aux_minibatches,
        )


def ppg_loss(minibatch: Mapping[str, Any], **coefficients: Any) -> dict[str, Tensor]:
    """The policy phase: PPO's own loss. Values reach their head alone; see `MLPPPGModel`."""
    return ppo_loss(minibatch, **coefficients)


def ppg_auxiliary_loss(minibatch: Mapping[str, Any], *, beta_clone: float) -> dict[str, Tensor]:
    """Both value functions fitted, the policy kept: the auxiliary phase.

    With p the policy, q the one it was when the phase began, and returns R:

        aux_value_loss = mean( (aux_values - R)^2 ) / 2
        value_loss     = mean( (new_values - R)^2 ) / 2
        clone_kl       = mean( KL(q, p) ),  KL(q, p) = sum_a q(a) (log q(a) - log p(a))
        loss           = aux_value_loss + value_loss + beta_clone clone_kl

    ``kl`` is KL(q, p) of each row, which the heads' ``kl`` computes.

    Rows are weighted by ``mask`` where there is one.
    """
    mask = minibatch.get("mask")
    returns = minibatch["returns"]
    aux_value_loss = 0.5 * masked_mean((minibatch["aux_values"] - returns).square(), mask)
    value_loss = 0.5 * masked_mean((minibatch["new_values"] - returns).square(), mask)
    clone_kl = masked_mean(minibatch["kl"], mask)
    return {
        "loss": aux_value_loss + value_loss + beta_clone * clone_kl,
        "aux_value_loss": aux_value_loss,
        "value_loss": value_loss,
        "clone_kl": clone_kl,
    }


class PPG(PPO):
    """PPO, and every ``policy_phases`` rollouts a phase that fits values through the shared trunk.

    `update` is one gradient step of the policy phase, `auxiliary_update` a whole auxiliary phase;
    each kind of phase has an optimizer state of its own over the same parameters.
    """

    objective = staticmethod(ppg_loss)
    config: PPGConfig

    def __init__(
        self,
        model: Any,
        config: PPGConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self._network: MLPPPGModel = model
        self.auxiliary_step = GradientStep(
            self.module,
            self.auxiliary_loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            optimizer=config.optimizer_spec(),
            acceleration=acceleration,
            communicator=self.communicator,
            beside=self.step,
        )
        device = self.step.flat.device
        self.auxiliary_metrics = MetricSums(device)
        self._run_auxiliary = graphed_update(
            self._auxiliary_update, acceleration, device, self.communicator
        )
        self.kept: list[list[dict[str, Any]]] = [[] for _ in self.generators]
        """Of each shard, observations and returns since the last auxiliary phase, by rollout."""
        self.auxiliary_phases = 0
        """Auxiliary phases so far."""
        self._last_metrics: dict[str, float] = {}

    def learn(
        self,
        experience: RolloutBuffer | Sequence[RolloutBuffer],
        progress: Progress,
        stop: StopRequest = never,
        *,
        updates: int = 1,
    ) -> int:
        """Run a policy phase, and an auxiliary phase after every ``policy_phases`` of them."""
        count = super().learn(experience, progress, stop, updates=updates)
        for kept, rollout in zip(self.kept, shards_of(experience), strict=True):
            kept.append(_copied(rollout.batch()))
        if len(self.kept[0]) >= self.config.policy_phases:
            self._last_metrics = self.auxiliary_update(stop)
            count += self.config.aux_epochs * self.config.num_aux_minibatches
        return count

    def pop_metrics(self) -> dict[str, float]:
        """Return means over the updates since the last call.

        Metrics named ``auxiliary/`` are those of the last auxiliary phase until the next one, so
        that a row is logged with them however seldom rows are logged.
        """
        phases = {"auxiliary/phases": float(self.auxiliary_phases)}
        return super().pop_metrics() | self._last_metrics | phases

    def auxiliary_update(self, stop: StopRequest = never) -> dict[str, float]:
        """Fit values to the stored rollouts while the policy is kept as it is; return metrics.

        The learning rate is that of the last policy phase. The stored rollouts are deleted.
        """
        if not self.kept[0]:
            raise RuntimeError("there is no rollout to learn from since the last auxiliary phase")
        batches = [self._with_teacher(self._joined(kept)) for kept in self.kept]
        self.auxiliary_step.learning_rate = self.step.learning_rate
        count = self.config.num_aux_minibatches
        for _ in range(self.config.aux_epochs):
            pairs = zip(batches, self.generators, strict=True)
            shards = [list(self._shuffled(batch, count, generator)) for batch, generator in pairs]
            for minibatches in until(stop, combine_minibatches(shards, self.communicator)):
                self._run_auxiliary(*minibatches)
                self.auxiliary_metrics.updates += 1
        for kept in self.kept:
            kept.clear()
        self.auxiliary_phases += 1
        return self.auxiliary_metrics.pop("auxiliary")

    @torch.no_grad()
    def _with_teacher(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the policy as it is before the phase."""
        policies = [self._joint(piece).policy for piece in self._pieces(batch)]
        return {**batch, "teacher": torch.cat(policies, self._rows_dim)}

    _shuffled = staticmethod(shuffled)
    _rows_dim = 0
    """Dimension of tensors along which rows are."""

    def _joined(self, kept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return rollouts as one batch."""
        return {key: tree_stack(torch.cat, [rollout[key] for rollout in kept]) for key in kept[0]}

    def _pieces(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield parts of a batch whose policies are computed at once."""
        rows = len(batch["returns"])
        most = _IMAGES_AT_ONCE if self._network.sees_images else rows
        for i in range(0, rows, most):
            yield {"obs": tree_map(operator.itemgetter(slice(i, i + most)), batch["obs"])}

    def _joint(self, batch: Mapping[str, Any]) -> Joint:
        """Return what the network computes of a batch."""
        return self._network.joint(batch["obs"])

    def _auxiliary_update(self, *minibatches: Mapping[str, Any]) -> None:
        self.auxiliary_metrics.add(self.auxiliary_step(*minibatches))

    def auxiliary_loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ppg_auxiliary_loss` of the current model on stored data."""
        now = self._joint(minibatch)
        full = {
            **minibatch,
            "kl": self._network.head.kl(minibatch["teacher"], now.policy),
            "new_values": now.value,
            "aux_values": now.aux_value,
        }
        return ppg_auxiliary_loss(full, beta_clone=self.config.beta_clone)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, also between two auxiliary phases."""
        return {
            **super().state_dict(),
            "auxiliary_optimizer": self.auxiliary_step.state_dict(),
            "auxiliary_phases": self.auxiliary_phases,
            "auxiliary_metrics": dict(self._last_metrics),
            "kept": per_shard_state([list(kept) for kept in self.kept], self.communicator),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.auxiliary_metrics.reset()
        self.auxiliary_step.load_state_dict(state["auxiliary_optimizer"])
        self.auxiliary_phases = int(state["auxiliary_phases"])
        self._last_metrics = dict(state["auxiliary_metrics"])
        device = self.step.flat.device
        self.kept = [
            [
                {key: tree_map(lambda leaf: leaf.to(device), item) for key, item in rollout.items()}
                for rollout in kept
            ]
            for kept in state_of_each(state["kept"], self.communicator)
        ]


def _copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of what an auxiliary phase needs: the rollout's memory is written again."""
    needed = ("obs", "returns", "mask", "state", "sequence")
    return {key: tree_map(torch.clone, batch[key]) for key in needed if key in batch}
