"""`AlgorithmSpec`: how the runtime builds and runs an algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_training.communicator import ALONE, Communicator
from rl_training.runtime.device_actors import DeviceActor, PolicyDeviceActor
from rl_training.runtime.policy import TrainedPolicy
from rl_training.seeding import shard_streams

if TYPE_CHECKING:
    import torch

    from rl_training.config import TrainConfig
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.sources import LocalSource
    from rl_training.runtime.trainer import Trainer


def learner_arguments(
    config: TrainConfig[Any], communicator: Communicator = ALONE, stream: str = "replay"
) -> dict[str, Any]:
    """Return the arguments of every learner: random streams of the local shards by name."""
    return {
        "generator": shard_streams(config.seed, stream, communicator.local),
        "acceleration": config.acceleration,
        "communicator": communicator,
    }


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
    """The functions and classes that build, train and evaluate an algorithm."""

    name: str
    config: type[Any]
    build: Callable[..., Any]
    """Returns the learner (`Learner`), given config, `ObsSpec`, `ActionSpec` and device.

    Of an entry that declares "torchrun" it also takes the `Communicator`.
    """
    actor: Callable[..., Actor]
    """Returns the exploring actor of training, given learner, config and device.

    Of an entry that declares "torchrun" it also takes the shard that acts.
    """
    eval_actor: Callable[[Any, torch.device, torch.Generator | None], Actor]
    """Returns the actor of evaluation: greedy, or sampling with the given generator."""
    trainer: type[Trainer]
    policy: Callable[..., TrainedPolicy] = TrainedPolicy
    """The class of trained policies, or a function that makes one."""
    records: frozenset[str] = frozenset()
    """What the actor records with each step: "logprobs" and "values" of the behaviour policy.

    A learner needs them if the behaviour policy may be older than its weights. PPO does not: its
    weights are still those that acted, so it computes both in one batch.
    """
    device_actor: Callable[[Any, TrainConfig[Any]], DeviceActor] = PolicyDeviceActor.of
    """Returns the exploring actor of environments on the device, given learner and config.

    Of an entry that declares ``device_envs``.
    """
    with_memory: AlgorithmSpec | None = None
    """What runs with memory are built by, where the config has a setting ``memory``; unset: the
    same spec builds all runs."""
    source: Callable[..., LocalSource] | None = None
    """Returns the source of a shard, given learner, config, device and the arguments of
    `local_source`; unset: `local_source`."""
