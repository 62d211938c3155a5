"""PPO on CartPole-v1: what settings bring, where time goes; Stable-Baselines3 for comparison.

    python benchmarks/ppo_cartpole.py [--rounds 1] [--json results.json]

Both sides: 128 steps per environment, 4 minibatches, 4 epochs, 64x64 tanh networks, CPU,
collection and learning together, after warm-up. Every measurement is a process of its own; rounds
alternate between contenders and the median counts. Ours is `train_ppo(TrainConfig(...))` as a
user calls it: evaluation, checkpoints and logging included, except where a row says 'bare'.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
from harness import add_rounds, measure, measure_rounds, medians, time_training

SHARED: dict[str, Any] = {
    "learning_rate": 2.5e-4,
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_coef": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "hidden_sizes": [64, 64],
}
BARE = {
    "eval_episodes": 0,
    "checkpoint_interval": 0,
    "tensorboard": False,
    "log_interval_steps": 10**9,
}
FAST = {"vectorization": "native", "acceleration": "compile"}

# name -> (steps timed, side, settings)
CONTENDERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "Stable-Baselines3, 8 envs": (0, "sb3", {"num_envs": 8}),
    "ours, 8 envs: defaults (sync, eager)": (100_000, "ours", {"num_envs": 8}),
    "ours, 8 envs: defaults, bare": (100_000, "ours", {"num_envs": 8, **BARE}),
    "ours, 8 envs: sync, compile": (100_000, "ours", {"num_envs": 8, "acceleration": "compile"}),
    "ours, 8 envs: native, eager": (100_000, "ours", {"num_envs": 8, "vectorization": "native"}),
    "ours, 8 envs: native, compile": (150_000, "ours", {"num_envs": 8, **FAST}),
    "ours, 64 envs: native, compile, 2 threads": (
        500_000,
        "ours",
        {"num_envs": 64, "torch_threads": 2, **FAST},
    ),
    "ours, 1024 envs: native, compile, 2 threads": (
        2_000_000,
        "ours",
        {"num_envs": 1024, "torch_threads": 2, **FAST},
    ),
    "environment alone, sync x8": (200_000, "env", {"num_envs": 8, "vectorization": "sync"}),
    "environment alone, native x8": (200_000, "env", {"num_envs": 8, "vectorization": "native"}),
    "environment alone, native x64": (
        1_000_000,
        "env",
        {"num_envs": 64, "vectorization": "native"},
    ),
    "environment alone, native x1024": (
        8_000_000,
        "env",
        {"num_envs": 1024, "vectorization": "native"},
    ),
}
LIMIT = {
    "ours, 8 envs: defaults (sync, eager)": "environment alone, sync x8",
    "ours, 8 envs: sync, compile": "environment alone, sync x8",
    "ours, 8 envs: native, compile": "environment alone, native x8",
    "ours, 64 envs: native, compile, 2 threads": "environment alone, native x64",
    "ours, 1024 envs: native, compile, 2 threads": "environment alone, native x1024",
}


def run_ours(steps: int, settings: dict[str, Any], profile: bool) -> dict[str, Any]:
    warmup = max(settings["num_envs"] * 128 * 4, 20_000)
    spent = _profile() if profile else {}
    return time_training("ppo", steps, warmup, {**settings, "algo_kwargs": SHARED}, spent)


def _profile() -> dict[str, float]:
    """Time spent in each part, by wrapping its entry point (costs a few per cent itself)."""
    from rl_training.algorithms.gradient_step import GradientStep
    from rl_training.algorithms.ppo import PPO
    from rl_training.data.rollout_buffer import RolloutBuffer
    from rl_training.envs.adapter import VectorAdapter
    from rl_training.runtime.actors import PolicyActor
    from rl_training.runtime.reporting import Reporter

    parts: list[tuple[str, Any, str]] = [
        ("environment", VectorAdapter, "step"),
        ("acting", PolicyActor, "act"),
        ("storing", RolloutBuffer, "add"),
        ("values and advantages", PPO, "prepare"),
        ("gradient steps", GradientStep, "__call__"),
        ("log, evaluate, save", Reporter, "report"),
    ]
    spent = {name: 0.0 for name, _, _ in parts}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return wrapper

    for name, owner, method in parts:
        setattr(owner, method, timed(name, getattr(owner, method)))
    return spent


def run_sb3(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure what `peers.py` measures, with as many threads as the library would have."""
    del steps, settings
    return peers.measure(sys.executable, peers.request_of("ppo", "sb3", threads=0, seconds=10.0))


def run_env(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Random actions through the plain Gymnasium vector."""
    import gymnasium as gym

    mode = {"sync": "sync", "native": "vector_entry_point"}[settings["vectorization"]]
    env = gym.make_vec("CartPole-v1", settings["num_envs"], vectorization_mode=mode)
    env.reset(seed=1)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(64)]
    count = steps // settings["num_envs"]
    start = time.perf_counter()
    for i in range(count):
        env.step(actions[i % 64])
    return {"steps_per_second": count * settings["num_envs"] / (time.perf_counter() - start)}


def child(name: str, profile: bool) -> None:
    steps, side, settings = CONTENDERS[name]
    if side == "ours":
        result = run_ours(steps, settings, profile)
    else:
        result = {"sb3": run_sb3, "env": run_env}[side](steps, settings)
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_rounds(parser, 1, "4")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.profile)
        return

    rates = measure_rounds(__file__, CONTENDERS, args.rounds)
    median = medians(rates)
    baseline = median["Stable-Baselines3, 8 envs"]
    print(f"\nPPO on CartPole-v1, {os.cpu_count()} cores, median of {args.rounds}")
    print("Ratios are to Stable-Baselines3 with 8 environments; rows with more environments learn")
    print("from larger batches and are other work, given for what more environments bring.")
    print(f"{'':46s} {'steps/s':>10s} {'ratio':>7s}  of plain Gymnasium's own rate")
    for name, rate in median.items():
        limit = f"{rate / median[LIMIT[name]]:8.0%}" if name in LIMIT else ""
        print(f"{name:46s} {rate:10,.0f} {rate / baseline:6.2f}x {limit}")
    bare, full = (
        median["ours, 8 envs: defaults, bare"],
        median["ours, 8 envs: defaults (sync, eager)"],
    )
    print(f"\nevaluation, checkpoints and logging cost {1 - full / bare:.1%}")
    profiles = {}
    for name in ("ours, 8 envs: defaults (sync, eager)", "ours, 8 envs: native, compile"):
        profiles[name] = measure(__file__, name, "--profile")["shares"]
        print(f"where the time goes, {name}:")
        for part, share in profiles[name].items():
            print(f"  {part:24s} {share:6.1%}")
    if args.json:
        args.json.write_text(json.dumps({"rates": rates, "profiles": profiles}, indent=2) + "\n")


if __name__ == "__main__":
    main()
