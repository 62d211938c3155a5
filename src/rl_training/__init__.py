"""Reinforcement learning that is fast, readable and exactly resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports
from rl_training.registry import class_exports, train_exports
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig as TrainConfig
    from rl_training.config import config_from_file as config_from_file
    from rl_training.envs.check_env import check_env as check_env
    from rl_training.envs.factory import make_env as make_env
    from rl_training.envs.factory import make_vector_env as make_vector_env
    from rl_training.runtime.callbacks import Callback as Callback
    from rl_training.runtime.callbacks import StopOnReturn as StopOnReturn
    from rl_training.runtime.trainer import TrainResult as TrainResult
    from rl_training.runtime.workflows import evaluate_checkpoint as evaluate_checkpoint
    from rl_training.runtime.workflows import load_policy as load_policy
    from rl_training.runtime.workflows import resume_training as resume_training
    from rl_training.surface import *  # noqa: F403
    from rl_training.tools.tune.api import TuneResult as TuneResult
    from rl_training.tools.tune.api import tune as tune

_EXPORTS = {
    "Callback": "rl_training.runtime.callbacks:Callback",
    "StopOnReturn": "rl_training.runtime.callbacks:StopOnReturn",
    "TrainConfig": "rl_training.config:TrainConfig",
    "TrainResult": "rl_training.runtime.trainer:TrainResult",
    "check_env": "rl_training.envs.check_env:check_env",
    "config_from_file": "rl_training.config:config_from_file",
    "evaluate_checkpoint": "rl_training.runtime.workflows:evaluate_checkpoint",
    "load_policy": "rl_training.runtime.workflows:load_policy",
    "make_env": "rl_training.envs.factory:make_env",
    "make_vector_env": "rl_training.envs.factory:make_vector_env",
    "resume_training": "rl_training.runtime.workflows:resume_training",
    "TuneResult": "rl_training.tools.tune.api:TuneResult",
    "tune": "rl_training.tools.tune.api:tune",
    **class_exports(),
    **train_exports(),
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, {**_EXPORTS, "__version__": ""})
