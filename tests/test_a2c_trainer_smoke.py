"""A2C on the runtime: short runs on every kind of space, and what its settings change.

Tests over the registry cover the rest: files, determinism, resume, pauses, probes.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training
from conftest import MakeConfig
from rl_training import A2C
from rl_training.checkpointing import load_checkpoint
from rl_training.runtime.a2c_trainer import train_a2c
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.setup import ExperimentManager
from state_compare import metric_rows

SPACES: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(3, start=-1),
    "box": gym.spaces.Box(-1, 1, (2, 2)),
    "unbounded box": gym.spaces.Box(-np.inf, np.inf, (2,)),
    "multi_discrete": gym.spaces.MultiDiscrete([2, 3]),
    "multi_binary": gym.spaces.MultiBinary(3),
}
VECTORS = gym.spaces.Dict(
    {
        "a": gym.spaces.Box(-1, 1, (2,), np.float32),
        "b": gym.spaces.Box(-9, 9, (2, 3), np.float64),
    }
)
IMAGE = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)


class SevenSteps(gym.Env[Any, Any]):
    """Random observations; an episode is truncated after seven steps of reward 1."""

    def __init__(self, observation: gym.Space[Any], action: gym.Space[Any]) -> None:
        self.observation_space = observation
        self.action_space = action

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation_space.sample(), 1.0, False, self.t == 7, {}


def test_it_is_exported_like_every_algorithm() -> None:
    assert rl_training.A2C is rl_training.api.A2C
    assert rl_training.train_a2c is train_a2c


def test_its_settings_reach_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(algo="a2c", hidden_sizes=[8, 12])
    trainer = ExperimentManager.setup(config)
    assert type(trainer) is OnPolicyTrainer
    learner: Any = trainer.learner
    shapes = {tuple(p.shape) for p in learner.module.parameters()}
    assert {(8, 4), (12, 8), (2, 12), (1, 12)} <= shapes
    optimizer = learner.step.optimizer
    assert (optimizer.name, optimizer.betas[1], optimizer.eps) == ("rmsprop", 0.99, 1e-5)
    trainer.close()


@pytest.mark.parametrize("space", SPACES)
def test_every_action_space_trains_on_dict_observations(
    space: str, make_config: MakeConfig
) -> None:
    config = make_config(algo="a2c", normalize_obs=True, total_timesteps=128)
    trainer = ExperimentManager.setup(config, env_fn=lambda: SevenSteps(VECTORS, SPACES[space]))
    assert trainer.train().metrics["eval/return_mean"] == 7.0


def test_it_trains_on_images(make_config: MakeConfig) -> None:
    config = make_config(algo="a2c", total_timesteps=64, feature_size=16)
    env_fn = lambda: SevenSteps(IMAGE, SPACES["discrete"])  # noqa: E731
    trainer = ExperimentManager.setup(config, env_fn=env_fn)
    learner: Any = trainer.learner
    before = learner.step.flat.clone()
    metrics = trainer.train().metrics
    assert metrics["eval/return_mean"] == 7.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert not torch.equal(learner.step.flat, before)


def test_reset_only_rows_of_native_vectors_are_not_counted(make_config: MakeConfig) -> None:
    config = make_config(algo="a2c", vectorization="native", num_envs=4, total_timesteps=2000)
    trainer = ExperimentManager.setup(config)
    result = trainer.train()
    rows = trainer.iteration * 4 * 16
    episodes_ended = rows - int(result.metrics["global_step"])
    assert result.metrics["global_step"] >= 2000
    assert 20 < episodes_ended < rows / 8


def test_one_update_and_one_row_per_rollout(make_config: MakeConfig) -> None:
    result = train_a2c(make_config(algo="a2c", lr_schedule="linear", eval_episodes=0), num_steps=5)
    rows = [row for row in metric_rows(result.run_dir) if "losses/loss" in row]
    assert [row["step"] for row in rows] == list(range(10, 521, 10))
    rates = [row["losses/learning_rate"] for row in rows]
    assert rates == pytest.approx([7e-4 * (1 - i / 52) for i in range(52)])
    state = load_checkpoint(result.checkpoint_path)["algorithm"]["optimizer"]
    assert state["step"].item() == 52


def test_the_managed_class_learns_and_predicts(make_config: MakeConfig) -> None:
    model = A2C(make_config(algo="a2c"))
    result = model.learn()
    obs = np.zeros((3, 4), np.float32)
    again = A2C.load(result.run_dir)
    assert np.array_equal(model.act(obs), again.act(obs))
