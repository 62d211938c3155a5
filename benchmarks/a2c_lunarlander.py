"""What Stable-Baselines3's A2C reaches on LunarLander with RL Zoo's settings, seed by seed.

    python benchmarks/a2c_lunarlander.py 1 2 3

RL Zoo publishes 155.8 after 200,000 steps, of one run. Final policy, deterministic, 20 episodes.
"""

from __future__ import annotations

import sys
from statistics import fmean

import torch
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

STEPS = 200_000
EVALUATION_SEED = 10_000


def final_return(seed: int) -> float:
    """Train one run and play 20 episodes with its final policy."""
    model = A2C(
        "MlpPolicy",
        make_vec_env("LunarLander-v3", n_envs=8, seed=seed),
        gamma=0.995,
        n_steps=5,
        learning_rate=lambda left: left * 0.00083,
        ent_coef=1e-5,
        seed=seed,
        device="cpu",
    )
    model.learn(STEPS)
    fresh = make_vec_env("LunarLander-v3", n_envs=1, seed=EVALUATION_SEED + seed)
    returns, _ = evaluate_policy(model, fresh, n_eval_episodes=20, return_episode_rewards=True)
    return fmean(returns)


def main(seeds: list[int]) -> int:
    """Print one line per seed and the mean."""
    torch.set_num_threads(1)
    reached = []
    for seed in seeds:
        reached.append(final_return(seed))
        sys.stdout.write(f"seed {seed}: {reached[-1]:.1f}\n")
        sys.stdout.flush()
    sys.stdout.write(f"mean: {fmean(reached):.1f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main([int(seed) for seed in sys.argv[1:]] or [1, 2, 3]))
