"""Kill runs and load damaged files, many times, and print counts: ``make test-faults``."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def main() -> int:
    """Run the harness; return 1 if a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs over all algorithms")
    parser.add_argument("--files", type=int, default=5000, help="damaged or hostile files")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=3, help="tracebacks to print")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
        import torch

        torch.set_num_threads(1)
        found = _kills(options, Path(folder) / "kills") if options.kills else 0
        found += _files(options, Path(folder) / "files") if options.files else 0
    return 1 if found else 0


def _kills(options: argparse.Namespace, folder: Path) -> int:
    from fault_kills import differences_after_kills
    from fault_workers import run_tasks
    from rl_training.experiment.registry import ALGORITHMS

    algos = sorted(ALGORITHMS)
    per_run = 8
    count = -(-options.kills // 5)  # most runs are complete before all of their kills

    def task(index: int) -> tuple[str, str]:
        vectorization = "async" if index % 5 == 4 else "sync"
        algo = algos[index % len(algos)]
        kills, left, differs = differences_after_kills(
            algo, folder / str(index), options.seed + index, per_run, vectorization
        )
        return f"{kills} {left} {len(differs)}", "; ".join(differs[:5])

    started, kills, left, differing, failed = time.monotonic(), 0, 0, 0, 0
    for outcome in run_tasks(task, count, options.processes, limit=240.0):
        if outcome.result in ("hang", "died", "harness error"):
            failed += 1
            print(f"run {outcome.index}: {outcome.result} {outcome.detail}", flush=True)
            continue
        here = [int(word) for word in outcome.result.split()]
        kills, left, differing = kills + here[0], left + here[1], differing + bool(here[2])
        if here[2]:
            print(f"run {outcome.index} differs: {outcome.detail}", flush=True)
    seconds = time.monotonic() - started
    print(
        f"kills: {kills} over {count} runs of {len(algos)} algorithms in {seconds:.0f} s:"
        f" {differing} runs differ, {left} processes left behind, {failed} runs failed",
        flush=True,
    )
    return differing + left + failed


def _files(options: argparse.Namespace, folder: Path) -> int:
    from fault_fuzz import Base, fuzz_one
    from fault_workers import quietly, run_tasks

    folder.mkdir(parents=True)
    base = quietly(lambda: Base(folder))

    def task(index: int) -> tuple[str, str]:
        scratch = folder / f"scratch-{os.getpid()}"
        return quietly(lambda: fuzz_one(base, options.seed + index, scratch))

    started, shown = time.monotonic(), 0
    counts: collections.Counter[str] = collections.Counter()
    slowest = peak = 0.0
    for outcome in run_tasks(task, options.files, options.processes, limit=20.0):
        counts[outcome.result] += 1
        if outcome.peak_mib > max(peak, 1024):
            print(f"file {outcome.index}: memory {outcome.peak_mib:.0f} MiB", flush=True)
        slowest, peak = max(slowest, outcome.seconds), max(peak, outcome.peak_mib)
        if outcome.result not in ("accepted", "refused") and shown < options.show:
            shown += 1
            print(f"file {outcome.index}: {outcome.result}\n{outcome.detail}", flush=True)
    seconds = time.monotonic() - started
    listed = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    print(
        f"files: {options.files} in {seconds:.0f} s: {listed}; executed: {int(base.was_executed)};"
        f" slowest {slowest:.1f} s; largest memory {peak:.0f} MiB",
        flush=True,
    )
    bad = sum(n for name, n in counts.items() if name not in ("accepted", "refused"))
    return bad + int(base.was_executed) + int(peak > 1024)


if __name__ == "__main__":
    sys.exit(main())
