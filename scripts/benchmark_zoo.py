"""The same as ``rl-training zoo``, without installing the console script."""

from __future__ import annotations

import sys

from rl_training.cli import main

if __name__ == "__main__":
    sys.exit(main(["zoo", *sys.argv[1:]]))
