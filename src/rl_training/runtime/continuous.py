"""The actors of policies for continuous actions, and of those that learn from a dataset."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.runtime.actors import Actor, EvaluationActor, ExploringActor
from rl_training.runtime.device_actors import DeviceActor, ExploringDeviceActor
from rl_training.seeding import shard_key, torch_stream


def exploring_actor(
    algorithm: Any, config: TrainConfig[Any], device: torch.device, shard: int = 0
) -> Actor:
    """Return an actor: uniform actions until ``learning_starts``, then the policy with noise."""
    return ExploringActor(
        algorithm.model.actor,
        config.algo_kwargs.learning_starts,
        torch_stream(config.seed, "exploration", *shard_key(shard)),
        device,
        config.acceleration,
    )


def exploring_device_actor(algorithm: Any, config: TrainConfig[Any]) -> DeviceActor:
    """Return `exploring_actor` for environments on the device."""
    return ExploringDeviceActor(algorithm.model.actor, config.algo_kwargs.learning_starts)


def no_actor(algorithm: Any, config: TrainConfig[Any], device: torch.device) -> Actor:
    """Refuse to act: the algorithm learns from a dataset alone."""
    del algorithm, device
    raise ConfigError(f"{config.algo} learns from a dataset alone and does not explore")


def eval_actor(algorithm: Any, device: torch.device, sampling: torch.Generator | None) -> Actor:
    """Return the actor of evaluation: without noise, or with noise of the given generator."""
    return EvaluationActor(algorithm.model.actor, device, sampling)
