"""A run stopped by a signal anywhere, in the middle of anything, ends as one never stopped."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from conftest import WITH_MEMORY, MakeConfig, plain
from rl_training.checkpointing import load_checkpoint
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runs import read_json
from rl_training.runtime import on_policy
from rl_training.runtime.callbacks import Callback, CheckpointCallback, IterationEnd
from rl_training.runtime.trainer import Trainer, TrainResult
from state_compare import assert_same_run


class Unseeded(CartPoleEnv):
    """Random outside its seed: its episodes cannot be replayed."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)  # type: ignore[no-untyped-call]
        return obs + np.float32(next(_COUNTER)) / 1e6, *rest


_COUNTER = itertools.count()
gym.register("test_pause/Unseeded-v0", "test_pause:Unseeded", max_episode_steps=500)

Ask = Callable[[Trainer], bool]


class Interruptions:
    """Makes a trainer's ``count``-th question whether to stop the moment a signal comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.at: int | None = None
        for name in ("pauses", "stops_work"):
            monkeypatch.setattr(Trainer, name, self._wrapped(getattr(Trainer, name)))
        # Every learning phase can be stopped, however quick it is.
        monkeypatch.setattr(on_policy, "_SLOW_LEARNING", -1.0)

    def _wrapped(self, real: Ask) -> Ask:
        def ask(trainer: Trainer) -> bool:
            self.asked += 1
            if self.at is not None and self.asked >= self.at:
                trainer.stopping.signals.received = "SIGTERM"
            return real(trainer)

        return ask


def finish(result: TrainResult, interruptions: Interruptions, gap: int) -> TrainResult:
    """Resume, being interrupted again after ``gap`` questions and then a few more, to the end.

    An evaluation or a learning phase that is interrupted is begun again: it must fit in a gap.
    """
    for attempt in range(100):
        if not result.interrupted:
            return result
        interruptions.at = interruptions.asked + gap + 9 * attempt
        result = ExperimentManager.resume(result.run_dir).train()
    raise AssertionError("the run makes no progress")


def small(make_config: MakeConfig, algo: str, **overrides: Any) -> TrainConfig[Any]:
    settings = {"total_timesteps": 384, "eval_interval": 128, "checkpoint_interval": 0}
    if plain(algo) in ("ppo", "ppg", "recurrent_ppo"):
        settings["num_steps"] = 32
    if algo in ("recurrent_ppo", "ppo+gru"):
        settings["sequence_length"] = 16
    if algo in ("idqn", "vdn", "qmix"):  # a step has a transition of each agent
        settings["total_timesteps"] = 576
    return make_config(algo=algo, **{**settings, **overrides})


@pytest.mark.parametrize("algo", [*sorted(ALGORITHMS), *WITH_MEMORY])
def test_interrupted_anywhere_it_ends_the_same(
    algo: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(make_config, algo)
    whole = ExperimentManager.setup(config).train()
    interruptions = Interruptions(monkeypatch)
    ExperimentManager.setup(config).train()
    questions = interruptions.asked
    assert questions > 100, "steps, updates and evaluation episodes all ask"
    gap = max(7, questions // 12)
    interruptions.at = interruptions.asked + gap
    first = ExperimentManager.setup(config).train()
    assert first.interrupted
    result = finish(first, interruptions, gap)
    assert_same_run(whole.run_dir, result.run_dir)
    assert len(read_json(result.run_dir / "metadata.json")["resumes"]) >= 5


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "normalised": (
        "ppo", {"env_id": "Pendulum-v1", "normalize_obs": True, "normalize_reward": True}
    ),
    "next_step": ("ppo", {"vectorization": "native"}),
    "dict_masks": ("ppo", {"env_id": "probe/MaskedActions-v0"}),
    "prioritised": ("dqn", {"prioritized": True, "n_step": 3, "gradient_steps": 3}),
    "fractions": ("sac", {"gradient_steps": 0.3}),
    "replay_normalised": ("dqn", {"normalize_obs": True}),
    "replay_native": ("dqn", {"vectorization": "native"}),
    "many_updates": ("td3", {"train_freq": 32, "gradient_steps": -1}),
    "groups_of_agents": (
        "idqn",
        {
            "env_id": "pettingzoo:mpe2/simple_speaker_listener_v4", "policies": "separate",
            "gradient_steps": 3, "prioritized": True, "n_step": 2, "normalize_obs": True,
            "eval_interval": 0,
        },
    ),
    "teams": ("qmix", {"prioritized": True, "n_step": 3, "normalize_obs": True}),
    "recurrent_native": ("recurrent_ppo", {"vectorization": "native"}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_variants_end_the_same(
    name: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo, overrides = VARIANTS[name]
    config = small(make_config, algo, **overrides)
    whole = ExperimentManager.setup(config).train()
    interruptions = Interruptions(monkeypatch)
    interruptions.at = 23
    first = ExperimentManager.setup(config).train()
    result = finish(first, interruptions, 101)
    assert_same_run(whole.run_dir, result.run_dir)


def test_every_moment_of_an_iteration(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stop at each question in turn: within the rollout, the updates and the evaluation."""
    config = small(
        make_config, "ppo", num_steps=4, total_timesteps=16, eval_interval=8, eval_episodes=1
    )
    whole = ExperimentManager.setup(config).train()
    interruptions = Interruptions(monkeypatch)
    for moment in itertools.count(1):
        interruptions.asked, interruptions.at = 0, moment
        first = ExperimentManager.setup(config).train()
        interruptions.at = None
        if not first.interrupted:
            break
        result = ExperimentManager.resume(first.run_dir).train()
        assert_same_run(whole.run_dir, result.run_dir)
        if moment > 30:  # the rest are steps of evaluations
            break
    assert moment > 30


def test_an_overdue_checkpoint_is_written_within_an_iteration(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after it, the run resumes within the iteration and ends the same."""
    config = small(make_config, "ppo", eval_episodes=0)
    whole = ExperimentManager.setup(config).train()
    saved: list[bool] = []

    class Overdue(Callback):
        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            if event.step == 128:
                trainer.pause_at = 0.0

        def on_checkpoint(self, trainer: Any, event: Any) -> None:
            saved.append(trainer.has_unfinished_work)
            if saved[-1]:
                raise KeyboardInterrupt  # as suddenly as a kill: nothing is saved after this

    with pytest.raises(KeyboardInterrupt):
        ExperimentManager.setup(config, callbacks=[Overdue()]).train()
    assert saved[-1]
    run = max((p for p in config.output_dir.iterdir() if p != whole.run_dir), key=os.path.getmtime)
    assert load_checkpoint(run / "checkpoints" / "last.pt")["training"]["unfinished"]["iteration"]
    result = ExperimentManager.resume(run).train()
    assert_same_run(whole.run_dir, result.run_dir)


def test_an_overdue_checkpoint_within_slow_learning_holds_the_state_before_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_policy, "_SLOW_LEARNING", -1.0)
    config = small(make_config, "ppg", eval_episodes=0)
    whole = ExperimentManager.setup(config).train()
    moments: list[int] = []
    real = Trainer.stops_work

    def stops_work(trainer: Trainer) -> bool:
        moments.append(trainer.global_step)
        if len(moments) == 40:
            trainer.pause_at = 0.0
            real(trainer)
            raise KeyboardInterrupt
        return real(trainer)

    monkeypatch.setattr(Trainer, "stops_work", stops_work)
    with pytest.raises(KeyboardInterrupt):
        ExperimentManager.setup(config).train()
    run = max((p for p in config.output_dir.iterdir() if p != whole.run_dir), key=os.path.getmtime)
    assert_same_run(whole.run_dir, ExperimentManager.resume(run).train().run_dir)


def _after(count: int) -> Callable[[], bool]:
    asked = itertools.count()
    return lambda: next(asked) >= count


def test_an_inexact_resume_within_a_rollout_ends_its_episodes(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments that cannot be restored begin anew: the rollout so far ends in truncation."""
    for algo in ("ppo", "recurrent_ppo"):
        config = small(make_config, algo, env_id="test_pause/Unseeded-v0", eval_episodes=0)
        trainer = ExperimentManager.setup(config)
        monkeypatch.setattr(trainer, "pauses", _after(40))
        assert trainer.iterate(_progress(trainer)) is not None
        assert trainer.iterate(_progress(trainer)) is None
        CheckpointCallback(0, 1)._save(trainer)
        trainer.close()
        with pytest.warns(UserWarning, match="approximate"):
            resumed: Any = ExperimentManager.resume(trainer.run_dir)
        buffer, position = resumed.buffer, resumed.buffer.position
        assert 0 < position < 32
        assert buffer.dones[position - 1].tolist() == [1.0, 1.0]
        times, rows, _ = zip(*buffer._final, strict=True)
        assert times[-1] == position - 1
        assert rows[-1].tolist() == [0, 1]
        assert resumed.train().metrics["global_step"] == 384


def _progress(trainer: Trainer) -> Any:
    from rl_training.types import Progress

    return Progress(trainer.global_step, trainer.total)


SCRIPT = """\
import signal, sys, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from rl_training import PPO, SAC, TrainConfig

class Slow(PendulumEnv):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)

gym.register("Slow-v0", Slow, max_episode_steps=200)
algo, mode = sys.argv[1:]
knobs = {"learning_starts": 4, "batch_size": 4} if algo == "sac" else {"num_steps": 2048}
if mode == "evaluation":
    knobs = {"num_steps": 8}
config = TrainConfig(algo=algo, env_id="Slow-v0", num_envs=1, total_timesteps=100_000,
                     algo_kwargs=knobs, eval_interval=8 if mode == "evaluation" else 0,
                     eval_episodes=50, tensorboard=False, progress=False)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
print("ready", flush=True)
model = {"ppo": PPO, "sac": SAC}[algo](config)
try:
    model.learn()
except KeyboardInterrupt:  # what SIGINT means in Python, once the run is saved
    pass
print(model.result.interrupted)
"""


@pytest.mark.parametrize(
    ("algo", "mode", "number"),
    [
        ("sac", "training", "SIGTERM"),
        ("ppo", "training", "SIGINT"),
        ("ppo", "evaluation", "SIGHUP"),
    ],
)
def test_a_real_signal_is_honoured_within_a_second(
    algo: str, mode: str, number: str, tmp_path: Path
) -> None:
    """An environment that takes 20 ms a step, an iteration of 20 s or more."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, algo, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/checkpoints/last.pt")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        sent = time.time()
        process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "True\n"), err
    assert f"{number}: saving a checkpoint" in err
    (run,) = tmp_path.glob("runs/*")
    # About a second; the rest is for a busy machine.
    assert (run / "summary.json").stat().st_mtime - sent < 3
    assert read_json(run / "summary.json")["status"] == "interrupted"
    unfinished = load_checkpoint(run / "checkpoints" / "last.pt")["training"]["unfinished"]
    assert unfinished["report" if mode == "evaluation" else "iteration"] is not None


def test_sighup_stays_ignored_under_nohup(make_config: MakeConfig) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        class HangUp(Callback):
            def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
                os.kill(os.getpid(), signal.SIGHUP)

        result = ExperimentManager.setup(make_config(), callbacks=[HangUp()]).train()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not result.interrupted


def test_a_second_signal_is_recorded_as_interrupted(make_config: MakeConfig) -> None:
    class Twice(Callback):
        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    trainer = ExperimentManager.setup(make_config(), callbacks=[Twice()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert read_json(trainer.run_dir / "summary.json")["status"] == "interrupted"


def test_an_early_stop_interrupted_in_its_last_evaluation_stays_an_early_stop(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Callback):
        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            trainer.request_stop("far enough")
            trainer.stopping.signals.received = "SIGTERM"

    config = small(make_config, "ppo", eval_interval=0)
    first = ExperimentManager.setup(config, callbacks=[Stop()]).train()
    assert first.interrupted
    result = ExperimentManager.resume(first.run_dir).train()
    assert (result.stop_reason, result.interrupted) == ("far enough", False)
    assert result.metrics["global_step"] == 64
    assert "eval/return_mean" in result.metrics


def test_no_signal_is_touched_in_another_thread(make_config: MakeConfig) -> None:
    results: list[TrainResult] = []
    trainer = ExperimentManager.setup(make_config(total_timesteps=128))
    thread = threading.Thread(target=lambda: results.append(trainer.train()))
    thread.start()
    thread.join(60)
    assert results
