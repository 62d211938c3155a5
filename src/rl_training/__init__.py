"""Reinforcement learning that is fast, readable and exactly resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports
from rl_training.registry import class_exports, train_exports
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig as TrainConfig
    from rl_training.envs.factory import make_env as make_env
    from rl_training.envs.factory import make_vector_env as make_vector_env
    from rl_training.runtime.trainer import TrainResult as TrainResult
    from rl_training.surface import *  # noqa: F403

_EXPORTS = {
    "TrainConfig": "rl_training.config:TrainConfig",
    "TrainResult": "rl_training.runtime.trainer:TrainResult",
    "make_env": "rl_training.envs.factory:make_env",
    "make_vector_env": "rl_training.envs.factory:make_vector_env",
    **class_exports(),
    **train_exports(),
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, {**_EXPORTS, "__version__": ""})
