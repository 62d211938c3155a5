"""`ExperimentManager`: a trainer ready to train, from a config or from a checkpoint."""

from rl_training.runtime.setup import (
    ExperimentManager,
    Horizon,
    Replay,
    build_algorithm,
    load_weights,
    train_as,
)

__all__ = [
    "ExperimentManager",
    "Horizon",
    "Replay",
    "build_algorithm",
    "load_weights",
    "train_as",
]
