"""The process of a run that the zoo started: it ends with the process that started it."""

from __future__ import annotations

import os
import runpy
import signal
import threading


def main() -> None:
    """``python -m rl_training.tools.zoo.child ARGUMENTS``: ``rl-training ARGUMENTS``.

    Standard input is a pipe that the parent holds open. Its end is that of the parent, and a run
    saves and ends at a SIGTERM. (The kernel's signal at the death of a parent comes once for each
    of its threads, and a run ends without saving at the second one.)
    """
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    runpy.run_module("rl_training.cli", run_name="__main__", alter_sys=True)


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)  # returns at the end of the parent: it never writes
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
