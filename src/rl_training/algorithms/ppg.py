"""Phasic policy gradient (Cobbe et al. 2020, arXiv:2009.04416)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training._internal.coerce import require
from rl_training._internal.tree import tree_map, tree_stack
from rl_training.algorithms.acceleration import Acceleration, graphed
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.masking import masked_mean
from rl_training.algorithms.ppo import PPO, PPOConfig, mean_metrics, ppo_loss, until
from rl_training.data.rollout_buffer import RolloutBuffer, shuffled
from rl_training.types import Progress, Run, StopRequest, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPGConfig(PPOConfig):
    """PPO's knobs for the policy phase, and those of the auxiliary phase."""

    policy_phases: int = 32
    """Rollouts learnt from before each auxiliary phase."""
    aux_epochs: int = 6
    """Passes of an auxiliary phase over the rollouts since the last one."""
    num_aux_minibatches: int = 16
    """Minibatches those rollouts are split into."""
    beta_clone: float = 1.0
    """Weight of keeping the policy where it was, against fitting values in the auxiliary phase."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the trunk's layers, which policy and values share; unset: 64 64."""
    value_sizes: tuple[int, ...] = (64,)
    """Widths of the value function's own layers on the trunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("policy_phases", "aux_epochs", "num_aux_minibatches"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(0 <= self.beta_clone < math.inf, "beta_clone", "zero or more, and finite")
        self._require(self.hidden_sizes != (), "hidden_sizes", "one width or more")
        for width in self.value_sizes:
            self._require(width >= 1, "value_sizes", "widths of at least 1")

    def check_run(self, run: Run) -> None:
        """Refuse knobs that do not fit the number of environments."""
        super().check_run(run)
        rows = self.policy_phases * run.num_envs * self.num_steps
        require(
            rows % self.num_aux_minibatches == 0,
            "algo_kwargs.num_aux_minibatches",
            f"a divisor of policy_phases * num_envs * num_steps = {self.policy_phases} *"
            f" {run.num_envs} * {self.num_steps} = {rows}",
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
        clone_kl       = mean( sum_a q(a) (log q(a) - log p(a)) )
        loss           = aux_value_loss + value_loss + beta_clone clone_kl

    Rows weigh as ``mask`` says, where there is one.
    """
    mask = minibatch.get("mask")
    returns = minibatch["returns"]
    teacher = minibatch["teacher_log_probs"]
    aux_value_loss = 0.5 * masked_mean((minibatch["aux_values"] - returns).square(), mask)
    value_loss = 0.5 * masked_mean((minibatch["new_values"] - returns).square(), mask)
    clone_kl = masked_mean((teacher.exp() * (teacher - minibatch["log_probs"])).sum(-1), mask)
    return {
        "loss": aux_value_loss + value_loss + beta_clone * clone_kl,
        "aux_value_loss": aux_value_loss,
        "value_loss": value_loss,
        "clone_kl": clone_kl,
    }


class PPG(PPO):
    """PPO, and every ``policy_phases`` rollouts a phase that teaches its trunk to tell values.

    `update` is one gradient step of the policy phase, `auxiliary_update` a whole auxiliary phase;
    each phase has an Adam of its own over the same parameters.
    """

    objective = staticmethod(ppg_loss)
    config: PPGConfig

    def __init__(
        self,
        model: Any,
        config: PPGConfig,
        *,
        generator: torch.Generator | None = None,
        acceleration: Acceleration = "eager",
    ) -> None:
        super().__init__(model, config, generator=generator, acceleration=acceleration)
        self._joint = model.joint
        self.auxiliary_step = GradientStep(
            self.module,
            self.auxiliary_loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            adam_eps=1e-5,
            acceleration=acceleration,
            beside=self.step,
        )
        device = self.step.flat.device
        self._auxiliary_update = graphed(self.auxiliary_step.__call__, acceleration, device)
        self.kept: list[dict[str, Any]] = []
        """Observations and returns of the policy phases since the last auxiliary one."""
        self.auxiliary_phases = 0
        """Auxiliary phases done so far."""
        self._last_metrics: dict[str, float] = {}

    def learn(
        self, rollout: RolloutBuffer, progress: Progress, stop: StopRequest = never
    ) -> dict[str, float]:
        """A policy phase; the auxiliary one follows when enough of them have been.

        Metrics named ``auxiliary/`` are those of the last auxiliary phase until the next, so that
        they are seen however seldom is logged.
        """
        metrics = super().learn(rollout, progress, stop)
        self.kept.append(_remember(rollout.flat()))
        if len(self.kept) >= self.config.policy_phases:
            self._last_metrics = self.auxiliary_update(stop)
        return metrics | self._last_metrics | {"auxiliary/phases": float(self.auxiliary_phases)}

    def auxiliary_update(self, stop: StopRequest = never) -> dict[str, float]:
        """Fit values over the rollouts that were kept, near the policy as it is now; forget them.

        The learning rate is that of the last policy phase.
        """
        if not self.kept:
            raise RuntimeError("there is no rollout to learn from since the last auxiliary phase")
        batch: dict[str, Any] = {
            key: tree_stack(torch.cat, [rollout[key] for rollout in self.kept])
            for key in self.kept[0]
        }
        with torch.no_grad():
            batch["teacher_log_probs"] = self._joint(batch["obs"]).log_probs
        self.auxiliary_step.learning_rate = self.step.learning_rate
        updates = [
            self._auxiliary_update(minibatch)
            for _ in range(self.config.aux_epochs)
            for minibatch in until(
                stop, shuffled(batch, self.config.num_aux_minibatches, self.generator)
            )
        ]
        self.kept.clear()
        self.auxiliary_phases += 1
        return mean_metrics(updates, "auxiliary")

    def auxiliary_loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """`ppg_auxiliary_loss` of the current model on stored data."""
        now = self._joint(minibatch["obs"])
        full = {
            **minibatch,
            "log_probs": now.log_probs,
            "new_values": now.value,
            "aux_values": now.aux_value,
        }
        return ppg_auxiliary_loss(full, beta_clone=self.config.beta_clone)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive, in the middle of a cycle too."""
        return {
            **super().state_dict(),
            "auxiliary_optimizer": self.auxiliary_step.state_dict(),
            "auxiliary_phases": self.auxiliary_phases,
            "auxiliary_metrics": dict(self._last_metrics),
            "kept": list(self.kept),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a saved state back."""
        super().load_state_dict(state)
        self.auxiliary_step.load_state_dict(state["auxiliary_optimizer"])
        self.auxiliary_phases = int(state["auxiliary_phases"])
        self._last_metrics = dict(state["auxiliary_metrics"])
        device = self.step.flat.device
        self.kept = [
            {key: tree_map(lambda leaf: leaf.to(device), value) for key, value in rollout.items()}
            for rollout in state["kept"]
        ]


def _remember(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what an auxiliary phase needs: the rollout's memory is written again."""
    needed = ("obs", "returns", "mask")
    return {key: tree_map(torch.clone, batch[key]) for key in needed if key in batch}
