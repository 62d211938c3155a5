"""Runs killed at file operations and at random moments, resumed, compared with one never killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from conftest import QUICK_KNOBS, any_env
from fault_workers import processes_of_session, quietly
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.logging import JsonlSink
from state_compare import differences, final_state, metric_rows

_EVENTS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate"}
_LEFT_BEHIND_SECONDS = 10.0


def config_for(algo: str, folder: Path, vectorization: str) -> TrainConfig[Any]:
    return TrainConfig(
        algo=algo,
        env_id=any_env(algo),
        total_timesteps=768,
        num_envs=2,
        vectorization=vectorization,  # type: ignore[arg-type]
        output_dir=folder,
        eval_interval=256,
        eval_episodes=2,
        checkpoint_interval=128,
        progress=False,
        algo_kwargs=QUICK_KNOBS[algo],
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(operation: int, folder: Path) -> None:
    """Die at the n-th file operation in a folder: before it, or in the middle of a write."""
    left = operation

    def count() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        inside = args and isinstance(args[0], (str, os.PathLike)) and str(folder) in str(args[0])
        if event in _EVENTS and inside and count():
            die()

    sys.addaudithook(watch)
    real_fsync, real_write = os.fsync, JsonlSink.write

    def fsync(descriptor: int) -> None:
        if count():
            if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tmp":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            die()
        real_fsync(descriptor)

    def write(self: JsonlSink, step: int, metrics: Any) -> None:
        if count():
            self._file.write(b'{"step": 12')  # half a row
            self._file.flush()
            die()
        real_write(self, step, metrics)

    os.fsync = fsync  # type: ignore[assignment]
    JsonlSink.write = write  # type: ignore[method-assign]


class KilledRun:
    """A run that is killed again and again until it is complete."""

    def __init__(self, algo: str, folder: Path, rng: random.Random, vectorization: str) -> None:
        self.folder = folder
        self.config = config_for(algo, folder, vectorization)
        self.kills = 0
        self.left_behind = 0
        self._rng = rng

    def run(self, max_kills: int) -> Path:
        """Train to the end, killed on the way up to ``max_kills`` times."""
        while not self._child(kill=self.kills < max_kills):
            pass
        (run,) = (path for path in self.folder.iterdir() if (path / "summary.json").is_file())
        return run

    def _child(self, *, kill: bool) -> bool:
        """One process, which ends the run or is killed; whether it ended."""
        at_operation = self._rng.random() < 0.7
        operation, delay = self._rng.randrange(1, 60), self._rng.uniform(0.01, 0.8)
        child = os.fork()
        if not child:
            os.setsid()
            if kill and at_operation:
                die_at(operation, self.folder)
            status = 1
            try:
                quietly(self._train)
                status = 0
            finally:
                os._exit(status)
        if kill and not at_operation:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            self.kills += 1
            self._count_left_behind(child)
            return False
        if os.WEXITSTATUS(status):
            raise AssertionError(f"a child of {self.folder} failed")
        self._count_left_behind(child)
        return True

    def _train(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begun = [
                path
                for path in self.folder.iterdir()
                if (path / "checkpoints" / "last.pt").is_file()
            ]
            if begun:
                ExperimentManager.resume(begun[0]).train()
            else:  # killed before its first checkpoint: nothing was begun
                ExperimentManager.setup(self.config).train()

    def _count_left_behind(self, session: int) -> None:
        deadline = time.monotonic() + _LEFT_BEHIND_SECONDS
        while left := processes_of_session(session):
            if time.monotonic() > deadline:
                self.left_behind += len(left)
                os.killpg(session, signal.SIGKILL)
                return
            time.sleep(0.02)


def differences_after_kills(
    algo: str, folder: Path, seed: int, max_kills: int, vectorization: str = "sync"
) -> tuple[int, int, list[str]]:
    """Kills, processes left behind, and what differs from a run that was never killed."""
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir(parents=True)
    killed.mkdir()
    reference = KilledRun(algo, whole, random.Random(0), vectorization).run(max_kills=0)
    runner = KilledRun(algo, killed, random.Random(seed), vectorization)
    run = runner.run(max_kills)
    found = differences(final_state(reference), final_state(run))
    if metric_rows(reference) != metric_rows(run):
        found.append("metric rows")
    return runner.kills, runner.left_behind, found
