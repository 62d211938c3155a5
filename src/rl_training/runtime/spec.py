"""`AlgorithmSpec`: all that the runtime needs of an algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rl_training.models.encoders import EncoderConfig
from rl_training.plugins import named_class
from rl_training.runtime.policy import TrainedPolicy
from rl_training.types import ActionSpec, ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
    """How an algorithm is built, acts and is trained."""

    name: str
    config: type[Any]
    build: Callable[[TrainConfig[Any], ObsSpec, ActionSpec, torch.device], Any]
    """Returns the learner (`Learner`); the only way in which one is made."""
    actor: Callable[[Any, TrainConfig[Any], torch.device], Actor]
    """The exploring actor of training."""
    eval_actor: Callable[[Any, torch.device, torch.Generator | None], Actor]
    """The greedy actor, or a sampling one with the generator given."""
    trainer: type[Trainer]
    policy: type[TrainedPolicy] = TrainedPolicy
    """The class of trained policies."""
    records: frozenset[str] = frozenset()
    """What the actor records with each step: "logprobs" and "values" of the policy that acted.

    A learner whose behaviour policy may be older than its own weights needs them. PPO does not: it
    computes them in one batch with the weights that acted, which are still its own.
    """


def encoder_config(config: TrainConfig[Any], *, orthogonal: bool) -> EncoderConfig:
    """How a run's networks see observations."""
    knobs = config.algo_kwargs
    return EncoderConfig(
        custom=(
            None
            if knobs.encoder is None
            else named_class(knobs.encoder, torch.nn.Module, "algo_kwargs.encoder")
        ),
        feature_size=knobs.feature_size,
        orthogonal=orthogonal,
        bfloat16=config.precision == "bfloat16",
    )


def hidden_layers(
    given: tuple[int, ...] | None, obs_spec: ObsSpec, usual: tuple[int, ...]
) -> tuple[int, ...]:
    """Widths of hidden layers: the user's, else the usual ones, and none behind images."""
    if given is not None:
        return given
    return () if obs_spec.has_images else usual
