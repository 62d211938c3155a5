"""PPO on Atari Breakout on a GPU, and what the emulator does alone on the same machine.

    python benchmarks/atari_accelerator.py [--num-envs 8 128] [--precision bfloat16] [--overlap]

Breakout without sticky actions through ale-py's native vector, rollouts of 128 steps, 4 epochs of
minibatches of 256 rows (8 environments) or 4 minibatches (more), CUDA graphs. Absolute numbers:
they say something about this machine alone; the share of the emulator's own rate, a little more.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from harness import measure, time_training

ROLLOUT = 128


def emulator_alone(num_envs: int, seconds: float = 5.0) -> float:
    """Steps per second of random play, nothing else."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("breakout", num_envs)
    env.reset(seed=1)
    actions = np.random.default_rng(1).integers(0, 4, (1000, num_envs))
    for row in actions[:100]:
        env.step(row)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        env.step(actions[steps % 1000])
        steps += 1
    return steps * num_envs / (time.perf_counter() - start)


def training(num_envs: int, args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "env_id": "ALE/Breakout-v5",
        "preprocessing": "atari",
        "atari": {"sticky_actions": 0.0, "seed_interval": args.seed_interval},
        "vectorization": "native",
        "num_envs": num_envs,
        "overlap": args.overlap,
        "device": "cuda",
        "acceleration": args.acceleration,
        "precision": args.precision,
        "eval_episodes": 0,
        "algo_kwargs": {"num_steps": ROLLOUT, "num_minibatches": 4, "clip_coef": 0.1},
    }
    rollout = ROLLOUT * num_envs
    return time_training("ppo", args.rollouts * rollout, 4 * rollout, settings, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--acceleration", choices=["eager", "compile", "cudagraph"], default="cudagraph"
    )
    parser.add_argument("--seed-interval", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(training(int(args.child), args)))
        return
    flags = [f"--precision={args.precision}", f"--acceleration={args.acceleration}"]
    flags += [f"--seed-interval={args.seed_interval}", f"--rollouts={args.rollouts}"]
    flags += ["--overlap"] if args.overlap else []
    for num_envs in args.num_envs:
        alone = emulator_alone(num_envs)
        rate = measure(__file__, str(num_envs), *flags)["steps_per_second"]
        print(
            f"{num_envs:4d} environments: emulator alone {alone:8,.0f} steps/s,"
            f" PPO {rate:8,.0f} ({rate / alone:.0%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
