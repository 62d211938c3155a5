"""The managed classes of contrib."""

from __future__ import annotations

from rl_training.api.recurrent import RecurrentAlgorithm


class RecurrentPPO(RecurrentAlgorithm):
    """PPO with memory: ``RecurrentPPO(TrainConfig(algo="recurrent_ppo", ...)).learn()``."""

    algo = "recurrent_ppo"
