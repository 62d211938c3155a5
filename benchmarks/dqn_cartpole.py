"""DQN on CartPole-v1 against Stable-Baselines3: same work, same machine, one run, ratios.

    python benchmarks/dqn_cartpole.py [--rounds 3]

Both sides: one environment, batch 128, one update every 10 steps, target copied every 500 steps,
120x84 ReLU networks, replay of 10,000, CPU, after warm-up. Ours includes evaluation, checkpoints
and logging at their defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from harness import measure_rounds, medians, time_training

STEPS, WARMUP = 50_000, 12_000
KNOBS: dict[str, Any] = {
    "learning_rate": 2.5e-4,
    "buffer_size": 10_000,
    "learning_starts": 1000,
    "batch_size": 128,
    "train_freq": 10,
    "gradient_steps": 1,
    "target_update_interval": 500,
    "exploration_fraction": 0.5,
    "exploration_final_eps": 0.05,
    "hidden_sizes": [120, 84],
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "Stable-Baselines3": {},
    "ours: defaults (sync, eager)": {},
    "ours: sync, compile": {"acceleration": "compile"},
}


def run_sb3() -> dict[str, Any]:
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    model = DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 1, seed=1),
        learning_rate=KNOBS["learning_rate"],
        buffer_size=KNOBS["buffer_size"],
        learning_starts=KNOBS["learning_starts"],
        batch_size=KNOBS["batch_size"],
        train_freq=KNOBS["train_freq"],
        gradient_steps=KNOBS["gradient_steps"],
        target_update_interval=KNOBS["target_update_interval"],
        exploration_fraction=KNOBS["exploration_fraction"],
        exploration_final_eps=KNOBS["exploration_final_eps"],
        policy_kwargs={"net_arch": KNOBS["hidden_sizes"]},
        device="cpu",
        seed=1,
    )
    model.learn(WARMUP)
    start = time.perf_counter()
    model.learn(STEPS, reset_num_timesteps=False)
    return {"steps_per_second": STEPS / (time.perf_counter() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "Stable-Baselines3":
        print(json.dumps(run_sb3()))
    elif args.child:
        settings = {"num_envs": 1, "algo_kwargs": KNOBS, **CONTENDERS[args.child]}
        print(json.dumps(time_training("dqn", STEPS, WARMUP, settings, {})))
    else:
        found = medians(measure_rounds(__file__, CONTENDERS, args.rounds))
        print(f"\nDQN on CartPole-v1, {os.cpu_count()} cores, median of {args.rounds}")
        for name, rate in found.items():
            print(f"{name:32s} {rate:8,.0f} steps/s {rate / found['Stable-Baselines3']:6.2f}x")


if __name__ == "__main__":
    main()
