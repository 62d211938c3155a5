"""PPO and DQN on Atari Breakout against Stable-Baselines3: same work, same machine, one run.

    python benchmarks/atari.py [--only ppo dqn] [--rounds 1]

Both sides play Breakout without sticky actions: no-op starts, frame skip 4 with the maximum of two
frames, 84x84 grayscale, 4 frames stacked, life loss as termination, clipped rewards; the network is
NatureCNN. ppo: 8 environments, 128 steps, 4 minibatches, 4 epochs. dqn: one environment, batch 32,
an update every 4 steps, target copied every 1000, replay of 10,000. Everything on the CPU, after
warm-up; every measurement is a process of its own, rounds alternate between contenders, and the
median counts. Neither side evaluates; ours includes checkpoints and logging at their defaults.
"""

from __future__ import annotations

import time
from typing import Any

from harness import compare_with_sb3, time_training

SHARED: dict[str, dict[str, Any]] = {
    "ppo": {"learning_rate": 2.5e-4, "ent_coef": 0.01, "vf_coef": 0.5},
    "dqn": {
        "learning_rate": 1e-4,
        "buffer_size": 10_000,
        "learning_starts": 1000,
        "batch_size": 32,
        "train_freq": 4,
        "gradient_steps": 1,
        "target_update_interval_steps": 1000,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.01,
    },
}
"""Knobs by names that both sides have."""
SB3_ONLY = {"ppo": {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "clip_range": 0.1}, "dqn": {}}
OURS_ONLY: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.1},
    "dqn": {},
}
NUM_ENVS = {"ppo": 8, "dqn": 1}
WARMUP = {"ppo": 2048, "dqn": 1200}
STEPS = {"ppo": 6144, "dqn": 3000}
VECTORIZATION = {"ppo": "native", "dqn": "sync"}


def run_sb3(algo: str) -> dict[str, Any]:
    import ale_py
    import gymnasium as gym
    import stable_baselines3
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", NUM_ENVS[algo], seed=1), 4)
    model = getattr(stable_baselines3, algo.upper())(
        "CnnPolicy", env, **SHARED[algo], **SB3_ONLY[algo], device="cpu", seed=1
    )
    model.learn(WARMUP[algo])
    start = time.perf_counter()
    model.learn(STEPS[algo], reset_num_timesteps=False)
    return {"steps_per_second": STEPS[algo] / (time.perf_counter() - start)}


def run_ours(algo: str, acceleration: str) -> dict[str, Any]:
    settings = {
        "env_id": "ALE/Breakout-v5",
        "preprocessing": "atari",
        "atari": {"sticky_actions": 0.0},
        "vectorization": VECTORIZATION[algo],
        "num_envs": NUM_ENVS[algo],
        "device": "cpu",
        "acceleration": acceleration,
        "algo_kwargs": {**SHARED[algo], **OURS_ONLY[algo]},
        "eval_episodes": 0,
    }
    return time_training(algo, STEPS[algo], WARMUP[algo], settings, {})


if __name__ == "__main__":
    where = dict.fromkeys(SHARED, "Breakout")
    compare_with_sb3(__file__, __doc__, where, run_sb3, run_ours, minutes="4")
