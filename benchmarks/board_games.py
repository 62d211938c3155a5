"""Connect four and tic-tac-toe learnt in self-play, against simple players.

    python benchmarks/board_games.py [--preset ippo/connect_four] [--steps 100000] [--seeds 1 2]

Trains a preset with several seeds. Each policy then plays against a random player and against one
that takes wins and blocks losses, half of the games from each seat.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from rl_training.config import config_from_file
from rl_training.runtime.matches import play_match
from rl_training.surface import IPPO

HOW = {True: "most likely actions", False: "sampled actions"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--preset", default="ippo/connect_four")
    parser.add_argument("--steps", type=int, help="total_timesteps; unset: those of the preset")
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    preset = config_from_file(args.preset)
    given: dict[str, Any] = {"progress": False, "eval_episodes": 0}
    if args.steps is not None:
        given["total_timesteps"] = args.steps
    print(f"won / drawn / lost of {args.games} games", flush=True)
    for seed in args.seeds:
        model = IPPO(preset.with_overrides(seed=seed, **given))
        begin = time.process_time()
        model.learn(run_dir=None)
        print(f"seed {seed}: trained in {time.process_time() - begin:.0f} s of CPU", flush=True)
        for opponent in ("random", "rule"):
            for deterministic, how in HOW.items():
                result = play_match(
                    model.policy,
                    opponent,
                    args.games,
                    deterministic=deterministic,
                    seed=20_000 + seed,
                )
                won, drawn, lost = result.counts()
                print(f"  {opponent} player, {how}: {won} / {drawn} / {lost}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
