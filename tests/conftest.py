"""Shared fixtures. Importing `probe_envs` registers the small environments tests train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import probe_envs  # noqa: F401 - registers environments
from rl_training.config import TrainConfig

pytest.register_assert_rewrite("state_compare")

QUICK_KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 64},
    "dqn": {"learning_starts": 64, "batch_size": 32, "train_freq": 4, "buffer_size": 300},
}

MakeConfig = Callable[..., TrainConfig[Any]]


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
