"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347).

`PPO.learn` is the whole learning phase. What on-policy learners share is in `OnPolicyLearner`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from rl_training._internal.coerce import require
from rl_training.algorithms.acceleration import Acceleration, accelerate, graphed, graphed_update
from rl_training.algorithms.advantages import combine_minibatches
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.masking import masked_mean
from rl_training.algorithms.memory_config import MemoryConfig
from rl_training.algorithms.metrics import MetricSums, explained_variance
from rl_training.algorithms.network_config import ActorCriticConfig
from rl_training.algorithms.rollout_config import RolloutConfig, check_minibatches
from rl_training.algorithms.schedules import Schedule, set_learning_rates
from rl_training.communicator import (
    ALONE,
    Communicator,
    generator_states,
    load_generator_states,
    shards_of,
)
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import Paused
from rl_training.models.mlp_actor_critic import Evaluation
from rl_training.search_space import Choice, Range, SearchSpace
from rl_training.types import Progress, Rows, RunSettings, StopRequest, envs_of_shard, never, until


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(ActorCriticConfig, RolloutConfig):
    """Settings of every algorithm that learns a policy from one rollout at a time."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_steps": Choice((16, 32, 64, 128, 256, 512)),
        "gamma": Choice((0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
        "gae_lambda": Choice((0.8, 0.9, 0.95, 0.98, 1.0)),
        "ent_coef": Range(1e-6, 0.1, log=True),
        "max_grad_norm": Choice((0.3, 0.5, 1.0, 2.0, 5.0)),
        "normalize_obs": Choice((False, True)),
    }

    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation."""
    norm_adv: bool = True
    """Standardise advantages within each minibatch."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss, which is half the mean squared error."""
    optimizer_eps: float = 1e-5
    """Epsilon of the optimizer."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers, of policy and value each; unset: 64 64, none after images."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Box actions (in units of half the range)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.gae_lambda <= 1, "gae_lambda", "between 0 and 1")
        for name in ("ent_coef", "vf_coef"):
            self._require(0 <= getattr(self, name) < math.inf, name, "zero or more, and finite")
        self._require(math.isfinite(self.log_std_init), "log_std_init", "finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutMemoryConfig(OnPolicyConfig, MemoryConfig):
    """Settings of algorithms whose policy and value function may be recurrent."""

    shared_lstm: bool = False
    """One LSTM or GRU for policy and value function, instead of one each."""
    sequence_length: int = 32
    """Steps that gradients flow back through, with memory; a divisor of num_steps."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers, of policy and value each; unset: 64 64, with memory 64 after it;
    none after images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.sequence_length >= 1, "sequence_length", "at least 1")
        divides = not self.has_memory or self.num_steps % self.sequence_length == 0
        self._require(divides, "sequence_length", f"a divisor of num_steps = {self.num_steps}")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the rest of a config."""
        super().check_run(run)
        self.check_acceleration(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(RolloutMemoryConfig):
    """PPO's settings, named as in CleanRL where it has the same setting."""

    SEARCH: ClassVar[SearchSpace] = {
        "num_minibatches": Choice((1, 2, 4, 8, 16)),
        "update_epochs": Choice((1, 4, 10, 20)),
        "clip_coef": Range(0.1, 0.4),
    }

    learning_rate: float = 2.5e-4
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    lr_schedule: Schedule | None = None
    """'constant', or 'linear' or 'cosine' decay to 0; unset: linear if anneal_lr, else constant."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over the run, where lr_schedule is unset."""
    num_minibatches: int = 4
    """Minibatches a rollout is split into."""
    update_epochs: int = 4
    """Epochs per rollout."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio: [1 - clip_coef, 1 + clip_coef]."""
    anneal_clip: bool = False
    """Lower clip_coef linearly to zero over the run."""
    clip_vloss: bool = False
    """Clip the value function's change by clip_coef too."""
    target_kl: float | None = None
    """Stop a rollout's update epochs when the mean approximate KL exceeds this; unset: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_minibatches", "update_epochs"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.clip_coef > 0, "clip_coef", "above 0")
        if self.target_kl is not None:
            self._require(self.target_kl > 0, "target_kl", "above 0")

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        super().check_run(run)
        if self.has_memory:
            check_sequences(run, self.num_steps, self.sequence_length, self.num_minibatches)
            return
        rows = check_minibatches(run, self.num_steps, self.num_minibatches)
        require(rows > self.num_minibatches, "algo_kwargs.num_minibatches", f"below {rows}", rows)


def check_sequences(
    run: RunSettings, num_steps: int, sequence_length: int, num_minibatches: int
) -> None:
    """Refuse a number of minibatches that does not divide the sequences of a shard's rollout."""
    num_envs, name = envs_of_shard(run)
    sequences = num_envs * (num_steps // sequence_length)
    require(
        sequences % num_minibatches == 0,
        "algo_kwargs.num_minibatches",
        f"a divisor of the rollout's sequences, {name} * num_steps /"
        f" sequence_length = {num_envs} * {num_steps} / {sequence_length} ="
        f" {sequences}",
        num_minibatches,
    )
    steps = num_envs * num_steps
    several = steps > num_minibatches
    require(several, "algo_kwargs.num_minibatches", f"below {steps}", num_minibatches)


def ppo_loss(
    minibatch: Mapping[str, Any],
    *,
    clip_coef: float | Tensor,
    ent_coef: float,
    vf_coef: float,
    clip_vloss: bool = False,
) -> dict[str, Tensor]:
    """The clipped surrogate, value and entropy losses of a minibatch.

    With ratio r = exp(logprobs - old_logprobs), advantage A and clip c:

        policy_loss  = mean( max(-A r, -A clamp(r, 1 - c, 1 + c)) )
        value_loss   = mean( (new_values - returns)^2 ) / 2
        entropy_loss = mean( entropy )
        loss         = policy_loss + vf_coef value_loss - ent_coef entropy_loss

    Rows are weighted by ``mask`` where there is one. ``approx_kl`` is the low-variance estimator
    (r - 1) - log r of http://joschu.net/blog/kl-approx.html.
    """
    mask = minibatch.get("mask")

    def mean(x: Tensor) -> Tensor:
        return masked_mean(x, mask)

    log_ratio = minibatch["logprobs"] - minibatch["old_logprobs"]
    ratio = log_ratio.exp()
    advantages = minibatch["advantages"]
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = -mean(torch.min(advantages * ratio, advantages * clipped))

    new_values, returns = minibatch["new_values"], minibatch["returns"]
    squared = (new_values - returns).square()
    if clip_vloss:
        old = minibatch["values"]
        near = old + (new_values - old).clamp(-clip_coef, clip_coef)
        squared = torch.max(squared, (near - returns).square())
    value_loss = 0.5 * mean(squared)

    entropy_loss = mean(minibatch["entropy"])
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)
        clip_fraction = mean(((ratio - 1).abs() > clip_coef).to(ratio.dtype))
    return {
        "loss": policy_loss + vf_coef * value_loss - ent_coef * entropy_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": entropy_loss,
        "approx_kl": approx_kl,
        "clip_fraction": clip_fraction,
    }


class ActorCritic(Protocol):
    """What these learners need of a model."""

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """Return log-probability, entropy and value of each row."""
        ...

    def value(self, obs: Any) -> Tensor:
        """Return the value of each observation."""
        ...

    def update_normalizer(self, *rows: Rows, communicator: Communicator) -> None:
        """Update the statistics of observations with the rows of each shard's rollout."""
        ...


class OnPolicyLearner(ABC):
    """Learns from one rollout at a time. Subclasses provide `loss` and `learn` (see `Learner`).

    A rollout is one buffer per shard that this process executes; ``generator`` is one per shard
    too. A single one of either is that of the only shard.
    """

    def __init__(
        self,
        model: Any,
        config: RolloutConfig,
        *,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        acceleration: Acceleration = "eager",
        communicator: Communicator = ALONE,
    ) -> None:
        self.model: ActorCritic = model
        self.module: nn.Module = model
        self.config: Any = config
        self.communicator = communicator
        self.generators = shards_of(generator or [torch.Generator() for _ in communicator.local])
        self.step = GradientStep(
            self.module,
            self.loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            optimizer=config.optimizer_spec(),
            acceleration=acceleration,
            communicator=communicator,
        )
        device = self.step.flat.device
        self.metrics = MetricSums(device)
        self._acceleration: Acceleration = acceleration
        self._run_update = graphed_update(self._update, acceleration, device, communicator)
        self._rollouts: Sequence[RolloutBuffer] = ()
        """What is learnt from; of environments on the device it has the same memory every time."""
        self._evaluate_all: Callable[[], None] = self._evaluate_rollouts
        self.learns_whole = False
        """Whether whole epochs are one function, which cannot be paused in between."""
        self._evaluate = accelerate(self.rollout_evaluation(), acceleration)
        self._phase: dict[str, float | Tensor] = {}
        """Metrics of the last learning phase that are no means over updates."""

    @abstractmethod
    def loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the loss of the current model on stored data, with its metrics."""

    def rollout_evaluation(self) -> Callable[[Mapping[str, Any]], Any]:
        """Return the function that evaluates a whole rollout before it is learnt from."""
        return self.model.evaluate

    def update(self, *minibatches: Mapping[str, Any]) -> dict[str, Tensor]:
        """Take one gradient step on a minibatch of each shard.

        The metrics returned may be overwritten by the next one.
        """
        metrics = self._run_update(*minibatches)
        self.metrics.updates += 1
        return metrics

    def _update(self, *minibatches: Mapping[str, Any]) -> dict[str, Tensor]:
        metrics = self.step(*minibatches)
        self.metrics.add(metrics)
        return metrics

    def epoch(
        self, rollouts: Sequence[RolloutBuffer], num_minibatches: int
    ) -> Iterator[tuple[dict[str, Any], ...]]:
        """Yield one epoch in random order: minibatch by minibatch, those of each shard."""
        shards = [
            list(rollout.iter_minibatches(num_minibatches, generator=generator))
            for rollout, generator in zip(rollouts, self.generators, strict=True)
        ]
        return combine_minibatches(shards, self.communicator, norm_adv=self.config.norm_adv)

    def draw_on_device(self) -> None:
        """Draw the order of minibatches on the device of the networks, from the same seeds.

        Rollouts are then on it, too, in the same memory every time: what precedes the epochs and
        the epochs themselves are captured with ``acceleration: cudagraph``.
        """
        device, mode = self.step.flat.device, self._acceleration
        self.generators = [
            torch.Generator(device).manual_seed(one.initial_seed()) for one in self.generators
        ]
        self._evaluate_all = graphed(self._evaluate_rollouts, mode, device, copies=False)
        self.learns_whole = mode == "cudagraph"

    def evaluated(self, minibatch: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored data with what the current model computes for it, as losses take it."""
        now = self.model.evaluate(minibatch)
        return {
            **minibatch,
            "logprobs": now.logprob,
            "entropy": now.entropy,
            "new_values": now.value,
        }

    def prepare(self, experience: Any, progress: Progress) -> Sequence[RolloutBuffer]:
        """Set the learning rate; evaluate the rollouts of the shards, which are returned."""
        self.step.check_placement()
        set_learning_rates(self.config, progress, self.step)
        rollouts: Sequence[RolloutBuffer] = shards_of(experience)
        self._rollouts = rollouts
        self._evaluate_all()
        return rollouts

    def _evaluate_rollouts(self) -> None:
        for rollout in self._rollouts:
            self._evaluate_rollout(rollout)

    @torch.no_grad()
    def _evaluate_rollout(self, rollout: RolloutBuffer) -> None:
        """Compute values, log-probabilities and advantages of a rollout.

        For vectors values and log-probabilities are not needed to choose an action, so they are
        computed here in one batch. A network that sees images computes them when it acts.
        """
        if not {"logprobs", "values"} <= rollout.recorded:
            behaviour = self._evaluate(rollout.whole())
            rollout.keep_evaluation(behaviour.logprob, behaviour.value)
        rollout.fill_bootstrap(self.model.value)
        rollout.compute_returns_and_advantages(
            last_value=self._last_value(rollout),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )

    def _last_value(self, rollout: RolloutBuffer) -> Tensor:
        """Return the value of the observation after the last step."""
        return self.model.value(rollout.next_inputs()).reshape(-1).to(rollout.values)

    def finish(self, experience: Any, **metrics: float | Tensor) -> None:
        """Update the observation statistics and record metrics of the whole learning phase."""
        rollouts: Sequence[RolloutBuffer] = shards_of(experience)
        self._rollouts = ()  # so that they are freed with the trainer
        batches, rows = [one.flat() for one in rollouts], [one.rows() for one in rollouts]
        self.model.update_normalizer(*rows, communicator=self.communicator)
        self._phase = {
            "explained_variance": explained_variance(batches, self.communicator),
            **metrics,
            "learning_rate": self.step.learning_rate,
        }

    def pop_metrics(self) -> dict[str, float]:
        """Return means over the updates since the last call, in one transfer from the device."""
        return self.metrics.pop("losses", **self._phase)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from the weights of another run."""
        self.module.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer and random state; schedules are functions of progress."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.step.state_dict(),
            "minibatch_rng": generator_states(self.generators, self.communicator),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.module.load_state_dict(state["model"])
        self.step.load_state_dict(state["optimizer"])
        load_generator_states(self.generators, state["minibatch_rng"], self.communicator)
        self.metrics.reset()


class PPO(OnPolicyLearner):
    """Several epochs of minibatches per rollout, with the probability ratio clipped."""

    objective = staticmethod(ppo_loss)

    def __init__(
        self,
        model: Any,
        config: PPOConfig,
        *,
        acceleration: Acceleration = "eager",
        **shards: Any,
    ) -> None:
        super().__init__(model, config, acceleration=acceleration, **shards)
        self._run_epochs: Callable[[Tensor], Tensor] = self._epochs
        self._no_kl = torch.zeros(())
        # As a tensor only where a changing float would make the compiler start over.
        self._clip_coef: float | Tensor = config.clip_coef
        if acceleration != "eager":
            self._clip_coef = torch.tensor(config.clip_coef, device=self.step.flat.device)

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
        self._anneal_clip(progress)
        epochs = 0
        make = self._make_whole if self.learns_whole else self._make_epoch
        while epochs < config.update_epochs:
            made, mean_kl = make(stop)
            epochs += made
            if config.target_kl is not None and float(mean_kl) > config.target_kl:
                break
        self.finish(rollouts, epochs=float(epochs))
        return int(epochs * config.num_minibatches)

    def draw_on_device(self) -> None:
        """Draw the order of minibatches on the device; capture whole epochs where graphs are."""
        super().draw_on_device()
        device = self.step.flat.device
        self._run_epochs = graphed(self._epochs, self._acceleration, device, copies=False)

    def _make_epoch(self, stop: StopRequest) -> tuple[int, Tensor]:
        """Make one epoch; return 1, and the mean of the approximate KL where it is a target."""
        config, estimates = self.config, []
        for minibatches in until(stop, self.epoch(self._rollouts, config.num_minibatches)):
            metrics = self.update(*minibatches)
            if config.target_kl is not None:
                estimates.append(metrics["approx_kl"].clone())
        return 1, torch.stack(estimates).mean() if estimates else self._no_kl

    def _make_whole(self, stop: StopRequest) -> tuple[int, Tensor]:
        """Make all epochs in one call, or one where the KL is a target; return what it returns."""
        if stop():
            raise Paused
        config, (rollout,), (generator,) = self.config, self._rollouts, self.generators
        count = config.update_epochs if config.target_kl is None else 1
        orders = [rollout.draw_order(generator) for _ in range(count)]
        mean_kl = self._run_epochs(torch.stack(orders))
        self.metrics.updates += count * config.num_minibatches
        return count, mean_kl

    def _epochs(self, orders: Tensor) -> Tensor:
        """Make an epoch in each of the given orders, changing nothing on the host."""
        config, (rollout,) = self.config, self._rollouts
        estimates = []
        for order in orders.unbind():
            shards = [list(rollout.minibatches_in(order, config.num_minibatches))]
            combined = combine_minibatches(shards, self.communicator, norm_adv=config.norm_adv)
            estimates += [self._update(*one)["approx_kl"].clone() for one in combined]
        return torch.stack(estimates).mean()

    def loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `ppo_loss` of the current model on stored data."""
        return self.objective(
            self.evaluated(minibatch),
            clip_coef=self._clip_coef,
            ent_coef=self.config.ent_coef,
            vf_coef=self.config.vf_coef,
            clip_vloss=self.config.clip_vloss,
        )

    def _anneal_clip(self, progress: Progress) -> None:
        if not self.config.anneal_clip:
            return
        # A clip of exactly 0 would make every gradient zero but for the value's.
        clip = max(self.config.clip_coef * (1.0 - progress.fraction), 1e-6)
        if isinstance(self._clip_coef, Tensor):
            self._clip_coef.fill_(clip)
        else:
            self._clip_coef = clip
