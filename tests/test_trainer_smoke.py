"""One short run of every algorithm: what it returns, what it leaves on disk, how it counts."""

from __future__ import annotations

import json
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training.trainer
from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, EnvironmentFailure, NonFiniteError
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS, get_spec
from rl_training.runtime.ppo_trainer import train_ppo
from state_compare import metric_rows


class TinyEncoder(torch.nn.Module):
    """Four numbers to eight."""

    output_size = 8

    def __init__(self, obs_spec: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(obs_spec.leaves[""].size, self.output_size)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(obs))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_run_leaves_everything_behind(algo: str, make_config: MakeConfig) -> None:
    config = make_config(algo=algo, tensorboard=True)
    result = ExperimentManager.setup(config).train()
    assert result.metrics["global_step"] >= config.total_timesteps
    assert "eval/return_mean" in result.metrics
    assert all(math.isfinite(value) for value in result.metrics.values())
    names = {path.name for path in result.run_dir.iterdir()}
    expected = {"config.yaml", "metadata.json", "metrics.jsonl", "summary.json", "checkpoints"}
    assert expected | {"tensorboard"} == names - {"replay"}
    assert result.checkpoint_path.is_file()
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["metrics"]["eval/return_mean"] == result.metrics["eval/return_mean"]


def test_overrides_reach_fields_and_knobs_alike(make_config: MakeConfig) -> None:
    result = train_ppo(make_config(), total_timesteps=1024, num_envs=2, num_steps=64)
    assert result.metrics["global_step"] == 1024
    config = load_checkpoint(result.checkpoint_path)["config"]
    assert (config["num_envs"], config["algo_kwargs"]["num_steps"]) == (2, 64)
    with pytest.raises(ConfigError, match="Did you mean 'num_steps'"):
        train_ppo(make_config(), num_stepz=64)


def test_the_function_surface_is_the_same_function() -> None:
    assert rl_training.trainer.train_ppo is train_ppo


@pytest.mark.parametrize(("asked", "done"), [(1, 128), (128, 128), (129, 256), (1000, 1024)])
def test_totals_round_up_to_whole_iterations(
    asked: int, done: int, make_config: MakeConfig
) -> None:
    result = train_ppo(make_config(), total_timesteps=asked, eval_episodes=0)
    assert result.metrics["global_step"] == done


def test_native_reset_rows_are_not_counted(make_config: MakeConfig) -> None:
    config = make_config(vectorization="native", num_envs=4, total_timesteps=2000)
    trainer = ExperimentManager.setup(config)
    result = trainer.train()
    rows = trainer.iteration * 4 * 64
    episodes_ended = rows - int(result.metrics["global_step"])
    assert result.metrics["global_step"] >= 2000
    assert 20 < episodes_ended < rows / 8


@pytest.mark.parametrize(
    ("how", "what"), [("nan", "non-finite observation"), ("nan_reward", "non-finite reward")]
)
def test_a_nan_names_tensor_step_and_environment(
    how: str, what: str, make_config: MakeConfig
) -> None:
    config = make_config(
        env_id="probe/Broken-v0", env_kwargs={"how": how, "at": 100}, total_timesteps=2048
    )
    trainer = ExperimentManager.setup(config)
    with pytest.raises(NonFiniteError, match=f"{what}.*global step 128"):
        trainer.train()
    assert load_checkpoint(trainer.run_dir / "checkpoints" / "last.pt")
    summary = json.loads((trainer.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"


def test_a_diverged_loss_is_an_error(make_config: MakeConfig) -> None:
    with pytest.raises(NonFiniteError, match="training diverged"):
        train_ppo(make_config(), learning_rate=1e30, total_timesteps=4096, max_grad_norm=1e30)


def test_log_interval_steps_thins_the_rows_but_keeps_the_last(make_config: MakeConfig) -> None:
    result = train_ppo(make_config(), total_timesteps=1280, log_interval_steps=500, eval_episodes=0)
    steps = [row["step"] for row in metric_rows(result.run_dir) if "step" in row]
    assert steps == [512, 1024, 1280]


@pytest.mark.parametrize(
    "space",
    ["MultiDiscrete([2, 3])", "MultiBinary(3)", "Box(-1, 1, (2, 2))", "Discrete(3, start=-1)"],
)
def test_every_action_space_trains(space: str, make_config: MakeConfig) -> None:
    action_space: Any = eval(space, {**vars(gym.spaces)})

    class Env(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict(
            {
                "a": gym.spaces.Box(-1, 1, (2,), np.float32),
                "b": gym.spaces.Box(-9, 9, (2, 3), np.float64),
            }
        )

        def __init__(self) -> None:
            self.action_space = action_space

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            assert action_space.contains(action), action
            self.t += 1
            return self.observation_space.sample(), 1.0, False, self.t == 7, {}

    config = make_config(normalize_obs=True)
    result = ExperimentManager.setup(config, env_fn=Env).train()
    assert result.metrics["eval/return_mean"] == 7.0


def test_a_users_encoder_is_used_and_restored(make_config: MakeConfig) -> None:
    config = make_config(encoder="test_trainer_smoke:TinyEncoder")
    result = ExperimentManager.setup(config).train()
    names = load_checkpoint(result.checkpoint_path)["algorithm"]["model"]
    assert "encoder.layer.weight" in names
    with pytest.raises(ConfigError, match=r"encoder.*Missing"):
        ExperimentManager.setup(make_config(encoder="test_trainer_smoke:Missing"))


def test_an_image_too_small_for_the_network_is_refused(make_config: MakeConfig) -> None:
    class Env(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

    with pytest.raises(ConfigError, match=r"images of 8 x 8 are too small for NatureCNN.*36 x 36"):
        ExperimentManager.setup(make_config(), env_fn=Env)


def test_specs_are_complete() -> None:
    for name in ALGORITHMS:
        config: TrainConfig[Any] = TrainConfig(algo=name)
        assert isinstance(config.algo_kwargs, get_spec(name).config)


class IdleEncoder(TinyEncoder):
    """Has a parameter that the loss never reaches."""

    def __init__(self, obs_spec: Any) -> None:
        super().__init__(obs_spec)
        self.unused = torch.nn.Parameter(torch.ones(3))


def test_an_unused_parameter_is_left_alone(make_config: MakeConfig) -> None:
    config = make_config(encoder="test_trainer_smoke:IdleEncoder")
    result = ExperimentManager.setup(config).train()
    model = load_checkpoint(result.checkpoint_path)["algorithm"]["model"]
    assert model["encoder.unused"].tolist() == [1.0, 1.0, 1.0]


def test_a_mask_that_allows_nothing_is_an_error(make_config: MakeConfig) -> None:
    space = gym.spaces.Dict(
        {
            "x": gym.spaces.Box(-1, 1, (1,), np.float32),
            "action_mask": gym.spaces.Box(0, 1, (5,), np.int8),
        }
    )

    class Env(gym.Env[Any, Any]):
        observation_space = space
        action_space = gym.spaces.MultiDiscrete([2, 3])

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.t = 0
            return self.observe(), {}

        def observe(self) -> Any:
            # The first component keeps a choice, the second has none left at the end.
            mask = np.array([1, 0, *([1, 1, 0] if self.t < 9 else [0, 0, 0])], np.int8)
            return {"x": np.zeros(1, np.float32), "action_mask": mask}

        def step(self, action: Any) -> Any:
            assert action[0] == 0
            assert action[1] in (0, 1)
            self.t += 1
            return self.observe(), 0.0, False, False, {}

    with pytest.raises(EnvironmentFailure, match=r"environment 0 \(.*\) allows no action"):
        ExperimentManager.setup(make_config(eval_episodes=0), env_fn=Env).train()
