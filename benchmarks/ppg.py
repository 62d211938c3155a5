"""PPG against our own PPO at the same rollout settings: what the auxiliary phases cost.

    python benchmarks/ppg.py [--rounds 3]

CartPole-v1, 8 environments, CPU, eager, whole cycles of policy and auxiliary phases after one of
warm-up; once with both algorithms' defaults, once with the settings of `ppg/cartpole` (64 steps, 10
epochs, 16 policy phases). Every measurement is a process of its own, rounds alternate between
contenders, and the median counts. Nothing is evaluated; checkpoints and logging are at defaults.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from harness import add_rounds, measure_rounds, medians, time_training

CYCLE = 32 * 8 * 128
"""Steps of a cycle at the defaults; of the preset's it is a multiple too."""
PRESET: dict[str, Any] = {"learning_rate": 1e-3, "num_steps": 64, "update_epochs": 10}
# name -> (algorithm, knobs)
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo, defaults": ("ppo", {}),
    "ppg, defaults": ("ppg", {}),
    "ppo, as ppg/cartpole": ("ppo", PRESET),
    "ppg, as ppg/cartpole": ("ppg", {**PRESET, "policy_phases": 16}),
}


def run(name: str) -> dict[str, Any]:
    algo, knobs = CONTENDERS[name]
    settings = {
        "env_id": "CartPole-v1",
        "num_envs": 8,
        "device": "cpu",
        "eval_episodes": 0,
        "normalize_reward": True,
        "algo_kwargs": knobs,
    }
    return time_training(algo, 3 * CYCLE, CYCLE, settings, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_rounds(parser, 3, "3")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args.child)))
        return
    found = medians(measure_rounds(__file__, CONTENDERS, args.rounds))
    print(f"CartPole-v1, 8 environments, {os.cpu_count()} cores, median of {args.rounds}")
    for name, rate in found.items():
        ratio = rate / found[f"ppo{name[3:]}"]
        print(f"{name:24s} {rate:8,.0f} steps/s {ratio:6.2f}x")


if __name__ == "__main__":
    main()
