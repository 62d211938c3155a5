"""`ExperimentManager`: a trainer ready to train, from a config or from a checkpoint."""

from rl_training.runtime.assembly import build_algorithm, load_weights
from rl_training.runtime.resuming import Horizon, Replay
from rl_training.runtime.setup import ExperimentManager, train_as

__all__ = [
    "ExperimentManager",
    "Horizon",
    "Replay",
    "build_algorithm",
    "load_weights",
    "train_as",
]
