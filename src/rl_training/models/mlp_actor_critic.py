"""PPO's network: a policy and a value function, two MLPs over one encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rl_training.models.action_heads import NumpyChoice, PolicyHead, make_action_head
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP
from rl_training.models.observing import ObservingModule
from rl_training.types import ActionSpec, ObsSpec


class Evaluation(NamedTuple):
    """What the loss needs of stored actions, one number per row."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor


class FeedForwardActorCritic(ObservingModule, ABC):
    """A policy and a value function without memory; subclasses map features to both."""

    head: PolicyHead
    actor: MLP
    """From features to the parameters of the action distribution."""

    @abstractmethod
    def policy_and_value(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution, and state values, one per row."""

    @abstractmethod
    def value(self, obs: Any) -> Tensor:
        """Return state values, one per row."""

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return parameters of the action distribution, and the action mask."""
        features, mask = self.encode(obs)
        return self.actor(features), mask

    def act(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the actions that ``noise`` selects, their log-probabilities, and values."""
        features, mask = self.encode(obs)
        params, values = self.policy_and_value(features)
        actions = self.head.sample(params, noise, mask)
        logprobs, _ = self.head.logprob_entropy(params, actions, mask)
        return actions, logprobs, values

    def numpy_actor(self) -> NumpyChoice | None:
        """Return acting in NumPy (see `numpy_policy`), where that is possible."""
        return self.numpy_policy(self.actor)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> Evaluation:
        """Return log-probability and entropy of ``actions``, and values, at ``obs``."""
        features, mask = self.encode(obs)
        params, values = self.policy_and_value(features)
        return Evaluation(*self.head.logprob_entropy(params, actions, mask), values)

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """Call `evaluate_actions` with a batch's ``obs`` and ``actions``."""
        return self.evaluate_actions(batch["obs"], batch["actions"])


class MLPActorCritic(FeedForwardActorCritic):
    """Separate policy and value networks over shared features.

    Features of vectors are the vectors themselves, normalised with ``normalize_obs``; those of an
    image come from a `NatureCNN`; ``encoder`` may name the user's own. Without ``hidden_sizes``
    policy and value are linear in the features. Unset, ``critic_hidden_sizes`` are the same.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...] = (64, 64),
        critic_hidden_sizes: tuple[int, ...] | None = None,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = make_action_head(action_spec, log_std_init)
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        features = self.num_features
        self.actor = MLP((features, *hidden_sizes, head.param_size), activation, 0.01)
        critic_sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = MLP((features, *critic_sizes, 1), activation, 1.0)

    def policy_and_value(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution, and state values, one per row."""
        return self.actor(features), self.critic(features).squeeze(-1)

    def value(self, obs: Any) -> Tensor:
        """Return state values, one per row."""
        features, _ = self.encode(obs)
        return self.critic(features).squeeze(-1)  # type: ignore[no-any-return]
