"""What every off-policy algorithm shares: its knobs, and learning from replay batch by batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rl_training._internal.coerce import check_types, require
from rl_training.algorithms.acceleration import Acceleration, graphed
from rl_training.data.replay_buffer import Prioritization, ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.types import Progress, Run, StopRequest, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """When to learn, and from how much."""

    learning_rate: float = 3e-4
    """Adam's step size."""
    buffer_size: int = 1_000_000
    """Transitions kept for replay, over all environments."""
    learning_starts: int = 1000
    """Steps of random actions before anything is learnt."""
    batch_size: int = 256
    """Transitions per update."""
    train_freq: int = 1
    """Learn at every crossing of a multiple of this many transitions."""
    gradient_steps: float = 1.0
    """Updates owed at each crossing; fractions add up, -1 is one per transition."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Steps of reward summed before the value of what follows."""
    hidden_sizes: tuple[int, ...] | None = (256, 256)
    """Widths of the hidden layers of every network; unset: 256 256, none after images."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "relu"
    """Activation between layers."""
    encoder: str | None = None
    """A 'module:Class' taking the ObsSpec, with an output_size; unset: a NatureCNN per image."""
    feature_size: int = 512
    """Numbers that a convolutional network makes of each image."""
    replay_device: Literal["cpu", "accelerator"] = "cpu"
    """'accelerator' keeps a copy of the replay beside the networks and draws batches there."""

    def __post_init__(self) -> None:
        check_types(self, "algo_kwargs")
        for name in ("buffer_size", "batch_size", "train_freq", "n_step", "feature_size"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.learning_starts >= 0, "learning_starts", "zero or more")
        self._require(0 <= self.gamma <= 1, "gamma", "between 0 and 1")
        finite_rate = 0 < self.learning_rate < math.inf
        self._require(finite_rate, "learning_rate", "above 0 and finite")
        steps = self.gradient_steps
        self._require(steps == -1 or 0 < steps < math.inf, "gradient_steps", "above 0, or -1")
        for width in self.hidden_sizes or ():
            self._require(width >= 1, "hidden_sizes", "widths of at least 1")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        require(condition, f"algo_kwargs.{name}", rule, getattr(self, name))

    def check_run(self, run: Run) -> None:
        """Refuse knobs that do not fit the rest of a config, and the reverse."""
        self._require(
            self.buffer_size >= run.num_envs, "buffer_size", f"at least num_envs = {run.num_envs}"
        )
        for name in ("normalize_obs", "normalize_reward"):
            if getattr(run, name):
                raise ConfigError(
                    f"'{name}' does not go with replay, which would mix scales: use a wrapper"
                    " with a fixed one"
                )

    def prioritization(self) -> Prioritization | None:
        """How replay is prioritised, if at all."""
        return None


def ensemble_td_loss(q_values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared TD error of each critic, halved, summed: ``q_values`` is (critics, batch).

    loss = sum_i mean( (q_i - target)^2 ) / 2
    """
    return 0.5 * (q_values - targets).square().mean(-1).sum()


class ReplayLearner(ABC):
    """Draws batches from a replay and runs ``update`` on each, the unit that is graphed.

    ``update`` gets a batch with the ``noise`` it needs, changes parameters in place and returns
    metrics, which are summed on the device. Some of its work may be due only every so many
    updates: ``due`` says whether it is.
    """

    noise_shape: tuple[int, ...] | None = None
    """Shape of the normal noise one update takes; None: it takes none."""

    def __init__(
        self,
        module: nn.Module,
        config: OffPolicyConfig,
        *,
        generator: torch.Generator | None,
        acceleration: Acceleration,
    ) -> None:
        self.module = module
        self.generator = generator if generator is not None else torch.Generator()
        self.num_updates = 0
        self._metric_names: tuple[str, ...] = ()
        self._metric_sums: Tensor | None = None
        self._updates_summed = 0
        self._batch_size = config.batch_size
        self._prioritized = config.prioritization() is not None
        self._device = next(module.parameters()).device
        # A graph takes its inputs from the host by itself.
        self._moves_batches = self._device.type != "cpu" and acceleration != "cudagraph"
        self._run = {
            due: graphed(
                functools.partial(self._update, due), acceleration, self._device, copies=False
            )
            for due in (False, True)
        }

    def learn(
        self, replay: ReplayBuffer, updates: int, progress: Progress, stop: StopRequest = never
    ) -> int:
        """Take ``updates`` steps, or fewer where ``stop`` requests it; return how many.

        Nothing is transferred from the device.
        """
        beta = self._beta(progress)
        for done in range(updates):
            if stop():
                return done
            batch = replay.sample(self._batch_size, self.generator, beta=beta)
            cells = batch.pop("cells")
            if self.noise_shape is not None:
                batch["noise"] = torch.randn(self.noise_shape, generator=self.generator)
            if self._moves_batches:
                batch = pytree.tree_map(lambda leaf: leaf.to(self._device), batch)
            self.num_updates += 1
            td_errors = self._run[self._is_due()](batch)
            self._updates_summed += 1
            if self._prioritized:
                replay.update_priorities(cells, td_errors)
        return updates

    def _update(self, due: bool, batch: dict[str, Any]) -> Any:
        metrics = self.update(batch, due=due)
        td_errors = metrics.pop("td_errors", None)
        numbers = torch.stack(list(metrics.values()))
        if self._metric_sums is None:
            self._metric_names, self._metric_sums = tuple(metrics), torch.zeros_like(numbers)
        self._metric_sums += numbers
        return td_errors

    def pop_metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, in one transfer; empty without any."""
        if self._metric_sums is None or not self._updates_summed:
            return {}
        means = (self._metric_sums / self._updates_summed).tolist()
        self._metric_sums.zero_()
        self._updates_summed = 0
        return dict(zip(self._metric_names, means, strict=True))

    def metric_sums(self) -> dict[str, Any]:
        """The sums since the last `pop_metrics`, for a checkpoint between two reports."""
        return {
            "names": list(self._metric_names),
            "sums": self._metric_sums,
            "updates": self._updates_summed,
        }

    def load_metric_sums(self, state: Mapping[str, Any]) -> None:
        """Restore the sums; in place where there are some, since a graph may write to them."""
        self._metric_names = tuple(str(name) for name in state["names"])
        self._updates_summed = int(state["updates"])
        if state["sums"] is not None:
            sums = state["sums"].to(self._device)
            if self._metric_sums is None:
                self._metric_sums = sums.clone()
            else:
                self._metric_sums.copy_(sums)

    @abstractmethod
    def update(self, batch: Mapping[str, Any], *, due: bool) -> dict[str, Tensor]:
        """One update: metrics, and ``td_errors`` per row where priorities need them."""

    def _is_due(self) -> bool:
        """Whether this update includes what is not part of every one."""
        return False

    def _beta(self, progress: Progress) -> float:
        """How much of the bias of prioritised sampling is corrected."""
        del progress
        return 1.0

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from other weights: targets follow at once."""
        self.module.load_state_dict(weights)
        self.sync_targets()

    @abstractmethod
    def sync_targets(self) -> None:
        """Make the target networks equal to the networks."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        return {
            "model": self.module.state_dict(),
            "replay_rng": self.generator.get_state(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a saved state back."""
        self.module.load_state_dict(state["model"])
        self.generator.set_state(state["replay_rng"])
        self.num_updates = int(state["num_updates"])
