"""`AlgorithmSpec`: how the runtime builds and runs an algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rl_training.runtime.policy import TrainedPolicy
from rl_training.types import ActionSpec, ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
    """The functions and classes that build, train and evaluate an algorithm."""

    name: str
    config: type[Any]
    build: Callable[[TrainConfig[Any], ObsSpec, ActionSpec, torch.device], Any]
    """Returns the learner (`Learner`)."""
    actor: Callable[[Any, TrainConfig[Any], torch.device], Actor]
    """Returns the exploring actor of training."""
    eval_actor: Callable[[Any, torch.device, torch.Generator | None], Actor]
    """Returns the actor of evaluation: greedy, or sampling with the given generator."""
    trainer: type[Trainer]
    policy: type[TrainedPolicy] = TrainedPolicy
    """The class of trained policies."""
    records: frozenset[str] = frozenset()
    """What the actor records with each step: "logprobs" and "values" of the behaviour policy.

    A learner needs them if the behaviour policy may be older than its weights. PPO does not: its
    weights are still those that acted, so it computes both in one batch.
    """
