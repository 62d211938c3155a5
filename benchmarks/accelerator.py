"""Off-policy training on a CUDA device: steps per second of each acceleration mode.

    python benchmarks/accelerator.py [--only sac td3 dqn] [--modes eager compile cudagraph] [--peer]

sac and td3: Pendulum-v1, one environment, batch 256, 256x256 networks, one update per step; dqn:
CartPole-v1, one environment, batch 128, an update every 4 steps. `cudagraph, replay there` keeps a
copy of the replay on the device. Absolute rates, after warm-up; with --peer Stable-Baselines3 on
the same device in the same run. Evaluation is off; checkpoints and logging are at their defaults.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from harness import measure, time_training

ENV_ID = {"sac": "Pendulum-v1", "td3": "Pendulum-v1", "dqn": "CartPole-v1"}
SHARED: dict[str, dict[str, Any]] = {
    "sac": {"learning_starts": 500, "buffer_size": 100_000},
    "td3": {"learning_starts": 500, "buffer_size": 100_000},
    "dqn": {"learning_starts": 500, "buffer_size": 100_000, "batch_size": 128, "train_freq": 4},
}
THERE = "cudagraph, replay there"
MODES = ("eager", "compile", "cudagraph", THERE)
STEPS = {"eager": 2000, "compile": 3000, "cudagraph": 10_000, THERE: 10_000, "peer": 1000}
WARMUP = 2000


def run_ours(algo: str, mode: str) -> dict[str, Any]:
    knobs = {**SHARED[algo]}
    if mode == THERE:
        knobs["replay_device"] = "accelerator"
    settings = {
        "env_id": ENV_ID[algo],
        "num_envs": 1,
        "device": "cuda",
        "acceleration": mode.split(",", maxsplit=1)[0],
        "eval_episodes": 0,
        "algo_kwargs": knobs,
    }
    return time_training(algo, STEPS[mode], WARMUP, settings, {})


def run_peer(algo: str) -> dict[str, Any]:
    import stable_baselines3

    make = getattr(stable_baselines3, algo.upper())
    model = make("MlpPolicy", ENV_ID[algo], device="cuda", seed=1, **SHARED[algo])
    model.learn(1000)
    start = time.perf_counter()
    model.learn(STEPS["peer"], reset_num_timesteps=False)
    return {"steps_per_second": STEPS["peer"] / (time.perf_counter() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=SHARED, default=list(SHARED))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--peer", action="store_true", help="also measure Stable-Baselines3")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        algo, mode = args.child.split(" ", 1)
        print(json.dumps(run_peer(algo) if mode == "peer" else run_ours(algo, mode)))
        return
    for algo in args.only:
        print(f"\n{algo} on {ENV_ID[algo]}, one environment")
        for mode in (*args.modes, *(["peer"] if args.peer else [])):
            rate = measure(__file__, f"{algo} {mode}")["steps_per_second"]
            name = "Stable-Baselines3" if mode == "peer" else f"ours: {mode}"
            print(f"{name:32s} {rate:8,.0f} steps/s", flush=True)


if __name__ == "__main__":
    main()
