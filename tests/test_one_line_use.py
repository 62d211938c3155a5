"""The first lines that a newcomer writes."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from rl_training import DQN, PPO, SAC, StopOnReturn, TrainConfig, train_sac
from rl_training.checkpointing import load_checkpoint, state_digest
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import evaluate_actor

QUIET: dict[str, Any] = {
    "progress": False,
    "tensorboard": False,
    "eval_episodes": 0,
    "torch_threads": 1,
}
SMALL = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, **QUIET}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Corridor(gym.Wrapper[Any, Any, Any, Any]):
    """An environment of one's own."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=20))


def test_an_environment_by_its_id() -> None:
    model = PPO("CartPole-v1", **SMALL)
    result = model.learn(64)
    assert result.metrics["global_step"] == 64
    assert model.run_dir == result.run_dir
    assert model.config.env_id == "CartPole-v1"


def test_settings_are_keywords_and_the_algorithm_is_not_named_twice() -> None:
    small: dict[str, Any] = {
        "learning_starts": 20,
        "buffer_size": 200,
        "batch_size": 16,
        "hidden_sizes": (8,),
    }
    model = SAC("Pendulum-v1", seed=3, learning_rate=1e-3, num_envs=1, **small, **QUIET)
    assert (model.config.algo, model.config.seed) == ("sac", 3)
    assert model.config.algo_kwargs.learning_rate == 1e-3
    assert model.learn(40).metrics["global_step"] == 40


def test_a_config_without_an_algorithm_is_one_for_the_class() -> None:
    config: TrainConfig[Any] = TrainConfig(env_id="Pendulum-v1")
    assert config.algo == "ppo"
    assert not config.names_algo
    assert SAC(config).config.algo == "sac"
    assert SAC(config.with_overrides(seed=5)).config.seed == 5
    assert SAC(config=config).config.env_id == "Pendulum-v1"
    given: TrainConfig[Any] = TrainConfig(env_id="Pendulum-v1", algo_kwargs={"gamma": 0.9})
    assert SAC(given).config.algo_kwargs.gamma == 0.9
    with pytest.raises(ConfigError, match="algo: ppo"):
        SAC(TrainConfig(algo="ppo", env_id="Pendulum-v1"))
    with pytest.raises(ConfigError, match="algo: ppo"):
        train_sac(TrainConfig(algo="ppo", env_id="Pendulum-v1"))


def test_an_environment_of_ones_own_needs_no_name() -> None:
    model = DQN(env_fn=Corridor, num_envs=1, learning_starts=20, buffer_size=100, **QUIET)
    assert model.config.env_id == "Corridor"
    assert model.learn(40).metrics["global_step"] == 40
    assert model.evaluate(2).lengths
    assert max(model.evaluate(2, env_fn=Corridor).lengths) <= 20


@pytest.mark.parametrize("wrong", [3, ["CartPole-v1"]])
def test_anything_else_is_refused_with_what_is_taken(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="env_fn"):
        PPO(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PPO("MlpPolicy", "CartPole-v1"),
        lambda: PPO("MlpPolicy", env_fn=Corridor),
        lambda: DQN("CnnPolicy"),
    ],
)
def test_the_policy_argument_of_other_libraries_is_explained(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="has no policy argument"):
        make()


def test_a_second_call_trains_so_many_more() -> None:
    model = PPO("CartPole-v1", anneal_lr=False, **SMALL)
    first = model.learn(64)
    second = model.learn(64)
    assert second.metrics["global_step"] == 128
    assert second.run_dir == first.run_dir
    assert model.learn().metrics["global_step"] == 128  # nothing is left to do
    whole = PPO("CartPole-v1", anneal_lr=False, **SMALL).learn(128)
    states = [load_checkpoint(run.checkpoint_path)["algorithm"] for run in (second, whole)]
    assert state_digest(states[0]) == state_digest(states[1])


def test_a_loaded_run_continues_in_its_folder() -> None:
    first = PPO("CartPole-v1", **SMALL).learn(64)
    loaded = PPO.load(first.run_dir)
    with pytest.raises(CheckpointError, match="complete"):
        loaded.learn()
    again = loaded.learn(64)
    assert again.run_dir == first.run_dir
    assert again.metrics["global_step"] == 128


def test_a_file_outside_a_run_folder_starts_a_new_run_from_its_weights(tmp_path: Path) -> None:
    model = PPO("CartPole-v1", **SMALL)
    first = model.learn(64)
    path = model.save(tmp_path / "policy")
    with pytest.warns(UserWarning, match="new run"):
        result = PPO.load(path).learn(64)
    assert result.run_dir != first.run_dir
    assert result.metrics["global_step"] == 64
    with pytest.warns(UserWarning, match="new run"):
        other = model.learn(64, env_fn=Corridor)
    assert other.run_dir != first.run_dir


def test_the_policy_and_its_network_are_at_hand() -> None:
    model = PPO("CartPole-v1", **SMALL)
    before = model.policy.module
    assert isinstance(before, torch.nn.Module)
    model.learn(64)
    assert model.policy.module is not before
    assert model.policy.obs_spec.leaves[""].shape == (4,)


# -- environments and callbacks as they come -------------------------------------------------------


def test_an_environment_that_was_made_is_trained_on_and_left_open() -> None:
    env = gym.make("CartPole-v1")
    model = PPO(env, **{**SMALL, "num_envs": 1, "eval_episodes": 2})
    assert (model.config.env_id, model.config.num_envs) == ("CartPole-v1", 1)
    assert model.env_info.obs_spec.leaves[""].shape == (4,)
    result = model.learn(32)
    assert result.metrics["eval/episodes"] == 2  # on copies
    assert model.learn(32).metrics["global_step"] == 64
    env.reset()
    env.step(0)
    with pytest.raises(ConfigError, match="num_envs"):
        PPO(env, num_envs=2)


class Specless(gym.Env[Any, Any]):
    """Made by hand, so that it has no spec; its episodes never end."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample() * 0, 1.0, False, False, {}


def test_an_environment_without_a_spec_is_not_evaluated() -> None:
    with pytest.warns(UserWarning, match="no evaluation"):
        model = PPO(Specless(), num_steps=16, num_minibatches=2, progress=False, tensorboard=False)
    result = model.learn(32)
    assert "eval/return_mean" not in result.metrics


def test_one_environment_returned_again_and_again_is_refused() -> None:
    shared = gym.make("CartPole-v1")
    with pytest.raises(ConfigError, match="new environment with every call"):
        PPO(env_fn=lambda: shared, **SMALL).learn(64)
    # As the only one, one run after the other, it is all right; to be evaluated it is not.
    alone = {**SMALL, "num_envs": 1}
    assert PPO(env_fn=lambda: shared, **alone).learn(32).metrics["global_step"] == 32
    assert PPO(env_fn=lambda: shared, **alone).learn(32).metrics["global_step"] == 32
    with pytest.raises(ConfigError, match="new environment with every call"):
        PPO(env_fn=lambda: shared, **{**alone, "eval_episodes": 1}).learn(32)


def test_evaluation_of_episodes_that_never_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    short = functools.partial(evaluate_actor, max_steps=50)
    monkeypatch.setattr("rl_training.runtime.policy.evaluate_actor", short)
    model = PPO(env_fn=Specless, **SMALL)
    with pytest.warns(UserWarning, match="did not end within 50 steps"):
        result = model.evaluate(3)
    assert result.lengths == (50, 50, 50)
    assert result.returns == (50.0, 50.0, 50.0)


def test_a_callback_may_be_a_function_and_stand_alone() -> None:
    seen: list[int] = []

    def note(trainer: Any, event: Any) -> None:
        seen.append(event.step)
        trainer.log("mine/steps", event.step)

    result = PPO("CartPole-v1", **SMALL).learn(64, callbacks=note)
    assert seen == [32, 64]
    assert result.metrics["mine/steps"] == 64
    rows = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    assert sum('"mine/steps"' in row for row in rows) == 2
    PPO("CartPole-v1", **SMALL).learn(32, callbacks=[note, note])
    assert seen == [32, 64, 32, 32]
    for wrong in (3, type(note), ["no"]):
        with pytest.raises(ConfigError, match="callbacks"):
            PPO("CartPole-v1", **SMALL).learn(32, callbacks=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lr", "learning_rate"),
        ("n_envs", "num_envs"),
        ("n_steps", "num_steps"),
        ("verbose", "progress"),
    ],
)
def test_names_of_other_libraries_are_understood(theirs: str, ours: str) -> None:
    settings: dict[str, Any] = {theirs: 1}
    with pytest.raises(ConfigError, match=f"Did you mean '{ours}'"):
        PPO("CartPole-v1", **settings)


def test_an_early_stop_works_with_the_default_evaluations() -> None:
    settings = {**SMALL, "eval_episodes": 1}
    result = PPO("CartPole-v1", **settings).learn(640, callbacks=StopOnReturn(1.0))
    assert result.metrics["global_step"] == 64
    assert "reached the threshold" in result.stop_reason


def test_evaluation_on_other_spaces_is_refused() -> None:
    model = PPO("CartPole-v1", **SMALL)
    with pytest.raises(ConfigError, match="does not match the policy"):
        model.evaluate(1, env_fn=lambda: gym.make("Acrobot-v1"))


def test_ctrl_c_ends_a_loop_of_runs_after_saving_and_learn_finishes_the_run() -> None:
    def interrupt(trainer: Any, event: Any) -> None:
        if event.step == 64:
            signal.raise_signal(signal.SIGINT)

    model = PPO("CartPole-v1", **SMALL)
    with pytest.raises(KeyboardInterrupt, match="is saved in"):
        model.learn(128, callbacks=interrupt)
    assert model.result is not None
    assert model.result.interrupted
    assert model.result.metrics["global_step"] == 64
    assert model.learn().metrics["global_step"] == 128
