"""What torchrun and Ray gain and cost, against one process and against each other.

    python benchmarks/scale.py [torchrun | ray] [--rounds 5]

PPO with sync vectorisation on an environment that computes for one millisecond per step, so that
nearly all of the time is the environments'. Two comparisons, each with the same settings:

1. ``shards: 2`` in one process, and on two ranks: two ranks should be 1.6 times as fast or more,
   and their last checkpoints must be equal bit for bit;
2. ``shards: 1`` without torchrun, and on one rank: one rank should cost 5% or less.

Steps per second are those that the run itself logs: start-up is not counted. Nothing is evaluated.
The share of learning is printed too (it should be below 10%); on several ranks it includes waiting
for the slowest one.

With ``ray`` the environment sleeps for one millisecond per step, and so many epochs are learnt that
learning takes about as long as collecting. Two environments, in two processes on every side:

1. ``lag: 1`` should take 0.7 of the time of ``lag: 0`` or less (1.43 times as fast);
2. Ray with ``lag: 0`` should be 0.85 times as fast as ``vectorization: async`` or faster.

Rounds alternate between contenders, and the median counts. Each takes four minutes; leave the
machine idle meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

NUM_ENVS, NUM_STEPS, ROLLOUTS = 8, 256, 4
EPISODE_STEPS = 100
SECONDS_OF_WORK = 1e-3


class Contender(NamedTuple):
    shards: int
    ranks: int = 0
    """Processes that torchrun starts; 0: without torchrun."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - of a NamedTuple
    """Further settings of the run."""


OF_TORCHRUN = {
    "2 shards, one process": Contender(2),
    "2 shards, torchrun, 2 ranks": Contender(2, 2),
    "1 shard, plain run": Contender(1),
    "1 shard, torchrun, 1 rank": Contender(1, 1),
}
ONE_PROCESS, TWO_RANKS, PLAIN, ONE_RANK = OF_TORCHRUN
OF_RAY = {
    "local, async workers": Contender(1, settings={"vectorization": "async"}),
    "ray, lag 0": Contender(2, settings={"engine": "ray"}),
    "ray, lag 1": Contender(2, settings={"engine": "ray", "lag": 1}),
}
ASYNC, RAY, LAG = OF_RAY
CONTENDERS = {**OF_TORCHRUN, **OF_RAY}
SLEEPING: dict[str, Any] = {
    "num_envs": 2,
    "total_timesteps": 8 * 2 * 512,
    "algo_kwargs": {"num_steps": 512, "hidden_sizes": (128, 128), "update_epochs": 52},
}
"""Settings of the runs whose environments sleep."""


class Ratio(NamedTuple):
    """A bar: how fast one contender must be in units of another."""

    fast: str
    slow: str
    least: float


RATIOS = {
    "torchrun": (Ratio(TWO_RANKS, ONE_PROCESS, 1.6), Ratio(ONE_RANK, PLAIN, 0.95)),
    "ray": (Ratio(LAG, RAY, 1 / 0.7), Ratio(RAY, ASYNC, 0.85)),
}


def compute(number: int, loops: int) -> int:
    for _ in range(loops):
        number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return number


def loops_of(seconds: float) -> int:
    """Return how many loops of `compute` take so much CPU time here: the median of several."""
    loops, rates = 20_000, []
    for _ in range(25):
        started = time.thread_time()
        compute(1, loops)
        rates.append(loops / (time.thread_time() - started))
    return round(seconds * statistics.median(rates))


class ComputingEnv(gym.Env[Any, Any]):
    """Computes ``loops`` times per step; the reward is 1 for the action that it computed."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, loops: int) -> None:
        self._loops = loops

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._number, self._steps = int(self.np_random.integers(2**31)), 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rewarded = float(int(action) == self._number >> 30)
        self._number = compute(self._number, self._loops)
        self._steps += 1
        return self._observed(), rewarded, False, self._steps >= EPISODE_STEPS, {}

    def _observed(self) -> Any:
        parts = [self._number >> shift & 0xFF for shift in (23, 15, 7, 0)]
        return np.array(parts, np.float32) / 127.5 - 1


class SleepingEnv(ComputingEnv):
    """Waits for a millisecond per step, as for a simulator elsewhere."""

    def __init__(self) -> None:
        super().__init__(loops=1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(SECONDS_OF_WORK)
        return super().step(action)


def train(name: str, folder: Path, loops: int) -> None:
    """Train one contender in this process, or as one rank of it; write how fast it was."""
    from rl_training import TrainConfig
    from rl_training.runtime.setup import ExperimentManager

    sizes = {
        "total_timesteps": ROLLOUTS * NUM_ENVS * NUM_STEPS,
        "num_envs": NUM_ENVS,
        "algo_kwargs": {"num_steps": NUM_STEPS},
    }
    contender = CONTENDERS[name]
    config: TrainConfig[Any] = TrainConfig(
        algo="ppo",
        shards=contender.shards,
        seed=1,
        device="cpu",
        eval_episodes=0,
        progress=False,
        tensorboard=False,
        **(SLEEPING if name in OF_RAY else sizes),
        **contender.settings,
    )
    env_fn = SleepingEnv if name in OF_RAY else functools.partial(ComputingEnv, loops)
    trainer = ExperimentManager.setup(config, env_fn=env_fn, run_dir=folder / "run")
    spent: dict[str, float] = {}
    trainer.measure(lambda part, function: _timed(spent, part, function))
    trainer.train()
    if trainer.ranks.leads:
        log = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
        last = json.loads(log.splitlines()[-1])
        measured = {
            "steps_per_second": last["time/steps_per_second"],
            "learning": spent["update"] / last["time/elapsed"],
        }
        (folder / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


def _timed(spent: dict[str, float], part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if part != "update":
        return function

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - started
        return result

    return timed


def measure(name: str, folder: Path, loops: int) -> dict[str, float]:
    folder.mkdir()
    ranks = CONTENDERS[name].ranks
    launch = [sys.executable]
    if ranks:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, __file__, "--child", name, "--folder", str(folder), "--loops", str(loops)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    return result


def digest_of(folder: Path) -> str:
    """Return the digest of the last checkpoint, without what depends on folder and clock."""
    from rl_training.checkpointing import load_checkpoint, state_digest

    state = load_checkpoint(folder / "run" / "checkpoints" / "last.pt")
    state["config"].pop("output_dir")
    state["training"]["counters"].pop("log_offset")
    return state_digest(state)


def compare(engine: str, rounds: int) -> bool:
    """Measure and print; return whether checkpoints are equal and every bar is reached."""
    loops = loops_of(SECONDS_OF_WORK)
    sizes = f"{NUM_ENVS} environments, rollouts of {NUM_STEPS} steps, {loops:,} loops per step"
    if engine == "ray":
        sizes = "2 environments, rollouts of 512 steps, asleep in every step"
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; PPO, {sizes}"
        f" ({1e3 * SECONDS_OF_WORK:g} ms)"
    )
    contenders = OF_RAY if engine == "ray" else OF_TORCHRUN
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    equal = True
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as root:
            folders = {name: Path(root) / str(i) for i, name in enumerate(contenders)}
            for name, folder in folders.items():
                found = measure(name, folder, loops)
                rates[name].append(found["steps_per_second"])
                print(
                    f"round {number + 1}/{rounds}: {name:28s}"
                    f" {found['steps_per_second']:7,.0f} steps/s, learning"
                    f" {found['learning']:5.1%}",
                    flush=True,
                )
            if engine == "torchrun":
                one, two = digest_of(folders[ONE_PROCESS]), digest_of(folders[TWO_RANKS])
                equal = equal and one == two
    print(f"\nmedian of {rounds}, and the range")
    for name, found_rates in rates.items():
        low, high = min(found_rates), max(found_rates)
        print(f"{name:28s} {statistics.median(found_rates):7,.0f} ({low:,.0f} to {high:,.0f})")
    reached = [print_ratio(ratio, rates) for ratio in RATIOS[engine]]
    if engine == "torchrun":
        print(
            f"last checkpoints of 2 shards are {'equal' if equal else 'DIFFERENT'} in every round"
        )
    return equal and all(reached)


def print_ratio(ratio: Ratio, rates: dict[str, list[float]]) -> bool:
    fast, slow = rates[ratio.fast], rates[ratio.slow]
    median = statistics.median(fast) / statistics.median(slow)
    rounds = [a / b for a, b in zip(fast, slow, strict=True)]
    verdict = "reached" if median >= ratio.least else "MISSED"
    print(
        f"{ratio.fast} / {ratio.slow}: {median:.3f}x (rounds {min(rounds):.3f} to"
        f" {max(rounds):.3f}); at least {ratio.least:g}: {verdict}"
    )
    return median >= ratio.least


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("engine", nargs="?", choices=list(RATIOS), default="torchrun")
    parser.add_argument(
        "--rounds", type=int, default=5, help="default 5: about 4 minutes on 2 cores"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loops", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(args.child, args.folder, args.loops)
        return 0
    return 0 if compare(args.engine, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
