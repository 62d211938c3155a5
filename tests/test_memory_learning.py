"""A passive corridor: a cue at the start, then nothing, and a last action that must match it."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import MakeConfig
from rl_training.experiment.manager import ExperimentManager

ROLLOUT: dict[str, Any] = {"num_minibatches": 1, "learning_rate": 3e-3, "lstm_size": 32}
REPLAY: dict[str, Any] = {
    "learning_starts": 2000,
    "train_freq": 16,
    "batch_sequences": 32,
    "buffer_size": 50_000,
    "burn_in": 0,
    "lstm_size": 32,
    "learning_rate": 2e-3,
}
KNOBS: dict[str, dict[str, Any]] = {
    "ppo": ROLLOUT,
    "a2c": {"learning_rate": 2e-3, "lstm_size": 32, "ent_coef": 0.01, "norm_adv": True},
    "ppg": {**ROLLOUT, "policy_phases": 8, "num_aux_minibatches": 4, "aux_epochs": 2},
    "dqn": REPLAY,
    "sac": {**REPLAY, "hidden_sizes": [32], "tau": 0.02, "ent_coef": 0.02},
    "td3": {**REPLAY, "hidden_sizes": [32], "tau": 0.02, "exploration_noise": 0.3},
}
