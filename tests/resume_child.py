"""A training process that a real SIGKILL ends: run as a script by the resume tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import probe_envs  # noqa: F401 - registers environments
from rl_training import checkpointing
from rl_training.config import config_from_file
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.callbacks import Callback, IterationEnd


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillAtStep(Callback):
    """Dies in the iteration that reaches ``step``, its metrics written, no checkpoint of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        if event.step >= self.step:
            die()


def kill_in_save(number: int) -> None:
    """Die in the ``number``-th save: half of the file written, nothing renamed."""
    real, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        is_file = Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tmp"
        count += is_file
        if is_file and count == number:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            real(descriptor)
            die()
        real(descriptor)

    checkpointing.os.fsync = fsync  # type: ignore[attr-defined]


def main() -> None:
    config_path, mode, number = sys.argv[1:]
    callbacks: list[Callback] = []
    if mode == "step":
        callbacks.append(KillAtStep(int(number)))
    else:
        kill_in_save(int(number))
    config = config_from_file(Path(config_path))
    ExperimentManager.setup(config, callbacks=callbacks).train()


if __name__ == "__main__":
    main()
