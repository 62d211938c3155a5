"""A process of a study for tests: claims a trial, says so, and waits to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from test_tune import make_study


def main() -> None:
    """``python tune_worker.py FOLDER STORAGE``."""
    study = make_study(Path(sys.argv[1]), storage=Path(sys.argv[2]))
    claimed = study.next_trial(10)
    print(None if claimed is None else claimed.number, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
