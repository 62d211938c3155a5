"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rl_training._internal.coerce import check_types, require
from rl_training.algorithms.acceleration import Acceleration, accelerate, graphed
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.masking import masked_mean
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import Paused
from rl_training.models.mlp_actor_critic import Evaluation
from rl_training.types import Progress, Run, StopRequest, never

Minibatch = TypeVar("Minibatch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO's knobs, by CleanRL's names where it has them."""

    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over the run."""
    num_steps: int = 128
    """Steps each environment takes per rollout."""
    num_minibatches: int = 4
    """Minibatches a rollout is split into."""
    update_epochs: int = 4
    """Passes over each rollout."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation."""
    norm_adv: bool = True
    """Standardise advantages within each minibatch."""
    clip_coef: float = 0.2
    """How far the probability ratio may move from 1."""
    anneal_clip: bool = False
    """Lower clip_coef linearly to zero over the run."""
    clip_vloss: bool = False
    """Clip the value function's change by clip_coef too."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to at most this norm."""
    target_kl: float | None = None
    """End a rollout's epochs once the policy has moved this far; unset: never."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers, of policy and value each; unset: 64 64, none after images."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"
    """Activation between layers."""
    log_std_init: float = 0.0
    """Log of the action deviation at the start (Box actions, in units of half the range)."""
    encoder: str | None = None
    """A 'module:Class' taking the ObsSpec, with an output_size; unset: a NatureCNN per image."""
    feature_size: int = 512
    """Numbers that a convolutional network makes of each image."""

    def __post_init__(self) -> None:
        check_types(self, "algo_kwargs")
        for name in ("num_steps", "num_minibatches", "update_epochs"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.learning_rate > 0, "learning_rate", "above 0")
        for name in ("gamma", "gae_lambda"):
            self._require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("clip_coef", "max_grad_norm"):
            self._require(getattr(self, name) > 0, name, "above 0")
        for name in ("ent_coef", "vf_coef"):
            self._require(getattr(self, name) >= 0, name, "zero or more")
        for name in ("learning_rate", "ent_coef", "vf_coef", "log_std_init"):
            self._require(math.isfinite(getattr(self, name)), name, "finite")
        if self.target_kl is not None:
            self._require(self.target_kl > 0, "target_kl", "above 0")
        self._require(self.feature_size >= 1, "feature_size", "at least 1")
        for width in self.hidden_sizes or ():
            self._require(width >= 1, "hidden_sizes", "widths of at least 1")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        require(condition, f"algo_kwargs.{name}", rule, getattr(self, name))

    def check_run(self, run: Run) -> None:
        """Refuse knobs that do not fit the number of environments."""
        num_envs = run.num_envs
        rows = num_envs * self.num_steps
        require(
            rows % self.num_minibatches == 0,
            "algo_kwargs.num_minibatches",
            f"a divisor of the rollout, num_envs * num_steps = {num_envs} * {self.num_steps}"
            f" = {rows}",
            self.num_minibatches,
        )
        require(rows > self.num_minibatches, "algo_kwargs.num_minibatches", f"below {rows}", rows)


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

    Rows weigh as ``mask`` says, where there is one. ``approx_kl`` is the low-variance estimator
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


def normalize_advantages(advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Zero mean and unit deviation over the rows that count."""
    if mask is None:
        return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    count = mask.sum().clamp(min=2.0)
    centred = advantages - (advantages * mask).sum() / count
    deviation = ((centred.square() * mask).sum() / (count - 1)).sqrt()
    return centred / (deviation + 1e-8)


class ActorCritic(Protocol):
    """What PPO needs of a model."""

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """Log-probability, entropy and value of each row."""
        ...

    def value(self, obs: Any) -> Tensor:
        """Value of each observation."""
        ...

    def update_normalizer(self, obs: Any, valid: Tensor) -> None:
        """Take a rollout's observations in, once it has been learnt from."""
        ...


class PPO:
    """PPO's whole learning phase: what happens between one rollout and the next."""

    objective = staticmethod(ppo_loss)

    def __init__(
        self,
        model: Any,
        config: PPOConfig,
        *,
        generator: torch.Generator | None = None,
        acceleration: Acceleration = "eager",
    ) -> None:
        self.model: ActorCritic = model
        self.module: nn.Module = model
        self.config = config
        self.generator = generator if generator is not None else torch.Generator()
        # As a tensor only where a changing float would make the compiler start over.
        device = next(self.module.parameters()).device
        self._clip_coef: float | Tensor = config.clip_coef
        if acceleration != "eager":
            self._clip_coef = torch.tensor(config.clip_coef, device=device)
        self.step = GradientStep(
            self.module,
            self.loss,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            adam_eps=1e-5,
            acceleration=acceleration,
        )
        self.update = graphed(self.step.__call__, acceleration, device)
        """One gradient step on a minibatch: the unit that is compiled or graphed."""
        self._evaluate = accelerate(self.model.evaluate, acceleration)

    def learn(
        self, rollout: RolloutBuffer, progress: Progress, stop: StopRequest = never
    ) -> dict[str, float]:
        """Learn from a rollout; ``progress`` is that of the run when the rollout began.

        Raises `Paused` where ``stop`` requests it; the state before the call must then be restored.
        """
        config = self.config
        self._anneal(progress)
        self.prepare(rollout)
        updates: list[dict[str, Tensor]] = []
        epochs = 0
        for _ in range(config.update_epochs):
            minibatches = rollout.iter_minibatches(config.num_minibatches, generator=self.generator)
            epoch = [self.update(minibatch) for minibatch in until(stop, minibatches)]
            updates += epoch
            epochs += 1
            if config.target_kl is not None and _mean(epoch, "approx_kl") > config.target_kl:
                break
        batch = rollout.flat()
        self.model.update_normalizer(batch["obs"], rollout.valid.flatten())
        metrics = mean_metrics(updates, "losses")
        metrics["losses/explained_variance"] = explained_variance(batch)
        metrics["losses/epochs"] = float(epochs)
        metrics["losses/learning_rate"] = self.step.learning_rate
        return metrics

    @torch.no_grad()
    def prepare(self, rollout: RolloutBuffer) -> None:
        """Values, log-probabilities, bootstraps and advantages of a rollout, in batched passes.

        For vectors nothing of this is needed to choose an action, so collecting does not pay for
        it. The network that sees images is most of the work, and has run by then: there the actor
        says values and log-probabilities as it goes.
        """
        if not rollout.evaluated:
            was = self._evaluate(rollout.whole())
            rollout.keep_evaluation(was.logprob, was.value)
        truncated = rollout.truncated_observations()
        if truncated is not None:
            index, final_obs = truncated
            rollout.bootstrap.view(-1)[index] = self.model.value(final_obs)
        rollout.compute_returns_and_advantages(
            last_value=self.model.value(rollout.standing()),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )

    def loss(self, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        """`ppo_loss` of the current model on stored data."""
        now = self.model.evaluate(minibatch)
        advantages = minibatch["advantages"]
        if self.config.norm_adv:
            advantages = normalize_advantages(advantages, minibatch.get("mask"))
        full = {
            **minibatch,
            "advantages": advantages,
            "logprobs": now.logprob,
            "entropy": now.entropy,
            "new_values": now.value,
        }
        return self.objective(
            full,
            clip_coef=self._clip_coef,
            ent_coef=self.config.ent_coef,
            vf_coef=self.config.vf_coef,
            clip_vloss=self.config.clip_vloss,
        )

    def _anneal(self, progress: Progress) -> None:
        left = 1.0 - progress.fraction
        if self.config.anneal_lr:
            self.step.learning_rate = self.config.learning_rate * left
        if self.config.anneal_clip:
            # A clip of exactly 0 would make every gradient zero but for the value's.
            clip = max(self.config.clip_coef * left, 1e-6)
            if isinstance(self._clip_coef, Tensor):
                self._clip_coef.fill_(clip)
            else:
                self._clip_coef = clip

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from other weights."""
        self.module.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive; schedules are functions of progress and need nothing."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.step.state_dict(),
            "minibatch_rng": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a saved state back."""
        self.module.load_state_dict(state["model"])
        self.step.load_state_dict(state["optimizer"])
        self.generator.set_state(state["minibatch_rng"])


def until(stop: StopRequest, minibatches: Iterable[Minibatch]) -> Iterator[Minibatch]:
    """The minibatches one by one; raises `Paused` before the next one where a stop is requested."""
    for minibatch in minibatches:
        if stop():
            raise Paused
        yield minibatch


def mean_metrics(updates: list[dict[str, Tensor]], group: str) -> dict[str, float]:
    """Metrics averaged over gradient steps, named ``group/metric``."""
    return {f"{group}/{name}": _mean(updates, name) for name in updates[0]}


def _mean(updates: list[dict[str, Tensor]], name: str) -> float:
    return float(torch.stack([update[name] for update in updates]).mean())


def explained_variance(batch: Mapping[str, Any]) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant."""
    returns, values = batch["returns"], batch["values"]
    if "mask" in batch:
        rows = batch["mask"] > 0
        returns, values = returns[rows], values[rows]
    variance = returns.var(correction=0) if returns.numel() else returns.new_zeros(())
    if float(variance) == 0.0:
        return 0.0
    return float(1 - (returns - values).var(correction=0) / variance)
