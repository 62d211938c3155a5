"""Entries of RL Baselines3 Zoo become config files that mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_training import cli, config_from_file
from rl_training.algorithms.ppo import PPOConfig
from rl_training.errors import ConfigError, UserError
from rl_training.tools.importing.literals import Name, parse_literal
from rl_training.tools.importing.rl_zoo import main
from rl_training.tools.importing.zoo_defaults import DEFAULTS
from rl_training.tools.importing.zoo_settings import translate

PPO_FILE = """
default: &usual
  n_envs: 8
  n_timesteps: !!float 1e4
  policy: 'MlpPolicy'
  n_steps: 32
  batch_size: 64
  learning_rate: lin_1e-3
  clip_range: lin_0.2
CartPole-v1:
  <<: *usual
  gamma: 0.98
Pendulum-v1:
  <<: *usual
  normalize: "dict(norm_obs=True, norm_reward=False)"
  use_sde: True
  policy_kwargs: "dict(
                    log_std_init=-1.5,
                    activation_fn=nn.ReLU,
                    net_arch=dict(pi=[32], vf=[64, 48])
                  )"
atari:
  env_wrapper:
    - stable_baselines3.common.atari_wrappers.AtariWrapper:
        terminal_on_life_loss: False
  frame_stack: 3
  policy: 'CnnPolicy'
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ppo.yml"
    path.write_text(PPO_FILE)
    return path


def convert(file: Path, env_id: str, *more: str) -> int:
    return main([str(file), "--algo", "ppo", "--env-id", env_id, "--out", "my.yaml", *more])


def knobs(algo: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of an entry that is translated without loss."""
    found = translate(entry, algo, "CartPole-v1")
    assert not found.missing
    values: dict[str, Any] = found.settings["algo_kwargs"]
    return values


def test_a_file_is_trained_from(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import-zoo", str(file), "--algo", "ppo", "--env-id", "CartPole-v1"]
    assert cli.main([*words, "--out", "my.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "file": "my.yaml",
        "entry": "CartPole-v1",
        "left_out": {},
        "notes": [],
    }
    config = config_from_file("my.yaml")
    assert (config.algo, config.env_id, config.num_envs) == ("ppo", "CartPole-v1", 8)
    assert config.total_timesteps == 10_000
    settings: PPOConfig = config.algo_kwargs
    assert (settings.num_steps, settings.num_minibatches, settings.update_epochs) == (32, 4, 10)
    assert (settings.learning_rate, settings.lr_schedule) == (1e-3, "linear")
    assert (settings.clip_coef, settings.anneal_clip, settings.clip_vloss) == (0.2, True, False)
    assert (settings.gamma, settings.gae_lambda, settings.ent_coef) == (0.98, 0.95, 0.0)
    assert settings.vf_coef == 1.0, "half the mean squared error here"
    quick = ["--total-timesteps", "256", "--eval-episodes", "0", "--no-progress"]
    assert cli.main(["train", "--config", "my.yaml", *quick]) == 0


def test_what_has_no_counterpart_is_named_and_left_out_on_request(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"use_sde \(no counterpart\).*--skip-unsupported"):
        convert(file, "Pendulum-v1")
    assert not Path("my.yaml").exists()
    assert convert(file, "Pendulum-v1", "--skip-unsupported") == 0
    assert "left out: use_sde" in capsys.readouterr().err
    assert "# Left out: use_sde (no counterpart).\n" in Path("my.yaml").read_text()
    config = config_from_file("my.yaml")
    assert (config.normalize_obs, config.normalize_reward) == (True, False)
    settings = config.algo_kwargs
    assert (settings.hidden_sizes, settings.critic_hidden_sizes) == ((32,), (64, 48))
    assert (settings.activation, settings.log_std_init) == ("relu", -1.5)
    with pytest.raises(UserError, match=r"my\.yaml exists"):
        convert(file, "CartPole-v1")


@pytest.mark.parametrize(
    ("env_id", "more", "entry"),
    [
        ("Acrobot-v1", (), "default"),
        ("Acrobot-v1", ("--entry", "CartPole-v1"), "CartPole-v1"),
        ("ALE/Pong-v5", (), "atari"),
        ("PongNoFrameskip-v4", (), "atari"),
    ],
)
def test_the_entry_of_an_environment(
    env_id: str, more: tuple[str, ...], entry: str, file: Path
) -> None:
    assert convert(file, env_id, *more) == 0
    assert f"entry '{entry}' of ppo.yml" in Path("my.yaml").read_text()
    config = config_from_file("my.yaml")
    assert config.env_id == env_id
    assert (config.preprocessing == "atari") == (entry == "atari")
    if entry == "atari":
        assert (config.atari.frame_stack, config.atari.terminal_on_life_loss) == (3, False)


def test_a_missing_entry_is_an_error(file: Path) -> None:
    file.write_text("CartPole-v1: {}\nx: 5\n")
    with pytest.raises(ConfigError, match=r"no entry 'CartPol-v1'\. Did you mean 'CartPole-v1'"):
        convert(file, "CartPol-v1")
    with pytest.raises(ConfigError, match="'x' is no mapping"):
        convert(file, "CartPole-v1", "--entry", "x")
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="holds no entries"):
        convert(file, "CartPole-v1")
    file.write_text("CartPole-v1: {n_steps: 5, batch_size: 0}")
    with pytest.raises(ConfigError, match=r"ppo\.yml, entry 'CartPole-v1': batch_size: 0 is not"):
        convert(file, "CartPole-v1")
    file.write_text("CartPole-v1: {}")
    with pytest.raises(UserError, match="its folder does not exist"):
        convert(file, "CartPole-v1", "--out", "no/where.yaml")


# -- hyperparameters -------------------------------------------------------------------------------


def test_defaults_are_those_of_stable_baselines3() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    import inspect

    for algo, expected in DEFAULTS.items():
        there = inspect.signature(getattr(sb3, algo.upper()).__init__).parameters
        for name, value in expected.items():
            assert there[name].default == value, f"{algo}: {name}"


@pytest.mark.parametrize(
    ("algo", "entry", "expected"),
    [
        ("a2c", {}, {"num_steps": 5, "gae_lambda": 1.0, "vf_coef": 1.0, "norm_adv": False}),
        ("a2c", {"use_rms_prop": False}, {"optimizer": "adam", "optimizer_betas": [0.9, 0.999]}),
        ("a2c", {"rms_prop_eps": 1e-4}, {"optimizer_eps": 1e-4}),
        ("ppo", {"clip_range_vf": 0.2, "clip_range": 0.2}, {"clip_vloss": True}),
        ("ppo", {"target_kl": 0.1, "normalize_advantage": False}, {"norm_adv": False}),
        ("dqn", {}, {"train_freq": 4, "target_update_interval_steps": 10_000, "tau": 1.0}),
        ("dqn", {}, {"hidden_sizes": [64, 64], "learning_starts": 100, "max_grad_norm": 10.0}),
        ("dqn", {"n_envs": 4, "train_freq": 2}, {"train_freq": 8}),
        ("dqn", {"train_freq": "(8, 'step')", "gradient_steps": -1}, {"train_freq": 8}),
        ("sac", {}, {"ent_coef_init": 1.0, "hidden_sizes": [256, 256]}),
        ("sac", {"ent_coef": "auto_0.1"}, {"ent_coef_init": 0.1}),
        ("sac", {"ent_coef": 0.2, "target_entropy": -3}, {"ent_coef": 0.2, "target_entropy": -3}),
        ("sac", {"target_update_interval": 2}, {"target_update_interval_updates": 2}),
        (
            *("sac", {"policy_kwargs": "dict(net_arch=dict(pi=[8], qf=[9]), n_critics=1)"}),
            {"hidden_sizes": [8], "critic_hidden_sizes": [9], "num_critics": 1},
        ),
        ("td3", {}, {"exploration_noise": 0.0, "hidden_sizes": [400, 300], "policy_delay": 2}),
        ("td3", {"noise_type": "normal", "noise_std": 0.3}, {"exploration_noise": 0.3}),
        ("td3", {"n_steps": 3}, {"n_step": 3}),
        ("ppo", {"policy_kwargs": "dict(net_arch=[dict(pi=[4], vf=[4])])"}, {"hidden_sizes": [4]}),
        (
            *("ppo", {"policy_kwargs": "dict(optimizer_kwargs=dict(eps=1e-4, betas=(0.8, 0.9)))"}),
            {"optimizer_eps": 1e-4, "optimizer_betas": [0.8, 0.9]},
        ),
    ],
)
def test_hyperparameters(algo: str, entry: dict[str, Any], expected: dict[str, Any]) -> None:
    found = knobs(algo, entry)
    assert expected.items() <= found.items()
    env_id = "CartPole-v1" if algo in ("ppo", "a2c", "dqn") else "Pendulum-v1"
    from rl_training.config import config_from_mapping

    config_from_mapping({"algo": algo, "env_id": env_id, "algo_kwargs": found, "num_envs": 8})


@pytest.mark.parametrize(
    ("algo", "entry", "named"),
    [
        ("sac", {"normalize": True}, "normalize: norm_reward"),
        ("ppo", {"normalize": {"gamma": 0.5}}, "normalize: gamma"),
        ("ppo", {"normalize": True, "normalize_kwargs": {"epsilon": 1e-3}}, "normalize: epsilon"),
        ("ppo", {"clip_range_vf": 0.5}, "clip_range_vf"),
        ("ppo", {"mystery": 0}, "mystery"),
        ("ppo", {"policy_kwargs": "dict(ortho_init=False)"}, "policy_kwargs: ortho_init"),
        ("ppo", {"policy_kwargs": "dict(optimizer_class=A)"}, "policy_kwargs: optimizer_class"),
        ("ppo", {"env_wrapper": "rl_zoo3.wrappers.X"}, "env_wrapper rl_zoo3.wrappers.X"),
        ("dqn", {"train_freq": [1, "episode"]}, "train_freq"),
        ("td3", {"noise_type": "ornstein-uhlenbeck"}, "noise_type"),
        ("sac", {"noise_type": "normal", "noise_std": 0.1}, "noise_type"),
    ],
)
def test_what_is_named(algo: str, entry: dict[str, Any], named: str) -> None:
    assert set(translate(entry, algo, "CartPole-v1").missing) == {named}


def test_a_file_of_another_algorithm_is_noticed() -> None:
    found = translate({"gae_lambda": 0.9, "n_epochs": 5}, "dqn", "CartPole-v1")
    assert set(found.missing) == {"gae_lambda", "n_epochs"}


def test_wrappers_and_frames() -> None:
    entry = {
        "env_wrapper": [{"gymnasium.wrappers.rescale_action.RescaleAction": {"min_action": 0}}],
        "frame_stack": 2,
        "env_kwargs": "dict(g=5.0)",
        "use_sde": False,
    }
    found = translate(entry, "ppo", "Pendulum-v1")
    assert not found.missing
    assert found.settings["env_kwargs"] == {"g": 5.0}
    assert found.settings["wrappers"] == [
        {"path": "gymnasium.wrappers:RescaleAction", "kwargs": {"min_action": 0}},
        {
            "path": "gymnasium.wrappers:FrameStackObservation",
            "kwargs": {"stack_size": 2, "padding_type": "zero"},
        },
    ]


def test_minibatches_that_do_not_fit_are_noted() -> None:
    found = translate({"n_steps": 100, "batch_size": 64}, "ppo", "CartPole-v1")
    assert found.settings["algo_kwargs"]["num_minibatches"] == 2
    assert found.notes == (
        "batch_size 64 does not divide the rollout of 100 transitions: minibatches have 50 here",
    )


# -- expressions -----------------------------------------------------------------------------------


def test_expressions_are_values() -> None:
    text = "dict(a=[1, -2.5], b=(True, None), c={'d': 'e'}, f=th.nn.ReLU)"
    found = parse_literal(text, "x")
    assert found == {"a": [1, -2.5], "b": [True, None], "c": {"d": "e"}, "f": "th.nn.ReLU"}
    assert type(found["f"]) is Name


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "dict(a=open('x'))",
        "dict(**{'a': 1})",
        "dict([('a', 1)])",
        "dict(a=1, a=2)",
        "{'a': 1, 'a': 2}",
        "{**{}}",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "(lambda: 1).__class__",
        "2 ** 10 ** 10",
        "'a' * 10 ** 10",
        "f'{1}'",
        "1 if True else 2",
        "b'bytes'",
        "[" * 5_000,
        "(" * 90 + "-" * 3_000 + "1" + ")" * 90,
        "nn.ReLU()",
        "",
        "x" * 20_000,
    ],
)
def test_other_expressions_are_refused_and_not_evaluated(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_literal(text, "policy_kwargs")
