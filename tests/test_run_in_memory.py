"""``learn(run_dir=None)``: a run that writes nothing, and one in a folder that the user names."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_training import DQN, PPO, SAC
from rl_training.errors import ConfigError, UserError
from rl_training.runtime.callbacks import CheckpointCallback
from test_one_line_use import SMALL

REPLAY: dict[str, Any] = {
    "learning_starts": 20,
    "buffer_size": 200,
    "batch_size": 16,
    "hidden_sizes": (8,),
    "progress": False,
    "tensorboard": False,
    "torch_threads": 1,
    "eval_episodes": 1,
    "eval_interval": 50,
}
MODELS: dict[str, Callable[[], Any]] = {
    "ppo": functools.partial(PPO, "CartPole-v1", **SMALL),
    "dqn": functools.partial(DQN, "CartPole-v1", **REPLAY),
    "sac": functools.partial(SAC, "Pendulum-v1", **REPLAY),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_same_weights(one: Any, other: Any) -> None:
    mine, theirs = one.policy.module.state_dict(), other.policy.module.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_written_and_the_same_is_learnt(name: str, folder: Path) -> None:
    in_memory, on_disk = MODELS[name](), MODELS[name]()
    in_memory.learn(96, run_dir=None)
    np.random.seed(7)  # noqa: NPY002 - a program may do so between two calls
    in_memory.learn(64)
    assert not list(folder.iterdir())
    on_disk.learn(96)
    on_disk.learn(64)
    assert in_memory.result is not None
    assert on_disk.result is not None
    assert in_memory.result.metrics["global_step"] == 160
    assert_same_weights(in_memory, on_disk)
    times = {key for key in on_disk.result.metrics if key.startswith("time/")}
    assert {k: v for k, v in in_memory.result.metrics.items() if k not in times} == {
        k: v for k, v in on_disk.result.metrics.items() if k not in times
    }


def test_it_has_no_folder_but_a_policy_that_can_be_saved(folder: Path) -> None:
    model = MODELS["ppo"]()
    result = model.learn(64, run_dir=None)
    assert model.run_dir is None
    assert result.folder is None
    with pytest.raises(UserError, match="kept in memory"):
        _ = result.run_dir
    path = model.save(folder / "policy")
    assert PPO.load(path).evaluate(2).returns == model.evaluate(2).returns


def test_ctrl_c_keeps_the_run_and_learn_finishes_it() -> None:
    def interrupt(trainer: Any, event: Any) -> None:
        if event.step == 64:
            signal.raise_signal(signal.SIGINT)

    model, whole = MODELS["ppo"](), MODELS["ppo"]()
    with pytest.raises(KeyboardInterrupt, match="memory"):
        model.learn(128, callbacks=interrupt, run_dir=None)
    assert model.learn().metrics["global_step"] == 128
    whole.learn(128, run_dir=None)
    assert_same_weights(model, whole)
    assert model.learn() is model.result  # nothing is left to do


def test_what_needs_a_folder_is_refused() -> None:
    model = MODELS["ppo"]()
    with pytest.raises(ConfigError, match="CheckpointCallback needs a run folder"):
        model.learn(64, callbacks=CheckpointCallback(10, 1), run_dir=None)
    with pytest.raises(ConfigError, match="wandb: true needs a run folder"):
        PPO("CartPole-v1", wandb=True, **SMALL).learn(64, run_dir=None)
    model.learn(64, run_dir=None)
    with pytest.raises(ConfigError, match="init_from"):
        model.learn(64, run_dir="elsewhere")


def test_the_environments_are_closed_with_the_model() -> None:
    closed: list[bool] = []

    class Noted(gym.Wrapper[Any, Any, Any, Any]):
        def close(self) -> None:
            closed.append(True)
            super().close()

    model = PPO(env_fn=lambda: Noted(gym.make("CartPole-v1")), **SMALL)
    model.learn(64, run_dir=None)
    assert not closed
    del model
    assert len(closed) == 2


def test_a_folder_of_ones_own_choice(folder: Path) -> None:
    model = MODELS["ppo"]()
    assert model.learn(64, run_dir="my_run").run_dir == Path("my_run")
    assert (folder / "my_run" / "checkpoints" / "last.pt").is_file()
    assert model.learn(64, run_dir="my_run").metrics["global_step"] == 128
    with pytest.raises(UserError, match="not empty"):
        MODELS["ppo"]().learn(64, run_dir="my_run")


def test_another_folder_starts_a_new_run_from_the_weights(folder: Path) -> None:
    model = MODELS["ppo"]()
    model.learn(64, run_dir="first")
    with pytest.warns(UserWarning, match="a new run starts from the weights"):
        model.learn(64, run_dir="second")
    assert (folder / "second" / "config.yaml").read_text().count("init_from: first")
