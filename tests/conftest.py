"""Shared fixtures. Importing `probe_envs` registers the small environments tests train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import probe_envs  # noqa: F401 - registers environments
from rl_training.config import TrainConfig
from rl_training.experiment.registry import ALGORITHMS

pytest.register_assert_rewrite("state_compare")

QUICK_KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 64},
    "dqn": {"learning_starts": 64, "batch_size": 32, "train_freq": 4, "buffer_size": 300},
}
QUICK_KNOBS["a2c"] = {"num_steps": 16}
QUICK_KNOBS["ppg"] = {"num_steps": 64, "policy_phases": 3, "aux_epochs": 2}
QUICK_KNOBS["recurrent_ppo"] = {"num_steps": 64, "lstm_size": 16}
QUICK_KNOBS["drqn"] = {
    **{name: value for name, value in QUICK_KNOBS["dqn"].items() if name != "batch_size"},
    "batch_sequences": 8,
    "lstm_size": 16,
}
QUICK_KNOBS["sac"] = QUICK_KNOBS["td3"] = {**QUICK_KNOBS["dqn"], "hidden_sizes": [32, 32]}


def takes_discrete(algo: str) -> bool:
    """Whether an algorithm is tried on discrete actions, or on continuous ones."""
    return "Discrete" in ALGORITHMS[algo].actions


def any_env(algo: str) -> str:
    """A real environment that an algorithm can be trained on."""
    return "CartPole-v1" if takes_discrete(algo) else "Pendulum-v1"


def probe(algo: str, name: str) -> dict[str, Any]:
    """A probe environment that an algorithm can be trained on."""
    kwargs = {} if takes_discrete(algo) else {"continuous": True}
    return {"env_id": f"probe/{name}-v0", "env_kwargs": kwargs}


MakeConfig = Callable[..., TrainConfig[Any]]


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the list of the user's own checkpoints out of the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks: one thread is fastest and keeps parallel test runs honest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A quick, quiet config; keywords replace fields and algorithm knobs alike."""

    def make(**overrides: Any) -> TrainConfig[Any]:
        algo = overrides.pop("algo", "ppo")
        base: TrainConfig[Any] = TrainConfig(
            algo=algo,
            env_id=any_env(algo),
            total_timesteps=512,
            num_envs=2,
            seed=7,
            output_dir=tmp_path / "runs",
            eval_episodes=2,
            progress=False,
            tensorboard=False,
        )
        return base.with_overrides(**{**QUICK_KNOBS[algo], **overrides})

    return make
