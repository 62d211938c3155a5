"""Updates per second by the number of torch threads: the measurement behind `pick_threads`.

    python benchmarks/threads.py [--seconds 2]

Prints one row per network and batch, one column per number of threads.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn


def updates_per_second(width: int, batch: int, threads: int, seconds: float) -> float:
    """Time actor-critic sized updates: two critics and an actor, forward, backward and Adam."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def network(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, outputs),
        )  # fmt: skip

    networks = [network(23, 1), network(23, 1), network(17, 12)]
    optimizers = [torch.optim.Adam(net.parameters(), 3e-4, foreach=True) for net in networks]
    inputs = [torch.randn(batch, size) for size in (23, 23, 17)]

    def update() -> None:
        for net, optimizer, seen in zip(networks, optimizers, inputs, strict=True):
            optimizer.zero_grad()
            net(seen).square().mean().backward()
            optimizer.step()

    for _ in range(5):
        update()
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        update()
        done += 1
    return done / (time.perf_counter() - started)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="time of each cell (default 2: half a minute in all on 2 cores)",
    )
    seconds = parser.parse_args().seconds
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= cores]
    print(f"{cores} cores; updates/s with " + ", ".join(f"{c} threads" for c in counts))
    for width, batch in ((64, 64), (256, 64), (256, 256), (256, 1024), (512, 256), (512, 1024),
                         (1024, 256), (1024, 1024)):  # fmt: skip
        rates = [updates_per_second(width, batch, count, seconds) for count in counts]
        work = batch * width**2 / 256**3
        print(f"width {width:5} batch {batch:5} work {work:6.2f}:"
              + "".join(f" {rate:9.1f}" for rate in rates), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
