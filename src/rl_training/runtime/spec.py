"""`AlgorithmSpec`: all the runtime knows of an algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_training._lazy import resolve
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.trainer import Trainer


class Algorithm(Protocol):
    """What every algorithm can do, whatever its family."""

    module: torch.nn.Module
    """The networks; their weights are the policy."""

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from other weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a saved state back."""
        ...


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
    """How an algorithm is built, acts and is trained. `build` is the only construction path."""

    name: str
    config: type[Any]
    build: Callable[[TrainConfig[Any], ObsSpec, ActionSpec, torch.device], Any]
    actor: Callable[[Any, TrainConfig[Any], torch.device], Actor]
    """The exploring actor of training."""
    eval_actor: Callable[[Any, torch.device, torch.Generator | None], Actor]
    """The greedy actor, or a sampling one with the generator given."""
    trainer: type[Trainer]


def find_encoder(path: str | None) -> type[torch.nn.Module] | None:
    """The user's encoder class, named as 'module:Class'."""
    if path is None:
        return None
    try:
        found: type[torch.nn.Module] = resolve(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"'algo_kwargs.encoder': cannot find {path!r} ({error})") from None
    return found
