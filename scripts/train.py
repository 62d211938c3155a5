"""Train from the command line without installing the console script: the same as `rl-training`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rl_training.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
