"""Parallelised Q-network (Gallici et al. 2024, arXiv:2407.04811).

Q-learning from rollouts of many environments, with lambda returns and layer normalisation, without
a replay and without a target network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.exploration import EpsilonGreedyConfig
from rl_training.algorithms.masking import masked_mean
from rl_training.algorithms.ppo import OnPolicyLearner
from rl_training.algorithms.q_learning import values_of
from rl_training.algorithms.rollout_config import RolloutConfig, check_minibatches
from rl_training.algorithms.schedules import Schedule
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.search_space import Choice, Range, SearchSpace
from rl_training.types import Progress, RunSettings, StopRequest, never, until


@dataclasses.dataclass(frozen=True, kw_only=True)
class PQNConfig(EpsilonGreedyConfig, RolloutConfig):
    """PQN's settings; the defaults are CleanRL's."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_steps": Choice((8, 16, 32, 64, 128)),
        "gamma": Choice((0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
        "q_lambda": Choice((0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95)),
        "num_minibatches": Choice((1, 2, 4, 8, 16)),
        "update_epochs": Choice((1, 2, 4, 8)),
        "exploration_fraction": Range(0.05, 0.6),
        "exploration_final_eps": Range(0.01, 0.1),
        "max_grad_norm": Choice((0.5, 1.0, 5.0, 10.0)),
        "normalize_obs": Choice((False, True)),
    }

    norm_adv: ClassVar[bool] = False
    """Targets are values of actions, not advantages."""

    learning_rate: float = 2.5e-4
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    lr_schedule: Schedule | None = None
    """'constant', or 'linear' or 'cosine' decay to 0; unset: linear if anneal_lr, else constant."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over the run, where lr_schedule is unset."""
    optimizer: Literal["adam", "adamw", "rmsprop", "radam"] = "radam"
    """Optimizer, as in torch.optim (RMSprop without momentum)."""
    q_lambda: float = 0.65
    """Decay of the lambda returns; 0: one-step targets, 1: the rewards of the whole rollout."""
    num_minibatches: int = 4
    """Minibatches a rollout is split into."""
    update_epochs: int = 4
    """Epochs per rollout; all have the same targets."""
    max_grad_norm: float = 10.0
    """Clip gradients to this global norm."""
    layer_norm: bool = True
    """Layer normalisation after every hidden layer, which takes the place of a target network."""
    dueling: bool = False
    """Separate state values and advantages (arXiv:1511.06581)."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; unset: 120 84, none after images."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "relu"
    """Activation between layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.q_lambda <= 1, "q_lambda", "between 0 and 1")
        for name in ("num_minibatches", "update_epochs"):
            self._require(getattr(self, name) >= 1, name, "at least 1")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        check_minibatches(run, self.num_steps, self.num_minibatches)


def pqn_loss(minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return half the mean squared error of the values of the actions taken.

        loss = mean( (q_values - returns)^2 ) / 2

    Rows are weighted by ``mask`` where there is one. ``returns`` are the lambda returns of
    `rl_training.algorithms.returns.lambda_returns` for V(s) = max_a Q(s, a).
    """
    mask, q_values = minibatch.get("mask"), minibatch["q_values"]
    td_errors = minibatch["returns"] - q_values
    return {
        "loss": 0.5 * masked_mean(td_errors.square(), mask),
        "q_mean": masked_mean(q_values.detach(), mask),
        "td_error": masked_mean(td_errors.detach().abs(), mask),
    }


class PQN(OnPolicyLearner):
    """Several epochs of minibatches per rollout, towards lambda returns of the greedy policy.

        R_t = r_t + gamma [(1 - lambda) V(s_{t+1}) + lambda R_{t+1}],    V(s) = max_a Q(s, a)

    After a termination what follows r_t is 0, after a truncation gamma V(final observation). The
    returns are not corrected for exploring actions (Peng's Q(lambda)). All values are those of the
    weights before the first update.
    """

    config: PQNConfig

    def rollout_evaluation(self) -> Callable[[Mapping[str, Any]], Tensor]:
        """Return the function that computes the values of a rollout's observations."""
        value = self.model.value
        return lambda batch: value(batch["obs"])

    @torch.no_grad()
    def _evaluate_rollout(self, rollout: RolloutBuffer) -> None:
        """Compute values and lambda returns of a rollout."""
        rollout.values.view(-1).copy_(self._evaluate(rollout.whole()))
        rollout.fill_bootstrap(self.model.value)
        rollout.compute_returns_and_advantages(
            last_value=self._last_value(rollout),
            gamma=self.config.gamma,
            gae_lambda=self.config.q_lambda,
        )

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
        for _ in range(config.update_epochs):
            for minibatches in until(stop, self.epoch(rollouts, config.num_minibatches)):
                self.update(*minibatches)
        self.finish(rollouts)
        return config.update_epochs * config.num_minibatches

    def loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `pqn_loss` of the current network on stored data."""
        model: Any = self.model
        chosen = values_of(minibatch["actions"], model.q_values(minibatch["obs"]))
        return pqn_loss({**minibatch, "q_values": chosen})
