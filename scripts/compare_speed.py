"""Compare the training speed of two commits: alternating short rounds, best of rounds, ratios.

    python scripts/compare_speed.py OLD NEW [--rounds 7] [--rows NAMES...]
    python scripts/compare_speed.py --list

OLD and NEW are commits, or `.` for the working tree. The rows are short versions of the eager CPU
rows of `make bench`: one torch thread, and small batches where an update is slow. A round is a new
process that trains for a fixed number of steps. Time is measured between the ends of two
iterations, without start-up and the final checkpoint; nothing is evaluated. Only one process runs
at a time, and the two commits alternate in who is first. Exits with 1 if the best round of NEW has
less than 0.95 of the speed of the best round of OLD. All rows take about ten minutes on an idle
machine. Other work on the machine distorts the results; steps per second of CPU time, the last
column, are distorted less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from two_commits import make_tree, require_imported_from, tree_environment

LEAST_RATIO = 0.95


@dataclasses.dataclass(frozen=True)
class Row:
    """A training run whose speed is measured."""

    algo: str
    warmup: int
    """Warm-up steps; measurement starts at the end of the iteration that reaches them."""
    steps: int
    """Measured steps after the warm-up."""
    settings: dict[str, Any]
    """Fields of `TrainConfig`, in addition to `SHARED`."""
    knobs: dict[str, Any]
    """The algorithm's own settings."""


SHARED: dict[str, Any] = {
    "seed": 1,
    "device": "cpu",
    "torch_threads": 1,
    "eval_episodes": 0,
    "checkpoint_interval": 0,
    "tensorboard": False,
    "progress": False,
}
_CARTPOLE = {"env_id": "CartPole-v1", "num_envs": 8}
_CHEETAH = {"env_id": "HalfCheetah-v5", "num_envs": 1}
_BREAKOUT = {
    "env_id": "ALE/Breakout-v5",
    "preprocessing": "atari",
    "atari": {"sticky_actions": 0.0},
}
_PPO_EPOCHS = {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
_SOME_UPDATES_FIRST = 900
"""First step of learning, so that the slower first updates are in the warm-up."""

ROWS: dict[str, Row] = {
    "ppo_cartpole_sync": Row("ppo", 8_192, 32_768, _CARTPOLE, _PPO_EPOCHS),
    "ppo_cartpole_native": Row(
        "ppo", 8_192, 40_960, {**_CARTPOLE, "vectorization": "native"}, _PPO_EPOCHS
    ),
    "recurrent_ppo_cartpole": Row(
        "recurrent_ppo", 4_096, 16_384, _CARTPOLE, {**_PPO_EPOCHS, "sequence_length": 128}
    ),
    # One cycle of 16 policy phases and an auxiliary phase as warm-up, then two cycles.
    "ppg_cartpole": Row(
        "ppg",
        8_192,
        16_384,
        {**_CARTPOLE, "normalize_reward": True},
        {"num_steps": 64, "update_epochs": 10, "policy_phases": 16, "learning_rate": 1e-3},
    ),
    "dqn_cartpole": Row(
        "dqn",
        3_000,
        12_000,
        {**_CARTPOLE, "num_envs": 1},
        {
            "buffer_size": 10_000,
            "learning_starts": 1_000,
            "batch_size": 128,
            "train_freq": 10,
            "hidden_sizes": [120, 84],
        },
    ),
    "sac_cheetah": Row(
        "sac",
        1_000,
        1_000,
        _CHEETAH,
        {"buffer_size": 100_000, "learning_starts": _SOME_UPDATES_FIRST, "batch_size": 64},
    ),
    "td3_cheetah": Row(
        "td3",
        1_000,
        1_000,
        _CHEETAH,
        {"buffer_size": 100_000, "learning_starts": _SOME_UPDATES_FIRST, "batch_size": 64},
    ),
    "ppo_atari": Row(
        "ppo",
        256,
        512,
        {**_BREAKOUT, "vectorization": "native", "num_envs": 8},
        {**_PPO_EPOCHS, "num_steps": 32, "clip_coef": 0.1},
    ),
    "dqn_atari": Row(
        "dqn",
        1_000,
        1_000,
        {**_BREAKOUT, "num_envs": 1},
        {
            "buffer_size": 10_000,
            "learning_starts": _SOME_UPDATES_FIRST,
            "batch_size": 8,
            "train_freq": 8,
            "target_update_interval": 1_000,
            "learning_rate": 1e-4,
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Speed:
    """Steps per second of wall time and of CPU time of all threads."""

    wall: float
    cpu: float


def measure(row: Row) -> Speed:
    """Train with the package that this process imports, and return the speed."""
    from rl_training.config import config_from_mapping
    from rl_training.experiment.manager import ExperimentManager
    from rl_training.runtime.callbacks import Callback

    marks: list[tuple[int, float, float]] = []

    class Clock(Callback):
        """Records step and time at the end of the warm-up and of every later iteration."""

        def on_iteration(self, trainer: Any, event: Any) -> None:
            del trainer
            if event.step >= row.warmup:
                marks.append((event.step, time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as folder:
        settings = {**SHARED, **row.settings, "total_timesteps": row.warmup + row.steps}
        config = config_from_mapping(
            {**settings, "algo": row.algo, "algo_kwargs": row.knobs, "output_dir": Path(folder)}
        )
        ExperimentManager.setup(config, callbacks=[Clock()]).train()
    if len(marks) < 2:
        raise RuntimeError("no iteration ended after the warm-up")
    steps, wall, cpu = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    return Speed(steps / wall, steps / cpu)


def run_child(name: str, tree: Path, folder: Path) -> Speed:
    """Measure a row in a new process that imports ``tree``."""
    command = [sys.executable, __file__, "--child", str(tree), name]
    done = subprocess.run(  # noqa: S603 - this script
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=tree_environment(tree, folder / "state", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    if done.returncode:
        sys.exit(f"{name} failed with {tree}:\n{done.stderr[-3000:]}")
    return Speed(**json.loads(done.stdout.splitlines()[-1]))


def compare_row(name: str, trees: Sequence[Path], rounds: int, folder: Path) -> float:
    """Print both commits' best rounds and return their ratio, NEW to OLD."""
    rates: list[list[Speed]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            rates[side].append(run_child(name, trees[side], folder))
    old, new = (max(speed.wall for speed in measured) for measured in rates)
    old_cpu, new_cpu = (max(speed.cpu for speed in measured) for measured in rates)
    worst = min(min(s.wall for s in speeds) / max(s.wall for s in speeds) for speeds in rates)
    print(
        f"{name:24s} {old:9,.0f} {new:9,.0f} {new / old:8.3f} {1 - worst:7.0%}"
        f" {new_cpu / old_cpu:9.3f}{'  SLOWER' if new / old < LEAST_RATIO else ''}",
        flush=True,
    )
    return new / old


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if NEW is slower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("old", nargs="?", help="a commit, or . for the working tree")
    parser.add_argument("new", nargs="?", help="a commit, or . for the working tree")
    parser.add_argument("--rounds", type=int, default=7, help="processes per row and commit")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and exit")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        tree, name = options.child
        require_imported_from(Path(tree))
        print(json.dumps(dataclasses.asdict(measure(ROWS[name]))))
        return 0
    if options.list:
        print("\n".join(ROWS))
        return 0
    if options.old is None or options.new is None:
        parser.error("two commits are needed (. is the working tree)")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare_speed_") as folder:
        root = Path(folder)
        sides = (("old", options.old), ("new", options.new))
        trees = [make_tree(commit, root / side) for side, commit in sides]
        title = f"steps/s, best of {options.rounds}"
        print(f"{title:24s} {'OLD':>9s} {'NEW':>9s} {'ratio':>8s} {'spread':>7s} {'CPU ratio':>9s}")
        ratios = [compare_row(name, trees, options.rounds, root) for name in options.rows]
    print("spread: how far the worst round of either commit was below its best")
    slower = sum(ratio < LEAST_RATIO for ratio in ratios)
    print(
        f"\n{options.old} and {options.new}: {slower} of {len(ratios)} rows are slower than"
        f" {LEAST_RATIO} of OLD; {time.monotonic() - started:.0f} s"
    )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
