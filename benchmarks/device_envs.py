"""Environments on the device: steps per second with learning on, and time to a score.

    python benchmarks/device_envs.py [--num-envs 4096 65536] [--modes eager compile cudagraph]
    python benchmarks/device_envs.py --score [--num-envs 4096]
    python benchmarks/device_envs.py --synchronisations

PPO on the CartPole-v1 in torch, 64x64 networks, rollouts of 32 steps, 4 epochs of 4 minibatches.
Rates are absolute, by a clock outside the training loop, after warm-up (compilation, capture);
checkpoints and evaluation are off, a row is logged every ten iterations. ``--host`` adds the same
run with Gymnasium's own vector. ``--score`` trains from the first step and plays 100 episodes of
*Gymnasium's* CartPole-v1. ``--synchronisations`` counts, with torch's profiler, how often the host
waits for the GPU in an iteration. ``--device cpu`` tries all of it at a small size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from harness import measure, time_training

NUM_STEPS = 32
WARMUP, MEASURED = 8, 40
"""Iterations."""
MODES = ("eager", "compile", "cudagraph")
HOST = "host"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def settings(num_envs: int, mode: str, device: str) -> dict[str, Any]:
    on_host = mode == HOST
    return {
        "env_id": "CartPole-v1",
        "num_envs": num_envs,
        "vectorization": "native" if on_host else "device",
        "device": device,
        "acceleration": "eager" if on_host else mode,
        "eval_episodes": 0,
        "checkpoint_interval": 0,
        "tensorboard": False,
        "log_interval_steps": 10 * num_envs * NUM_STEPS,
        "algo_kwargs": {
            "num_steps": NUM_STEPS,
            "num_minibatches": 4,
            "update_epochs": 4,
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
        },
    }


def run_speed(num_envs: int, mode: str, device: str, measured: int) -> dict[str, Any]:
    rollout = num_envs * NUM_STEPS
    chosen = settings(num_envs, mode, device)
    return time_training("ppo", measured * rollout, WARMUP * rollout, chosen, {})


def run_score(num_envs: int, mode: str, device: str, iterations: int) -> dict[str, Any]:
    """Train, and play Gymnasium's CartPole; seconds are those after the first iterations."""
    from rl_training import PPO, TrainConfig
    from rl_training.runtime.callbacks import Callback, IterationEnd

    class Clock(Callback):
        begun = ended = 0.0
        count = 0

        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            self.count += 1
            self.ended = time.perf_counter()
            if self.count <= WARMUP:
                self.begun = self.ended

    chosen = settings(num_envs, mode, device)
    total = iterations * num_envs * NUM_STEPS
    config: TrainConfig[Any] = TrainConfig(
        algo="ppo", total_timesteps=total, progress=False, **chosen
    )
    model, clock = PPO(config), Clock()
    begun = time.perf_counter()
    model.learn(run_dir=None, callbacks=[clock])
    whole = time.perf_counter() - begun
    score = model.evaluate(100, seed=12345)
    seconds = clock.ended - clock.begun
    seconds *= clock.count / (clock.count - WARMUP)  # the first iterations at the later pace
    return {"score": score.mean_return, "seconds": seconds, "with_compilation": whole}


def run_synchronisations(num_envs: int, mode: str, device: str) -> dict[str, Any]:
    """How often the host waits for the device, per iteration after warm-up."""
    from torch.profiler import ProfilerActivity, profile

    from rl_training import TrainConfig
    from rl_training.experiment.manager import ExperimentManager
    from rl_training.types import Progress

    config: TrainConfig[Any] = TrainConfig(algo="ppo", **settings(num_envs, mode, device))
    trainer = ExperimentManager.setup(config, run_dir=None)
    counted = 5
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(WARMUP):
        trainer.iterate(Progress(0, 1))
    with profile(activities=activities) as found:
        for _ in range(counted):
            trainer.iterate(Progress(0, 1))
    waits = sum(event.count for event in found.key_averages() if event.key in WAITS)
    trainer.close()
    return {"per_iteration": waits / counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[4096, 65_536])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="iterations that are measured")
    parser.add_argument("--host", action="store_true", help="also with environments on the host")
    parser.add_argument("--score", action="store_true", help="time to a score instead of speed")
    parser.add_argument("--synchronisations", action="store_true", help="count host waits instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = {"score": args.score, "synchronisations": args.synchronisations}
    kind = next((name for name, asked in kinds.items() if asked), "speed")
    if args.child:
        kind, envs, mode, device, iterations = args.child.split(" ")
        given: tuple[Any, ...] = (int(envs), mode, device)
        if kind == "synchronisations":
            print(json.dumps(run_synchronisations(*given)))
        else:
            run = run_score if kind == "score" else run_speed
            print(json.dumps(run(*given, int(iterations))))
        return
    count = args.iterations or (150 if kind == "score" else MEASURED)
    for num_envs in args.num_envs:
        print(f"\n{num_envs:,} environments on {args.device}, {count} iterations")
        modes = [*args.modes, *([HOST] if args.host and kind == "speed" else [])]
        for mode in modes:
            child = f"{kind} {num_envs} {mode} {args.device} {count}"
            found = [measure(__file__, child) for _ in range(args.rounds)]
            names = [key for key in found[0] if key != "shares"]
            medians = {key: statistics.median(one[key] for one in found) for key in names}
            shown = ", ".join(f"{key} {value:,.2f}" for key, value in medians.items())
            print(f"{mode:12s} {shown}", flush=True)


if __name__ == "__main__":
    main()
