"""What an object keeps of a run that failed, was stopped, or was started with odd settings."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from rl_training import DQN, PPO, SAC, TrainConfig, train_ppo
from rl_training.envs.given import is_in_use
from rl_training.errors import ConfigError, UserError
from test_one_line_use import SMALL, Corridor


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fail_at(step: int) -> Any:
    def fail(trainer: Any, event: Any) -> None:
        if event.step >= step:
            raise RuntimeError("a bug in a callback")

    return fail


def interrupt_at(step: int) -> Any:
    def interrupt(trainer: Any, event: Any) -> None:
        if event.step == step:
            signal.raise_signal(signal.SIGINT)

    return interrupt


def model(**settings: Any) -> PPO:
    return PPO("CartPole-v1", **{**SMALL, "checkpoint_interval": 32, **settings})


def test_after_a_failure_the_object_continues_from_the_last_checkpoint() -> None:
    failed, whole = model(anneal_lr=False), model(anneal_lr=False)
    failed.learn(64)
    with pytest.raises(RuntimeError, match="a bug"):
        failed.learn(128, callbacks=fail_at(160))
    assert failed.run_dir is not None
    assert failed.learn().metrics["global_step"] == 192
    whole.learn(64)
    whole.learn(128)
    mine, theirs = failed.policy.module.state_dict(), whole.policy.module.state_dict()
    assert all(bool((mine[key] == theirs[key]).all()) for key in mine)


def test_a_first_run_that_fails_is_not_lost() -> None:
    failed = model()
    with pytest.raises(RuntimeError, match="a bug"):
        failed.learn(128, callbacks=fail_at(96))
    assert failed.run_dir is not None
    assert failed.learn(32).metrics["global_step"] == 96  # 64 were saved
    assert len(list(Path("runs").iterdir())) == 1


def test_a_run_in_memory_that_fails_is_not_started_again_without_a_word() -> None:
    failed = model()
    failed.learn(64, run_dir=None)
    with pytest.raises(RuntimeError, match="a bug"):
        failed.learn(64, callbacks=fail_at(96))
    with pytest.raises(UserError, match="ended with an error"):
        failed.learn(64)
    assert failed.act([0.0, 0.0, 0.0, 0.0]) in (0, 1)  # of the first call


def test_a_failing_constructor_of_an_evaluation_loses_no_training() -> None:
    made: list[Any] = []

    def make() -> Any:
        if len(made) == 4:  # two for training; evaluation has one now and one later
            raise RuntimeError("no more environments")
        made.append(Corridor())
        return made[-1]

    settings = {**SMALL, "eval_episodes": 1, "eval_interval": 64, "checkpoint_interval": 1000}
    failed = PPO(env_fn=make, **settings)

    def close_evaluation(trainer: Any, event: Any) -> None:
        trainer._evaluations.close()

    with pytest.raises(Exception, match="no more environments"):
        failed.learn(256, callbacks=close_evaluation)
    assert failed.run_dir is not None
    assert (failed.run_dir / "checkpoints" / "step_000000000128.pt").is_file()


@pytest.mark.parametrize("step", [32, 64])
def test_ctrl_c_ends_the_program_in_the_last_iteration_too(step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        model().learn(64, callbacks=interrupt_at(step))


def test_more_steps_are_trained_after_a_requested_stop() -> None:
    def stop(trainer: Any, event: Any) -> None:
        trainer.request_stop("enough")

    for run_dir in ("auto", None):
        stopped = model()
        stopped.learn(128, callbacks=stop, run_dir=run_dir)
        assert stopped.learn() is stopped.result  # it ended: nothing is left to do
        assert stopped.learn(64).metrics["global_step"] == 96


def test_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="PPO trains ppo, not 'dqn'"):
        PPO("CartPole-v1", algo="dqn")
    with pytest.raises(ConfigError, match="train_ppo trains ppo"):
        train_ppo(TrainConfig(), algo="a2c")


def test_a_run_of_an_id_is_not_continued_on_another_environment() -> None:
    first = model()
    first.learn(64)
    assert first.run_dir is not None
    loaded = PPO.load(first.run_dir, env_fn=Corridor)
    with pytest.warns(UserWarning, match="a new run starts"):
        loaded.learn(64)
    assert loaded.run_dir != first.run_dir


class Plain(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper of which Gymnasium does not record the arguments."""


def test_an_instance_with_a_wrapper_of_ones_own_is_trained_without_evaluation() -> None:
    settings = {**SMALL, "eval_episodes": 2, "num_envs": 1}
    with pytest.warns(UserWarning, match="there is no evaluation"):
        wrapped = PPO(Plain(gym.make("CartPole-v1")), **settings)
    assert "eval/return_mean" not in wrapped.learn(64).metrics


def test_a_wrapper_that_fails_releases_the_environment() -> None:
    env = gym.make("CartPole-v1")
    wrapper = {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"nonsense": 1}}
    with pytest.raises(Exception, match="nonsense"):
        PPO(env, **{**SMALL, "num_envs": 1}, wrappers=[wrapper]).learn(64)
    assert not is_in_use(env)


def test_a_config_for_several_environments_is_refused_for_one() -> None:
    with pytest.raises(ConfigError, match="but one environment was given"):
        PPO(gym.make("CartPole-v1"), config=TrainConfig(num_envs=8))


def test_the_first_total_sets_the_evaluations_in_memory_too() -> None:
    settings = {key: value for key, value in SMALL.items() if key != "num_envs"}
    in_memory = PPO("CartPole-v1", **settings, num_envs=2)
    for _ in range(3):
        in_memory.learn(640, run_dir=None)
        assert in_memory.config.eval_interval == 64


def test_an_unnamed_algorithm_stays_unnamed() -> None:
    config: TrainConfig[Any] = dataclasses.replace(TrainConfig(env_id="Pendulum-v1"), seed=3)
    assert SAC(config).config.seed == 3
    kept = TrainConfig(algo_kwargs={"learning_rate": 1e-2})
    assert kept.with_overrides(algo="a2c").algo_kwargs.learning_rate == 1e-2
    assert DQN(kept).config.algo_kwargs.learning_rate == 1e-2


@pytest.mark.parametrize("call", ["learn(64, run_dir=5)", "save(None)", "load(None)"])
def test_a_path_must_be_one(call: str) -> None:
    name, _, arguments = call.partition("(")
    with pytest.raises(ConfigError, match="must be a path"):
        eval(f"getattr(one, name)({arguments}", {"one": model(), "name": name})


def test_a_metric_that_is_not_a_number_is_left_out_of_the_log() -> None:
    def log(trainer: Any, event: Any) -> None:
        trainer.log("mine", float("nan"))

    logged = model()
    with pytest.warns(UserWarning, match="mine is nan"):
        logged.learn(64, callbacks=log)
    assert logged.run_dir is not None
    assert "NaN" not in (logged.run_dir / "metrics.jsonl").read_text()
