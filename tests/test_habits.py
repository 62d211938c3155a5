"""What users of other libraries write first is explained, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training import PPO, SAC, Callback, TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.runtime.trainer import Trainer
from test_one_line_use import SMALL, Corridor


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Masked(gym.Env[Any, Any]):
    """Only the last of three actions is legal."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 5
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert action == 2
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, {}

    def action_masks(self) -> Any:
        return np.array([0, 0, 1], np.int8)


def any_model() -> Any:
    return PPO("CartPole-v1", **SMALL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPO("CartPole-v1", 8), "one argument without a name"),
        (lambda: PPO("ppo/cartpole"), r"config_from_file\('ppo/cartpole'\)"),
        (lambda: PPO("CartPole-v1", env_fn=Corridor), "give one of them"),
        (lambda: PPO(gym.make_vec("CartPole-v1", 2)), "a vector environment cannot be given"),  # type: ignore[arg-type]
        (lambda: PPO("CartPole-v1", policy_kwargs={}), "critic_hidden_sizes"),
        (lambda: PPO("CartPole-v1", use_sde=True), "not available"),
        (lambda: PPO("CartPole-v1", batch_size=64), "Use num_minibatches"),
        (lambda: PPO("CartPole-v1", tensorboard_log="logs"), "on by default"),
        (lambda: PPO("CartPole-v1", features_extractor_class=1), "Did you mean 'encoder'"),
        (lambda: PPO("CartPole-v1", hidden_sizes={"pi": [8]}), "critic_hidden_sizes"),
        (lambda: PPO("CartPole-v1", learning_rate=lambda left: left), "lr_schedule"),
        (lambda: SAC("Pendulum-v1", ent_coef="auto"), "leave ent_coef unset"),
        (lambda: any_model().learn(64, callback=None), "use callbacks"),
        (lambda: any_model().learn(64, gamma=0.9), "settings belong to the constructor"),
        (lambda: any_model().learn("abc"), "must be a whole number"),
        (lambda: any_model().evaluate(gym.make("CartPole-v1")), "env_fn"),
        (lambda: any_model().evaluate(n_eval_episodes=3), "use num_episodes"),
        (lambda: PPO.load("nowhere", env=1), "use env_fn"),  # type: ignore[arg-type]
        (lambda: any_model().act(gym.make("CartPole-v1").reset()), "the observation alone"),
        (lambda: any_model().act(np.zeros(4), action_masks=[1, 1]), "trained without them"),
    ],
)
def test_it_is_explained(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("set_env", "env_fn"), ("num_timesteps", "global_step"), ("evaluat", "Did you mean")],
)
def test_attributes_of_other_libraries_have_a_hint(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(any_model(), name)


def test_a_class_of_environments_may_come_first() -> None:
    model = PPO(Corridor, **SMALL)
    assert model.learn(64).metrics["global_step"] == 64
    assert repr(model).startswith("<PPO on Corridor: 64 steps trained, in runs")


@pytest.mark.parametrize("steps", [0, -5, 1.5])
def test_a_second_call_checks_its_number_too(steps: Any) -> None:
    model = any_model()
    model.learn(64)
    with pytest.raises(ConfigError, match="total_timesteps"):
        model.learn(steps)
    assert model.learn(1e2).metrics["global_step"] == 192  # 164, in whole rollouts
    assert model.learn(32).metrics["global_step"] == 224


def test_a_refused_environment_leaves_the_model_as_it_was() -> None:
    model = any_model()
    model.learn(64)
    with (
        pytest.warns(UserWarning, match="a new run starts"),
        pytest.raises(UserError, match=r"float32 of shape \(6,\)"),
    ):
        model.learn(64, env_fn=lambda: gym.make("Acrobot-v1"))
    assert len(model.evaluate(2).returns) == 2
    assert model.learn(64).metrics["global_step"] == 128


def test_masks_given_apart_from_the_observation() -> None:
    model = PPO(env_fn=Masked, **SMALL)
    model.learn(64)
    obs = np.zeros(2, np.float32)
    assert model.act(obs, action_masks=[0, 1, 0]) == 1
    assert model.predict(obs, action_masks=[1, 0, 0])[0] == 0
    with pytest.raises(ConfigError, match="needs the legal actions"):
        model.predict(obs)


def test_a_loaded_run_asks_for_its_function_again() -> None:
    model = PPO(env_fn=Corridor, **SMALL)
    model.learn(64)
    assert model.run_dir is not None
    with pytest.raises(UserError, match=r"PPO\.load\(path, env_fn"):
        PPO.load(model.run_dir).learn(64)


class Misspelt(Callback):
    def on_iterations(self, trainer: Trainer, event: Any) -> None:
        raise AssertionError


class Theirs:
    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Misspelt(), "Did you mean 'on_iteration'"),
        (Theirs(), "derive from rl_training.Callback"),
        (lambda trainer: None, "two arguments"),
    ],
)
def test_callbacks_that_would_never_be_called_are_refused(callback: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        any_model().learn(64, callbacks=callback)


def test_a_config_names_its_settings() -> None:
    with pytest.raises(ConfigError, match="must be a number"):
        any_model().learn(64, callbacks=lambda trainer, event: trainer.log("x", "y"))
    assert TrainConfig(algo="sac", env_id="Pendulum-v1").num_envs == 1
