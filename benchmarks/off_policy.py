"""DQN, SAC and TD3 against Stable-Baselines3: same work, same machine, one run, ratios.

    python benchmarks/off_policy.py [--only dqn sac td3] [--rounds 3]

dqn: CartPole-v1, one environment, batch 128, one update every 10 steps, target copied every 500
steps, 120x84 ReLU networks, replay of 10,000. sac and td3: HalfCheetah-v5, one environment, batch
256, 256x256 ReLU networks, one update per step. Everything on the CPU, after warm-up; every
measurement is a process of its own, rounds alternate between contenders, and the median counts.
Neither side evaluates; ours includes checkpoints and logging at their defaults.
"""

from __future__ import annotations

import time
from typing import Any

from harness import compare_with_sb3, time_training

SHARED: dict[str, dict[str, Any]] = {
    "dqn": {
        "learning_rate": 2.5e-4,
        "buffer_size": 10_000,
        "learning_starts": 1000,
        "batch_size": 128,
        "train_freq": 10,
        "gradient_steps": 1,
        "target_update_interval_steps": 500,
        "exploration_fraction": 0.5,
        "exploration_final_eps": 0.05,
    },
    "sac": {
        "learning_rate": 3e-4,
        "buffer_size": 100_000,
        "learning_starts": 500,
        "batch_size": 256,
        "train_freq": 1,
        "gradient_steps": 1,
    },
}
"""Knobs by names that both sides have."""
SHARED["td3"] = SHARED["sac"]
HIDDEN = {"dqn": [120, 84], "sac": [256, 256], "td3": [256, 256]}
ENV_ID = {"dqn": "CartPole-v1", "sac": "HalfCheetah-v5", "td3": "HalfCheetah-v5"}
WARMUP = {"dqn": 12_000, "sac": 1000, "td3": 1000}
STEPS = {"dqn": 50_000, "sac": 3000, "td3": 4000}


def run_sb3(algo: str) -> dict[str, Any]:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    model = getattr(stable_baselines3, algo.upper())(
        "MlpPolicy",
        make_vec_env(ENV_ID[algo], 1, seed=1),
        **SHARED[algo],
        policy_kwargs={"net_arch": HIDDEN[algo]},
        device="cpu",
        seed=1,
    )
    model.learn(WARMUP[algo])
    start = time.perf_counter()
    model.learn(STEPS[algo], reset_num_timesteps=False)
    return {"steps_per_second": STEPS[algo] / (time.perf_counter() - start)}


def run_ours(algo: str, acceleration: str) -> dict[str, Any]:
    settings = {
        "env_id": ENV_ID[algo],
        "num_envs": 1,
        "acceleration": acceleration,
        "algo_kwargs": {**SHARED[algo], "hidden_sizes": HIDDEN[algo]},
        "eval_episodes": 0,
    }
    return time_training(algo, STEPS[algo], WARMUP[algo], settings, {})


if __name__ == "__main__":
    compare_with_sb3(__file__, __doc__, ENV_ID, run_sb3, run_ours)
