"""``python scripts/benchmark_zoo.py run zoo/classic/benchmark.yaml``: as ``rl-training zoo``."""

from __future__ import annotations

import sys

from rl_training.cli import main

if __name__ == "__main__":
    sys.exit(main(["zoo", *sys.argv[1:]]))
