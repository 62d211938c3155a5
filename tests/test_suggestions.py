"""Unknown names of algorithms, settings, flags and environments: what is suggested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from rl_training import PPO, cli
from rl_training.config import TrainConfig
from rl_training.envs.ids import find_spec
from rl_training.errors import (
    ConfigError,
    did_you_mean,
    did_you_mean_flag,
    is_one_mistake,
    nearest_name,
)
from rl_training.registry import ALGORITHMS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("a3c", "a2c"),
        ("ddpg", "td3"),
        ("rainbow", "dqn"),
        ("ppo2", "ppo"),
        ("ppo_lstm", "recurrent_ppo"),
        ("ppo-lstm", "recurrent_ppo"),
        ("PPO", "ppo"),
        ("RecurrentPPO", "recurrent_ppo"),
        ("ppoo", "ppo"),
        ("pppo", None),  # ppo or appo
        ("sca", "sac"),
        ("dqm", "dqn"),
        ("muzero", None),
        ("dreamer", None),
        ("xyz", None),
        ("pp", None),  # ppo or ppg
        ("recurrent", "recurrent_ppo"),
        ("td3bc", "td3_bc"),
        ("TD3PlusBC", "td3_bc"),
        ("behavior_cloning", "bc"),
    ],
)
def test_an_unknown_algorithm(name: str, meant: str | None) -> None:
    assert nearest_name(name, ALGORITHMS.names()) == meant
    expected = f"Did you mean '{meant}'" if meant else "Known: a2c, appo, awac, bc, c51, cql, dqn"
    with pytest.raises(ConfigError, match=f"unknown algo '{name}'.*{expected}"):
        TrainConfig(algo=name)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lr", "learning_rate"),
        ("n_epochs", "update_epochs"),
        ("discount", "gamma"),
        ("eval_freq", "eval_interval"),
        ("Learning-Rate", "learning_rate"),
    ],
)
def test_an_unknown_setting(theirs: str, ours: str) -> None:
    settings: dict[str, Any] = {theirs: 1}
    with pytest.raises(ConfigError, match=f"Did you mean '{ours}'"):
        PPO("CartPole-v1", **settings)


def test_a_setting_that_resembles_nothing_lists_what_is_known() -> None:
    assert did_you_mean("frobnicate", ["seed", "algo"]) == " Known: algo, seed."


@pytest.mark.parametrize(
    ("flag", "suggested"),
    [
        ("--lr", "--algo-kwargs.learning-rate"),
        ("--lr=3", "--algo-kwargs.learning-rate"),
        ("--algo-kwargs.lr", "--algo-kwargs.learning-rate"),
        ("--n-envs", "--num-envs"),
        ("--num_env", "--num-envs"),
    ],
)
def test_an_unknown_flag(flag: str, suggested: str) -> None:
    known = ["--num-envs", "--algo-kwargs.learning-rate", "--algo-kwargs.anneal-lr", "--seed"]
    assert did_you_mean_flag(flag, known) == f" Did you mean {suggested}?"


def test_a_flag_that_resembles_nothing() -> None:
    assert did_you_mean_flag("--frobnicate", ["num-envs", "seed"]) == ""


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("ppo", "ppoo", True),
        ("ppo", "pp", True),
        ("abc", "bc", True),
        ("abc", "abd", True),
        ("abc", "acb", True),
        ("abc", "abc", False),
        ("a3c", "sac", False),
        ("abcd", "badc", False),
        ("ab", "abcd", False),
    ],
)
def test_one_typing_mistake(one: str, other: str, expected: bool) -> None:
    assert is_one_mistake(one, other) is expected
    assert is_one_mistake(other, one) is expected


# -- environments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("CartPole", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v7", "CartPole-v1"),
        ("CartPol-v1", "CartPole-v1"),
        ("halfcheetah", "HalfCheetah-v5"),
        ("Hoper-v4", "Hopper-v4"),
        ("LunarLander-v2", "LunarLander-v3"),
    ],
)
def test_an_unknown_id(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"no environment '{wrong}'\. Did you mean '{right}'\?"):
        find_spec(wrong)


def test_an_atari_game_without_its_namespace() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(ConfigError, match="Did you mean 'ALE/Pong-v5'"):
        find_spec("Pong-v5")


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        (
            "MiniGrid-Empty-5x5-v0",
            "pip install minigrid, then use 'minigrid:MiniGrid-Empty-5x5-v0'",
        ),
        ("FetchReach-v4", "pip install gymnasium-robotics"),
        ("highway-v0", "pip install highway-env, then use 'highway_env:highway-v0'"),
        ("MyGreatEnv-v0", "'my_module:MyGreatEnv-v0' imports my_module first"),
        ("unheard_of/Thing-v0", "must be registered"),
    ],
)
def test_an_id_of_another_package_or_of_ones_own(env_id: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_spec(env_id)
    assert hint in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's that registers two environments, beside one that registers none."""
    (tmp_path / "walks_of_mine.py").write_text(
        "import gymnasium as gym\n"
        "class Walk(gym.Env):\n    pass\n"
        "gym.register('Hopping-v0', entry_point=Walk)\n"
        "gym.register('mine/Corridor-v2', entry_point=Walk)\n"
    )
    (tmp_path / "nothing_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "walks_of_mine"
    for name in ("walks_of_mine", "nothing_of_mine"):
        sys.modules.pop(name, None)
    for name in ("Hopping-v0", "mine/Corridor-v2"):
        gym.registry.pop(name, None)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Hoping-v0", "Did you mean 'walks_of_mine:Hopping-v0'?"),
        ("hopping", "Did you mean 'walks_of_mine:Hopping-v0'?"),
        ("mine/Coridor-v2", "Did you mean 'walks_of_mine:mine/Corridor-v2'?"),
        ("Hopper-v9", "The module 'walks_of_mine' registers: Hopping-v0, mine/Corridor-v2."),
        ("Maze-v0", "The module 'walks_of_mine' registers: Hopping-v0, mine/Corridor-v2."),
    ],
)
def test_a_missing_environment_of_the_users_module(own_module: str, name: str, hint: str) -> None:
    for _ in range(2):  # the second time the module is imported already
        with pytest.raises(ConfigError) as caught:
            find_spec(f"{own_module}:{name}")
        assert str(caught.value) == f"no environment '{own_module}:{name}'. {hint}"


def test_a_module_that_registers_nothing(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"registers no environment: call gymnasium.register\('M"):
        find_spec("nothing_of_mine:Maze-v0")


# -- as a user sees them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--algo", "a3c"], "error: unknown algo 'a3c'. Did you mean 'a2c'?"),
        (["--env-id", "CartPole"], "error: no environment 'CartPole'. Did you mean 'CartPole-v1'?"),
    ],
)
def test_on_the_command_line(words: list[str], line: str, capsys: Any, tmp_path: Path) -> None:
    assert cli.main(["train", *words, "--output-dir", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [line]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("env_id", "extra", "message"),
    [
        ("HalfCheetah-v5", "mujoco", "MuJoCo is not installed, run `pip install mujoco`"),
        ("LunarLander-v3", "box2d", "Box2D is not installed"),
    ],
)
def test_a_missing_extra_is_named(
    env_id: str,
    extra: str,
    message: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise gym.error.DependencyNotInstalled(message)

    monkeypatch.setattr(gym, "make", refuse)
    for words in (
        ["train", "--env-id", env_id, "--output-dir", str(tmp_path)],
        ["check-env", env_id],
    ):
        assert cli.main(words) == 2
        line = capsys.readouterr().err.strip()
        assert line == f"error: {env_id} needs an extra: pip install 'rl_training[{extra}]'"
