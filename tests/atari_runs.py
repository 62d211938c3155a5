"""What the tests of training on Atari share: short runs, and what a checkpoint must do."""

from __future__ import annotations

from typing import Any

import numpy as np

from conftest import MakeConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.trainer import TrainResult
from rl_training.runtime.workflows import evaluate_checkpoint, load_policy, resume_training

_SHARED: dict[str, Any] = {
    "env_id": "ALE/Breakout-v5",
    "preprocessing": "atari",
    "total_timesteps": 128,
    "eval_interval": 64,
    # Games of 40 steps, so that they end, and are seeded again, within a few.
    "atari": {"max_frames": 160, "seed_interval": 30, "sticky_actions": 0.25},
    "feature_size": 16,
    "torch_threads": 1,
}
QUICK_ATARI: dict[str, dict[str, Any]] = {
    "ppo": {**_SHARED, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2},
    "dqn": {
        **_SHARED,
        "num_envs": 1,
        "learning_starts": 24,
        "batch_size": 8,
        "buffer_size": 60,
        "target_update_interval_steps": 32,
    },
}


def atari_run(algo: str, make_config: MakeConfig, **overrides: Any) -> TrainResult:
    """A short run from start to end."""
    config = make_config(algo=algo, **{**QUICK_ATARI[algo], **overrides})
    return ExperimentManager.setup(config).train()


def assert_policy_works(result: TrainResult) -> None:
    """A checkpoint alone predicts, is evaluated on whole games and goes on."""
    policy = load_policy(result.run_dir)
    frames = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    batch = policy.act(frames)
    assert batch.shape == (5,)
    assert [int(policy.act(frame)) for frame in frames] == batch.tolist()
    played = evaluate_checkpoint(result.run_dir, 3, seed=4)
    assert played.lengths == (40, 40, 40), "whole games, each of max_frames"
    assert played == evaluate_checkpoint(result.run_dir, 3, seed=4)
    longer = resume_training(result.run_dir, total_timesteps=160)
    assert longer.metrics["global_step"] == 160
