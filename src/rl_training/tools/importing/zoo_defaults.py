"""Default hyperparameters of Stable-Baselines3 2.9, which entries of its zoo leave out."""

from __future__ import annotations

from typing import Any

_ON_POLICY = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
_OFF_POLICY = {
    "buffer_size": 1_000_000,
    "learning_starts": 100,
    "batch_size": 256,
    "tau": 0.005,
    "gamma": 0.99,
    "train_freq": 1,
    "gradient_steps": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {
        **_ON_POLICY,
        "learning_rate": 3e-4,
        "n_steps": 2048,
        "batch_size": 64,
        "n_epochs": 10,
        "clip_range": 0.2,
        "normalize_advantage": True,
    },
    "a2c": {
        **_ON_POLICY,
        "learning_rate": 7e-4,
        "n_steps": 5,
        "gae_lambda": 1.0,
        "normalize_advantage": False,
    },
    "dqn": {
        **_OFF_POLICY,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "tau": 1.0,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
        "max_grad_norm": 10.0,
    },
    "sac": {**_OFF_POLICY, "learning_rate": 3e-4, "ent_coef": "auto", "target_update_interval": 1},
    "td3": {
        **_OFF_POLICY,
        "learning_rate": 1e-3,
        "policy_delay": 2,
        "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
}
"""By algorithm, under the names there."""
WIDTHS = {"dqn": [64, 64], "sac": [256, 256], "td3": [400, 300]}
"""Hidden layers for vectors; those of PPO and A2C are the same here. For images SAC and TD3 have
256 256 there and here, and the others none."""
