"""The actors of policies for continuous actions, and of those that learn from a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.models.recurrent.continuous import ActingMemories
from rl_training.runtime.actors import Actor, EvaluationActor, ExploringActor
from rl_training.runtime.device_actors import DeviceActor, ExploringDeviceActor
from rl_training.runtime.policy import RecurrentTrainedPolicy
from rl_training.runtime.recurrent_actors import RecurrentEvaluationActor, RecurrentExploringActor
from rl_training.runtime.sequence_replay import SequenceReplayTrainer
from rl_training.runtime.spec import AlgorithmSpec
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


def recurrent_exploring_actor(
    algorithm: Any, config: TrainConfig[Any], device: torch.device, shard: int = 0
) -> Actor:
    """Return an `exploring_actor` with the memories of policy and critics."""
    return RecurrentExploringActor(
        ActingMemories(algorithm.model.actor, algorithm.model.critics),
        config.algo_kwargs.learning_starts,
        torch_stream(config.seed, "exploration", *shard_key(shard)),
        device,
    )


def recurrent_eval_actor(
    algorithm: Any, device: torch.device, sampling: torch.Generator | None
) -> Actor:
    """Return the actor that evaluates a recurrent policy; it needs no memory of the critics."""
    return RecurrentEvaluationActor(algorithm.model.actor, device, sampling)


def recurrent_spec(spec: AlgorithmSpec, build: Callable[..., Any]) -> AlgorithmSpec:
    """Return the spec of runs with memory, whose learner ``build`` makes."""
    return dataclasses.replace(
        spec,
        build=build,
        actor=recurrent_exploring_actor,
        eval_actor=recurrent_eval_actor,
        trainer=SequenceReplayTrainer,
        policy=RecurrentTrainedPolicy,
    )
