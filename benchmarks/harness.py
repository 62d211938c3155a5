"""What the benchmarks share: each measurement in a process of its own, medians over rounds."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def measure(script: str, name: str, *flags: str) -> dict[str, Any]:
    """Run ``script --child NAME``; its last line is JSON."""
    command = [sys.executable, script, "--child", name, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_rounds(script: str, names: Iterable[str], rounds: int) -> dict[str, list[float]]:
    """Steps per second of every contender, round by round, so that drift hits all alike."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name, measured in rates.items():
            measured.append(measure(script, name)["steps_per_second"])
            print(f"round {number + 1}/{rounds}: {name}: {measured[-1]:,.0f} steps/s", flush=True)
    return rates


def add_rounds(parser: argparse.ArgumentParser, default: int, minutes: str) -> None:
    """Add ``--rounds``, with the time that the default takes on two cores."""
    help_text = f"default {default}: about {minutes} minutes in all on 2 idle cores"
    parser.add_argument("--rounds", type=int, default=default, help=help_text)


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def time_training(
    algo: str, steps: int, warmup: int, settings: dict[str, Any], spent: dict[str, float]
) -> dict[str, Any]:
    """Steps per second of ours, from the end of warm-up until training returns."""
    from rl_training import TrainConfig
    from rl_training.experiment.manager import train_as
    from rl_training.runtime.callbacks import Callback, IterationEnd

    class Clock(Callback):
        begun: float | None = None
        first_step = 0

        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            if self.begun is None and event.step >= warmup:
                spent.update(dict.fromkeys(spent, 0.0))
                self.begun, self.first_step = time.perf_counter(), event.step

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config: TrainConfig[Any] = TrainConfig(
            algo=algo,
            total_timesteps=warmup + steps,
            output_dir=Path(folder),
            progress=False,
            **settings,
        )
        result = train_as(algo, config, callbacks=[clock])
        if clock.begun is None:
            raise RuntimeError("the run ended within its warm-up")
        seconds = time.perf_counter() - clock.begun
    done = result.metrics["global_step"] - clock.first_step
    shares = {name: value / seconds for name, value in spent.items()}
    return {"steps_per_second": done / seconds, "shares": shares}


SB3, EAGER, COMPILE = "Stable-Baselines3", "ours: eager", "ours: compile"
MODES = {EAGER: "eager", COMPILE: "compile"}
Run = Callable[..., dict[str, Any]]


def compare_with_sb3(
    script: str,
    title: str | None,
    where: Mapping[str, str],
    run_sb3: Run,
    run_ours: Run,
    minutes: str,
) -> None:
    """The command line of a comparison: every algorithm of ``where``, the peer and our modes.

    ``minutes`` is the time of one round, which is the default.
    """
    parser = argparse.ArgumentParser(description=(title or "").split("\n", maxsplit=1)[0])
    add_rounds(parser, 1, minutes)
    parser.add_argument("--only", nargs="+", choices=where, default=list(where))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        algo, name = args.child.split(" ", 1)
        print(json.dumps(run_sb3(algo) if name == SB3 else run_ours(algo, MODES[name])))
        return
    for algo in args.only:
        names = [f"{algo} {contender}" for contender in (SB3, *MODES)]
        found = medians(measure_rounds(script, names, args.rounds))
        print(f"\n{algo} on {where[algo]}, {os.cpu_count()} cores, median of {args.rounds}")
        for name, rate in found.items():
            print(f"{name:28s} {rate:8,.0f} steps/s {rate / found[names[0]]:6.2f}x")
