"""Runs that fail or are stopped in unusual places, one after the other, on both ranks of a launch.

    sharded_child_review.py FOLDER

Each case is a call of the command line. How it ended is written to FOLDER/CASE.rankN.json, and its
run, if it has one, to FOLDER/CASE. A rank that takes too long for a case is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training import cli
from rl_training.config import TrainConfig
from rl_training.launched import rank
from rl_training.runtime import console
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer

SECONDS_FOR_CASE = 30
TOTAL, LENGTH = 64, 10
"""Steps of a run and of an episode."""
LONG = 10_000
"""Steps of a long episode, which at 10 ms each takes longer than a case may."""


class Scripted(gym.Env[Any, Any]):
    """Episodes of ``length`` steps; ``act`` is called in each step with its number."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int, act: Callable[[int], None]) -> None:
        self._length = length
        self._act = act
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        self._steps += 1
        self._act(self._steps)
        obs = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return obs, 1.0, self._steps >= self._length, False, {}


def nothing(step: int) -> None:
    """Do nothing in a step."""
    del step


class Envs:
    """Makes the environments of a rank: one of training, then those of evaluation."""

    def __init__(self, length: int = LENGTH, act: Callable[[int], None] = nothing) -> None:
        self._of_evaluation = (length, act)
        self._made = 0

    def __call__(self) -> Scripted:
        self._made += 1
        return Scripted(LENGTH, nothing) if self._made == 1 else Scripted(*self._of_evaluation)


def broken_on_rank_1(reason: str) -> Scripted:
    """Make an environment, or raise on rank 1."""
    if rank() == 1:
        raise ValueError(reason)
    return Scripted(LENGTH, nothing)


def setup(
    run: Path | None,
    env_fn: Callable[[], Scripted],
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> Trainer:
    """Return the trainer of a run with two shards."""
    base: TrainConfig[Any] = TrainConfig(
        algo="ppo",
        env_id="custom",
        total_timesteps=TOTAL,
        num_envs=2,
        shards=2,
        seed=1,
        progress=False,
        tensorboard=False,
        eval_episodes=2,
        eval_interval=TOTAL // 2,
    )
    config = base.with_overrides(num_steps=16, num_minibatches=2, **overrides)
    return ExperimentManager.setup(config, env_fn=env_fn, callbacks=list(callbacks), run_dir=run)


# -- the cases ------------------------------------------------------------------------------------


def show_progress(folder: Path) -> Trainer:
    """Train with the live table."""
    console._is_terminal = lambda: True
    return setup(folder / "show_progress", Envs(), progress=True)


def fail_first(folder: Path) -> Trainer:
    """Fail in the set-up, on rank 1."""
    del folder
    return setup(None, functools.partial(broken_on_rank_1, "the first reason"))


def fail_second(folder: Path) -> Trainer:
    """Fail there again, for another reason."""
    del folder
    return setup(None, functools.partial(broken_on_rank_1, "the second reason"))


def resume_without_env(folder: Path) -> Trainer:
    """Resume a run whose environment cannot be made on rank 1."""
    env_fn = functools.partial(broken_on_rank_1, "no simulator here")
    run = folder / "show_progress"
    return ExperimentManager.resume(run, env_fn=env_fn, total_timesteps=2 * TOTAL)


def init_from_missing(folder: Path) -> Trainer:
    """Initialise from a checkpoint that rank 1 does not have."""
    name = "missing.pt" if rank() == 1 else "show_progress"
    return setup(folder / "init_from_missing", Envs(), init_from=str(folder / name))


class EvaluatesTwice(Callback):
    """Plays two evaluations of one episode, which rank 0 has."""

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        for number in (1, 2):
            trainer.evaluate(1)
            print(f"evaluation {number} at {event.step}")


def stop_between_evaluations(folder: Path) -> Trainer:
    """Receive SIGTERM in the last step of the first of two evaluations."""

    def act(step: int) -> None:
        if step == LENGTH:
            os.kill(os.getpid(), signal.SIGTERM)

    run = folder / "stop_between_evaluations"
    return setup(run, Envs(act=act), [EvaluatesTwice()], eval_episodes=0)


def stop_while_waiting(folder: Path) -> Trainer:
    """Receive SIGTERM on rank 0, which has played its episode; that of rank 1 is long."""

    def act(step: int) -> None:
        if rank() == 1:
            time.sleep(0.01)
        elif step == LENGTH:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    length = LONG if rank() == 1 else LENGTH
    return setup(folder / "stop_while_waiting", Envs(length, act))


class FailsToPause(Callback):
    """Raises where a checkpoint is written after a failure."""

    def on_pause(self, trainer: Trainer) -> None:
        raise RuntimeError(f"cannot pause at {trainer.global_step}")


def fail_in_evaluation(folder: Path) -> Trainer:
    """Fail in an evaluation on rank 1, and then in a callback on rank 0."""

    def act(step: int) -> None:
        if rank() == 1 and step == LENGTH // 2:
            raise ValueError("the simulator crashed")

    return setup(folder / "fail_in_evaluation", Envs(act=act), [FailsToPause()])


CASES: tuple[Callable[[Path], Trainer], ...] = (
    show_progress,
    fail_first,
    fail_second,
    resume_without_env,
    init_from_missing,
    stop_between_evaluations,
    stop_while_waiting,
    fail_in_evaluation,  # the last one: after it the ranks are no longer connected
)


# -- running them ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """How a case ended on a rank."""

    code: int
    """The command line's exit code."""
    output: str
    errors: str
    seconds: float


def outcome_file(folder: Path, case: str, number: int) -> Path:
    """Return the file with the outcome of a case on a rank."""
    return folder / f"{case}.rank{number}.json"


def run_case(case: Callable[[Path], Trainer], folder: Path) -> Outcome:
    """Train a case by the command line."""

    def command(arguments: list[str]) -> int:
        del arguments
        print(case(folder).train().stop_reason)
        return 0

    cli._COMMANDS["case"] = command
    output, errors = io.StringIO(), io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = cli.main(["case"])
    return Outcome(code, output.getvalue(), errors.getvalue(), time.monotonic() - began)


def main(folder: Path) -> None:
    """Run every case."""
    for case in CASES:
        signal.alarm(SECONDS_FOR_CASE)
        outcome = run_case(case, folder)
        path = outcome_file(folder, case.__name__, rank())
        path.write_text(json.dumps(dataclasses.asdict(outcome)))
    signal.alarm(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
