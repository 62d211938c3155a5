"""Environments on the device: speed with learning on, time to a score, waits of the host.

All of it on one GPU, in about seven minutes:

    python benchmarks/device_envs.py --rounds 1 --modes eager cudagraph --host

and a try of all parts on a CPU, at tiny sizes:

    python benchmarks/device_envs.py --device cpu --num-envs 64 --replay-envs 4 --modes eager \
        --iterations 9 --rounds 1

- ``speed``: steps per second of PPO on the CartPole-v1 in torch, 64x64 networks, rollouts of 32
  steps, 4 epochs of 4 minibatches.
- ``score``: the same from the first step; then 100 episodes of *Gymnasium's* CartPole-v1.
- ``replay``: updates per second of SAC on the Pendulum-v1 in torch, 256x256 networks, batches of
  256, one update per step, with one environment and with 64.
- ``waits``: calls in an iteration by which the host waits for the GPU, by torch's profiler, of PPO
  and of SAC.

Rates are absolute, by a clock outside the training loop, after warm-up (compilation, capture);
checkpoints and evaluation are off, a row is logged every ten iterations of PPO. ``--host`` adds the
same runs with Gymnasium's environments, SAC also with ``replay_device: accelerator``.
``--deterministic`` adds every mode with ``deterministic: true``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

from harness import measure, time_training

NUM_STEPS = 32
WARMUP, MEASURED, SCORED = 8, 40, 150
"""Iterations."""
MODES = ("eager", "compile", "cudagraph")
HOST, COPIED, FIXED = "host", "host+accelerator", "+deterministic"
KINDS = ("speed", "score", "replay", "waits")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def placement(mode: str, device: str) -> dict[str, Any]:
    """Return the settings of a mode: where environments are, and how updates run."""
    on_host = mode in (HOST, COPIED)
    accelerated = "cudagraph" if device != "cpu" else "eager"
    return {
        "vectorization": "sync" if on_host else "device",
        "device": device,
        "acceleration": accelerated if on_host else mode.removesuffix(FIXED),
        "deterministic": mode.endswith(FIXED),
        "eval_episodes": 0,
        "checkpoint_interval": 0,
        "tensorboard": False,
    }


def ppo_settings(num_envs: int, mode: str, device: str) -> dict[str, Any]:
    return {
        **placement(mode, device),
        **({"vectorization": "native"} if mode == HOST else {}),
        "env_id": "CartPole-v1",
        "num_envs": num_envs,
        "log_interval_steps": 10 * num_envs * NUM_STEPS,
        "algo_kwargs": {
            "num_steps": NUM_STEPS,
            "num_minibatches": 4,
            "update_epochs": 4,
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
        },
    }


def sac_settings(num_envs: int, mode: str, device: str) -> dict[str, Any]:
    return {
        **placement(mode, device),
        "env_id": "Pendulum-v1",
        "num_envs": num_envs,
        "algo_kwargs": {
            "train_freq": 1,
            "gradient_steps": 1,
            "learning_starts": 256,
            "batch_size": 256,
            "hidden_sizes": (256, 256),
            "buffer_size": 200_000,
            **({"replay_device": "accelerator"} if mode == COPIED else {}),
        },
    }


def run_speed(num_envs: int, mode: str, device: str, measured: int) -> dict[str, Any]:
    rollout = num_envs * NUM_STEPS
    chosen = ppo_settings(num_envs, mode, device)
    found = time_training("ppo", measured * rollout, WARMUP * rollout, chosen, {})
    return {"steps_per_second": found["steps_per_second"]}


def run_replay(num_envs: int, mode: str, device: str, measured: int) -> dict[str, Any]:
    """Return updates per second, which are steps per second, since there is one for each."""
    warmup, steps = 75 * measured, 250 * measured
    chosen = sac_settings(num_envs, mode, device)
    found = time_training("sac", steps, warmup, chosen, {})
    return {"updates_per_second": found["steps_per_second"]}


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

    chosen = ppo_settings(num_envs, mode, device)
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


def run_waits(num_envs: int, mode: str, device: str, counted: int) -> dict[str, Any]:
    """Return how often the host waits for the device per iteration, after warm-up."""
    from torch.profiler import ProfilerActivity, profile

    from rl_training import TrainConfig
    from rl_training.experiment.manager import ExperimentManager
    from rl_training.types import Progress

    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    waits = {}
    for algo, chosen in (
        ("ppo", ppo_settings(num_envs, mode, device)),
        ("sac", sac_settings(64, mode, device)),
    ):
        config: TrainConfig[Any] = TrainConfig(
            algo=algo, progress=False, total_timesteps=10**9, **chosen
        )
        trainer: Any = ExperimentManager.setup(config, run_dir=None)
        if device == "cpu" and algo == "sac":  # only to see that it runs
            trainer.iteration_steps = 64

        def iterate(trainer: Any = trainer) -> None:
            trainer.global_step += trainer.iterate(Progress(trainer.global_step, 10**9)).steps

        for _ in range(WARMUP if algo == "ppo" else 2):
            iterate()
        counts = []
        for more in (counted, 2 * counted):  # the profiler itself waits when it starts and stops
            with profile(activities=activities) as found:
                for _ in range(more):
                    iterate()
            counts.append(sum(e.count for e in found.key_averages() if e.key in WAITS))
        waits[algo] = (counts[1] - counts[0]) / counted
        trainer.close()
    return waits


RUNS = {"speed": run_speed, "score": run_score, "replay": run_replay, "waits": run_waits}


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, str, int]]:
    """Yield what is measured: kind, environments, mode and iterations."""
    modes = [*args.modes, *(mode + FIXED for mode in args.modes if args.deterministic)]
    on_host = [HOST] if args.host else []
    for kind in args.what:
        count = args.iterations or {"score": SCORED, "waits": 5}.get(kind, MEASURED)
        if kind == "replay":
            others = [HOST, COPIED] if args.host and args.device != "cpu" else on_host
            for num_envs in args.replay_envs:
                yield from ((kind, num_envs, mode, count) for mode in [*modes, *others])
            continue
        sizes = args.num_envs[:1] if kind == "waits" else args.num_envs
        for num_envs in sizes:
            others = on_host if kind == "speed" else []
            yield from ((kind, num_envs, mode, count) for mode in [*modes, *others])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[4096, 65_536])
    parser.add_argument("--replay-envs", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="iterations that are measured")
    parser.add_argument("--host", action="store_true", help="also with environments on the host")
    parser.add_argument("--deterministic", action="store_true", help="also with that setting")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, envs, mode, device, count = args.child.split(" ")
        print(json.dumps(RUNS[kind](int(envs), mode, device, int(count))))
        return
    for kind, num_envs, mode, count in cases(args):
        child = f"{kind} {num_envs} {mode} {args.device} {count}"
        found = [measure(__file__, child) for _ in range(args.rounds)]
        medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
        shown = ", ".join(f"{key} {value:,.2f}" for key, value in medians.items())
        print(f"{kind:7s} {num_envs:7,} envs  {mode:24s} {shown}", flush=True)


if __name__ == "__main__":
    main()
