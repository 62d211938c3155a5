"""What every off-policy algorithm shares: settings, and updates from batches of a replay."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rl_training.algorithms.acceleration import Acceleration, graphed_update
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.metrics import MetricSums
from rl_training.algorithms.network_config import ActorCriticConfig, NetworkConfig
from rl_training.algorithms.schedules import set_learning_rates
from rl_training.communicator import (
    ALONE,
    Communicator,
    generator_states,
    load_generator_states,
    shards_of,
)
from rl_training.data.replay_buffer import Prioritization, ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.search_space import Choice, Range, SearchSpace
from rl_training.types import Progress, RunSettings, StopRequest, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(NetworkConfig):
    """Settings of every algorithm that learns from batches of a replay or a dataset."""

    SEARCH: ClassVar[SearchSpace] = {
        "batch_size": Choice((64, 128, 256, 512)),
    }

    default_num_envs: ClassVar[int] = 1

    batch_size: int = 256
    """Transitions per update."""
    hidden_sizes: tuple[int, ...] | None = (256, 256)
    """Widths of the hidden layers of every network, after vectors and images alike; null in YAML:
    256 256 after vectors, none after images."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "relu"
    """Activation between layers."""
    replay_device: Literal["cpu", "accelerator"] = "cpu"
    """'accelerator' copies the replay buffer to the networks' device and gathers batches there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_batch()

    @property
    def samples_setting(self) -> str:
        """The setting that `samples_per_update` is."""
        return "batch_size"

    def _check_batch(self) -> None:
        self._require(self.batch_size >= 1, "batch_size", "at least 1")

    @property
    def samples_per_update(self) -> int:
        """How many transitions, or sequences of them, an update draws from the replay."""
        return int(getattr(self, self.samples_setting))

    @property
    def rows_per_update(self) -> int:
        """How many rows the largest network evaluates in an update, for the number of threads."""
        return self.samples_per_update

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the rest of a config, and the reverse."""
        self._require_divisible(self.samples_setting, run.shards)
        if run.normalize_reward and run.is_offline:
            raise ConfigError(
                "'normalize_reward' must be false for a run from a dataset: scale rewards when you"
                " make the dataset"
            )
        if run.normalize_reward:
            raise ConfigError(
                "'normalize_reward' must be false for algorithms with a replay: stored rewards stay"
                " as they were while the statistics change, and scaling them when they are sampled"
                " would change the scale of all targets with every change of the statistics;"
                " multiply rewards by a constant in a wrapper (gymnasium's TransformReward)"
            )

    def _require_divisible(self, name: str, shards: int) -> None:
        self._require(getattr(self, name) % shards == 0, name, f"divisible by shards = {shards}")

    def prioritization(self) -> Prioritization | None:
        """Return how the replay is prioritised; None: every transition is equally likely."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueConfig(ReplayConfig):
    """Settings of algorithms that learn values from a replay or a dataset."""

    SEARCH: ClassVar[SearchSpace] = {
        "gamma": Choice((0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
    }

    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Number of rewards summed before bootstrapping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.n_step >= 1, "n_step", "at least 1")
        self._require(0 <= self.gamma <= 1, "gamma", "between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(ValueConfig):
    """Settings of algorithms that fill a replay from environments while they learn."""

    SEARCH: ClassVar[SearchSpace] = {
        "train_freq": Choice((1, 2, 4, 8)),
    }

    buffer_size: int = 1_000_000
    """Capacity of the replay buffer in transitions, over all environments."""
    learning_starts: int = 1000
    """Steps of random actions before the first update."""
    train_freq: int = 1
    """Run updates each time this many transitions have been collected."""
    gradient_steps: float = 1.0
    """Updates per train_freq transitions; a fraction accumulates until it makes a whole update;
    -1: one update per transition."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("buffer_size", "train_freq"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.learning_starts >= 0, "learning_starts", "zero or more")
        steps = self.gradient_steps
        self._require(steps == -1 or 0 < steps < math.inf, "gradient_steps", "above 0, or -1")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the rest of a config, and the reverse."""
        self._require(
            self.buffer_size >= run.num_envs, "buffer_size", f"at least num_envs = {run.num_envs}"
        )
        self._require_divisible("buffer_size", run.shards)
        if run.is_offline:
            self._refuse_settings_of_collection()
        if run.dataset is not None and not run.is_offline:
            self._require(self.samples_per_update >= 2, self.samples_setting, "2 or more")
        super().check_run(run)

    def _refuse_settings_of_collection(self) -> None:
        usual = type(self)()
        for name in ("buffer_size", "learning_starts", "train_freq", "gradient_steps"):
            if getattr(self, name) != getattr(usual, name):
                raise ConfigError(
                    f"'algo_kwargs.{name}' has no effect on a run from a dataset alone"
                    " (total_updates): no environment is stepped"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticsConfig(ValueConfig, ActorCriticConfig):
    """Settings of algorithms with a policy and an ensemble of critics."""

    SEARCH: ClassVar[SearchSpace] = {
        "tau": Range(1e-3, 0.05, log=True),
    }

    tau: float = 0.005
    """Interpolation factor of target network updates; 1: copy."""
    num_critics: int = 2
    """Number of critics; targets use their minimum."""
    critic_layer_norm: bool = False
    """Layer normalisation after every hidden layer of the critics (arXiv:2302.02948)."""
    actor_learning_rate: float | None = None
    """Step size of the policy's optimizer; unset: learning_rate. It has the same schedule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.tau <= 1, "tau", "above 0 and at most 1")
        self._require(self.num_critics >= 1, "num_critics", "at least 1")
        rate = self.actor_learning_rate
        if rate is not None:
            self._require(0 < rate < math.inf, "actor_learning_rate", "above 0 and finite")

    @property
    def actor_rate_scale(self) -> float:
        """The policy's learning rate over that of the critics."""
        rate = self.actor_learning_rate
        return 1.0 if rate is None else rate / self.learning_rate


def ensemble_td_loss(q_values: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the sum over critics of half the mean squared TD error; q_values: (critics, batch).

    loss = sum_i mean( (q_i - target)^2 ) / 2

    Along sequences (critics, time, batch), errors where ``mask`` is 0 count as zeros.
    """
    squares = (q_values - targets).square()
    if mask is not None:
        return 0.5 * (squares * mask).mean((-2, -1)).sum()
    return 0.5 * squares.mean(-1).sum()


class ReplayLearner(ABC):
    """Samples batches from a replay and runs ``update`` on each, the unit that is graphed.

    ``update`` gets a batch with the ``noise`` it needs, changes parameters in place and returns
    metrics, which are summed on the device. A part of its work may run only every so many updates:
    `_runs_delayed` returns when.
    """

    noise_shape: tuple[int, ...] | None = None
    """Shape of the normal noise one update takes; None: it takes none."""
    needs_next_actions: bool = False
    """Whether batches must contain the actions that were recorded after their transitions."""
    gradient_steps: tuple[GradientStep, ...] = ()
    """Every gradient step of an update; subclasses set it when they are built."""

    def __init__(
        self,
        module: nn.Module,
        config: ReplayConfig,
        *,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        acceleration: Acceleration = "eager",
        communicator: Communicator = ALONE,
    ) -> None:
        self.module = module
        self.config: Any = config
        self.communicator = communicator
        self.generators = shards_of(generator or [torch.Generator() for _ in communicator.local])
        self.samples = config.samples_per_update // communicator.shards
        """Transitions, or sequences of them, that an update draws from each shard's replay."""
        self.num_updates = 0
        self._device = next(module.parameters()).device
        self.metrics = MetricSums(self._device)
        self._prioritized = config.prioritization() is not None
        # A graph takes its inputs from the host by itself.
        is_graph = acceleration == "cudagraph" and communicator.is_local
        self._moves_batches = self._device.type != "cpu" and not is_graph
        self._acceleration: Acceleration = acceleration
        self._replays: Sequence[Any] = ()
        self._places: list[int | None] = []
        """Memory that the updates gather their batches from; None: batches are their input."""
        self._run = self._updates()

    def _updates(self) -> dict[bool, Callable[..., Any]]:
        """Return the updates without and with the delayed part, captured where that is possible."""
        return {
            delayed: graphed_update(
                functools.partial(self._update, delayed),
                self._acceleration,
                self._device,
                self.communicator,
            )
            for delayed in (False, True)
        }

    def draw_on_device(self) -> None:
        """Draw random numbers on the device of the networks, from the same seeds."""
        self.generators = [
            torch.Generator(self._device).manual_seed(one.initial_seed()) for one in self.generators
        ]

    def learn(
        self,
        experience: ReplayBuffer | Sequence[ReplayBuffer],
        progress: Progress,
        stop: StopRequest = never,
        *,
        updates: int = 1,
    ) -> int:
        """Take ``updates`` steps, or fewer where ``stop`` requests it; return how many.

        ``experience`` is the replay of each shard that this process executes. Nothing is
        transferred from the device.
        """
        replays: Sequence[ReplayBuffer] = shards_of(experience)
        for step in self.gradient_steps:
            step.check_placement()
        set_learning_rates(self.config, progress, *self.gradient_steps)
        beta = self._beta(progress)
        for done in range(updates):
            if stop():
                return done
            batches = self._draw_batches(replays, beta)
            cells = [batch.pop("cells", None) for batch in batches]
            if self.noise_shape is not None:
                for batch, generator in zip(batches, self.generators, strict=True):
                    batch["noise"] = torch.randn(
                        self.noise_shape, generator=generator, device=generator.device
                    )
            self._gather_from(replays)
            if self._moves_batches:
                batches = pytree.tree_map(lambda leaf: leaf.to(self._device), batches)
            self.num_updates += 1
            td_errors = self._run[self._runs_delayed()](*batches)
            self.metrics.updates += 1
            if self._prioritized:
                for replay, drawn, errors in zip(replays, cells, td_errors, strict=True):
                    replay.update_priorities(drawn, errors)
        self._replays = ()  # so that it is freed with the trainer
        return updates

    def _draw_batches(self, replays: Sequence[ReplayBuffer], beta: float) -> list[dict[str, Any]]:
        """Return a batch of each replay; importance weights are at most 1 over all of them."""
        pairs = list(zip(replays, self.generators, strict=True))
        if not self._prioritized or self.communicator.alone:
            return [replay.sample(self.samples, one, beta=beta) for replay, one in pairs]
        draws = [replay.draw(self.samples, generator) for replay, generator in pairs]
        smallest = torch.tensor([draw.smallest for draw in draws], dtype=torch.float64)
        least = float(self.communicator.gather(smallest).min())
        return [
            replay.batch(draw, least, beta) for replay, draw in zip(replays, draws, strict=True)
        ]

    def _gather_from(self, replays: Sequence[Any]) -> None:
        """Capture updates again if the memory that they gather from is another."""
        self._replays = replays
        places = [getattr(replay, "place", None) for replay in replays]
        if any(one != other for one, other in zip_longest(places, self._places)):
            self._places = places
            self._run = self._updates()

    def _update(self, delayed: bool, *drawn: dict[str, Any]) -> Any:
        batches = [
            {**replay.gather(batch.pop("recipe")), **batch} if "recipe" in batch else batch
            for batch, replay in zip(map(dict, drawn), self._replays, strict=True)
        ]
        metrics = self.update(*batches, delayed=delayed)
        td_errors = metrics.pop("td_errors", None)
        self.metrics.add(metrics)
        return td_errors

    def pop_metrics(self) -> dict[str, float]:
        """Return means over the updates since the last call, as ``losses/NAME``.

        One transfer from the device; empty where no update was made.
        """
        return self.metrics.pop("losses")

    def metric_sums(self) -> dict[str, Any]:
        """Return the sums since the last `pop_metrics`, for a checkpoint between two reports."""
        return self.metrics.state_dict()

    def load_metric_sums(self, state: Mapping[str, Any]) -> None:
        """Restore those sums."""
        self.metrics.load_state_dict(state)

    @abstractmethod
    def update(self, *batches: Mapping[str, Any], delayed: bool) -> dict[str, Any]:
        """Take one update on a batch of each shard, with its delayed part or without it.

        Returns metrics, and ``td_errors`` of each batch's rows where priorities need them.
        """

    def _runs_delayed(self) -> bool:
        """Return whether update number ``num_updates`` includes the delayed part."""
        return False

    def _beta(self, progress: Progress) -> float:
        """Return how much of the bias of prioritised sampling is corrected, 0 to 1."""
        del progress
        return 1.0

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from the weights of another run; target networks become equal to them."""
        self.module.load_state_dict(weights)
        self.sync_targets()

    @abstractmethod
    def sync_targets(self) -> None:
        """Make the target networks equal to the networks."""

    def state_dict(self) -> dict[str, Any]:
        """Return weights, random state and the number of updates."""
        return {
            "model": self.module.state_dict(),
            "replay_rng": generator_states(self.generators, self.communicator),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.module.load_state_dict(state["model"])
        load_generator_states(self.generators, state["replay_rng"], self.communicator)
        self.num_updates = int(state["num_updates"])
