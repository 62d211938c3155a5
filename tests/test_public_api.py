"""`PPO(config)`: learn, predict, evaluate, save and load, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import probe_envs
from conftest import MakeConfig
from rl_training import PPO, TrainConfig, train_ppo
from rl_training.checkpointing import SUFFIX, load_checkpoint, save_checkpoint
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runtime import Callback, evaluate_checkpoint, load_policy, resume_training
from rl_training.types import Array

SRC = Path(__file__).resolve().parents[1] / "src"


class Shaped(probe_envs.Probe):
    """An unregistered environment of one step with the spaces it is given."""

    def __init__(self, action_space: gym.Space[Any], observation_space: gym.Space[Any]) -> None:
        self.action_space = action_space
        self.observation_space = observation_space

    def observe(self) -> Any:
        return self.observation_space.sample()

    def step(self, action: Any) -> probe_envs.Step:
        assert self.action_space.contains(action), action
        return self.observe(), 1.0, True, False, {}


VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTION_SPACES: dict[str, gym.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "box": spaces.Box(np.array([-20.0, 0.0], np.float32), np.array([60.0, 1.0], np.float32)),
    "box of rank 2": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "multi discrete": spaces.MultiDiscrete([2, 3, 4]),
    "multi binary": spaces.MultiBinary(4),
}
OBSERVATION_SPACES: dict[str, gym.Space[Any]] = {
    "vector": VECTOR,
    "matrix": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "dict": spaces.Dict({"a": VECTOR, "b": spaces.Box(0, 255, (2,), np.uint8)}),
}


def stacked(space: gym.Space[Any], count: int) -> Any:
    """A batch of observations."""
    rows = [space.sample() for _ in range(count)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([row[key] for row in rows]) for key in space.spaces}
    return np.stack(rows)


def first(obs: Any) -> Any:
    """The first row of a batch."""
    return {key: leaf[0] for key, leaf in obs.items()} if isinstance(obs, dict) else obs[0]


def grid(size: int = 64) -> Array:
    """Observations of CartPole on either side of every decision."""
    return np.random.default_rng(0).normal(0.0, 1.0, (size, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PPO:
    """A policy of CartPole that knows its observations' scale; not to be trained on."""
    agent = PPO(
        TrainConfig(
            env_id="CartPole-v1",
            seed=7,
            total_timesteps=512,
            num_envs=2,
            normalize_obs=True,
            eval_episodes=0,
            progress=False,
            tensorboard=False,
            output_dir=tmp_path_factory.mktemp("trained"),
            algo_kwargs={"num_steps": 64, "learning_rate": 1e-2},
        )
    )
    agent.learn()
    return agent


# -- predict ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("kind", ACTION_SPACES)
def test_predict_gives_actions_of_the_environment(
    make_config: MakeConfig, kind: str, deterministic: bool
) -> None:
    space = ACTION_SPACES[kind]
    agent = PPO(make_config(), env_fn=lambda: Shaped(space, VECTOR))
    many = stacked(VECTOR, 5)
    actions = agent.act(many, deterministic)
    assert actions.shape == (5, *(space.shape or ()))
    assert all(space.contains(action) for action in actions)
    one = agent.act(many[0], deterministic)
    assert space.contains(one)
    assert one.shape == space.shape
    assert one.dtype == space.dtype
    assert len(agent.act(many[:1], deterministic)) == 1, "a batch of one is a batch"


@pytest.mark.parametrize("kind", OBSERVATION_SPACES)
def test_predict_takes_observations_of_the_environment(make_config: MakeConfig, kind: str) -> None:
    space = OBSERVATION_SPACES[kind]
    agent = PPO(make_config(), env_fn=lambda: Shaped(spaces.Discrete(3), space))
    many = stacked(space, 6)
    actions = agent.act(many)
    assert actions.shape == (6,)
    assert agent.act(first(many)) == actions[0]


def test_predict_obeys_the_action_mask(make_config: MakeConfig) -> None:
    agent = PPO(make_config(env_id="probe/MaskedActions-v0"))
    masks = np.eye(4, dtype=np.int8)
    for deterministic in (True, False):
        obs = {"sign": np.ones((4, 1), np.float32), "action_mask": masks}
        assert agent.act(obs, deterministic).tolist() == [0, 1, 2, 3]


def test_a_deterministic_prediction_repeats_and_a_sampled_one_varies(trained: PPO) -> None:
    same = np.zeros((300, 4), np.float32)
    assert len(set(trained.act(same).tolist())) == 1
    assert len(set(trained.act(same, deterministic=False).tolist())) == 2


def test_predictions_depend_on_the_observation(trained: PPO) -> None:
    assert set(trained.act(grid()).tolist()) == {0, 1}


def test_predict_takes_plain_lists(trained: PPO) -> None:
    obs = grid(1)[0]
    assert trained.act(obs.tolist()) == trained.act(obs)


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.zeros(5), r"shape \(5,\); expected \(4,\), or \(n, 4\)"),
        (np.zeros((2, 3)), r"shape \(2, 3\); expected \(4,\)"),
        (np.zeros((2, 3, 4)), r"shape \(2, 3, 4\); expected \(4,\)"),
        (0.5, r"shape \(\); expected \(4,\)"),
    ],
)
def test_an_observation_of_the_wrong_shape_is_refused(trained: PPO, obs: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained.act(obs)


def test_a_wrong_dict_observation_is_refused(make_config: MakeConfig) -> None:
    space = OBSERVATION_SPACES["dict"]
    agent = PPO(make_config(), env_fn=lambda: Shaped(spaces.Discrete(3), space))
    good = space.sample()
    with pytest.raises(UserError, match=r"must be a dict with \['a', 'b'\]; got \['a'\]"):
        agent.act({"a": good["a"]})
    with pytest.raises(UserError, match=r"must be a dict with \['a', 'b'\]; got ndarray"):
        agent.act(good["a"])
    with pytest.raises(UserError, match=r"b has shape \(3,\); expected \(2,\)"):
        agent.act({"a": good["a"], "b": np.zeros(3)})
    with pytest.raises(UserError, match=r"some .* are batched and some are not"):
        agent.act({"a": good["a"], "b": np.zeros((1, 2))})


# -- learn -----------------------------------------------------------------------------------------


def test_learn_trains_to_the_total(make_config: MakeConfig) -> None:
    config = make_config(env_id="CartPole-v1", total_timesteps=256, learning_rate=0.03)
    untrained = PPO(config).act(grid())
    agent = PPO(config)
    result = agent.learn()
    assert agent.result is result
    assert result.metrics["global_step"] == 256
    assert result.checkpoint_path.is_file()
    assert result.stop_reason == "total_timesteps reached"
    assert not np.array_equal(agent.act(grid()), untrained), "the trained policy is used"


def test_the_policy_can_be_used_before_it_learns(make_config: MakeConfig) -> None:
    agent = PPO(make_config(env_id="probe/ConstantReward-v0", total_timesteps=128))
    assert agent.act(np.zeros(1)) in (0, 1)
    assert agent.evaluate(2).returns == (1.0, 1.0)
    assert agent.learn().metrics["global_step"] == 128
    assert agent.act(np.zeros(1)) in (0, 1)


def test_looking_before_learning_does_not_change_what_is_learnt(make_config: MakeConfig) -> None:
    looked, plain = (PPO(make_config(env_id="CartPole-v1", total_timesteps=128)) for _ in "ab")
    looked.act(grid(), deterministic=False)
    states = [load_checkpoint(agent.learn().checkpoint_path) for agent in (plain, looked)]
    weights = [state["algorithm"]["model"] for state in states]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_learn_again_extends_the_run(make_config: MakeConfig) -> None:
    agent = PPO(make_config(env_id="probe/ConstantReward-v0", total_timesteps=128))
    once = agent.learn()
    twice = agent.learn(172)
    assert twice.run_dir == once.run_dir
    assert twice.metrics["global_step"] == 384, "128 + 172 in whole iterations of 2 * 64"
    assert load_checkpoint(twice.checkpoint_path)["training"]["counters"]["iteration"] == 3
    assert agent.learn() is twice, "there is nothing left to do"


def test_learn_takes_a_total_and_callbacks(make_config: MakeConfig) -> None:
    class Count(Callback):
        steps: list[int] = []

        def on_iteration(self, trainer: Any, event: Any) -> None:
            self.steps.append(event.step)

    agent = PPO(make_config(env_id="probe/ConstantReward-v0", total_timesteps=1_000_000))
    assert agent.learn(256, callbacks=[Count()]).metrics["global_step"] == 256
    assert Count.steps == [128, 256]


def test_overrides_replace_fields_and_knobs(make_config: MakeConfig) -> None:
    agent = PPO(make_config(), num_envs=4, gamma=0.5)
    assert (agent.config.num_envs, agent.config.algo_kwargs.gamma) == (4, 0.5)
    with pytest.raises(ConfigError, match=r"unknown setting 'gama'. Did you mean 'gamma'\?"):
        PPO(make_config(), gama=0.5)


def test_no_config_is_the_default_one() -> None:
    assert PPO(seed=3).config == TrainConfig(algo="ppo", seed=3)


def test_the_function_trains_as_the_class_does(make_config: MakeConfig) -> None:
    config = make_config(env_id="CartPole-v1", total_timesteps=256)
    by_class = PPO(config, gamma=0.9).learn()
    by_function = train_ppo(config, gamma=0.9)
    assert by_class.run_dir != by_function.run_dir
    weights = [
        load_checkpoint(result.checkpoint_path)["algorithm"]["model"]
        for result in (by_class, by_function)
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_another_algorithms_config_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "twin", ALGORITHMS["ppo"])
    config: TrainConfig[Any] = TrainConfig(algo="twin")
    with pytest.raises(ConfigError, match="algo: twin"):
        PPO(config)
    with pytest.raises(ConfigError, match="algo: twin"):
        train_ppo(config)


# -- evaluate --------------------------------------------------------------------------------------


def test_evaluate_plays_whole_episodes_that_can_be_played_again(trained: PPO) -> None:
    result = trained.evaluate(12, seed=3)
    assert len(result.returns) == len(result.lengths) == 12
    assert result.returns == tuple(float(n) for n in result.lengths), "CartPole pays 1 a step"
    assert trained.evaluate(12, seed=3) == result
    assert trained.evaluate(12, seed=4) != result
    assert trained.evaluate(12, seed=3, deterministic=False) != result


def test_evaluate_wants_an_episode(trained: PPO) -> None:
    with pytest.raises(ConfigError, match="'num_episodes' must be at least 1; got 0"):
        trained.evaluate(0)


# -- an environment that is not registered ---------------------------------------------------------


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_unregistered_environment_is_given_as_a_function(
    make_config: MakeConfig, vectorization: str
) -> None:
    class Local(probe_envs.Probe):
        """Of this function alone: a worker cannot import it."""

        action_space = spaces.Discrete(2, start=7)

        def step(self, action: Any) -> probe_envs.Step:
            return self.observe(), float(action), True, False, {}

    config = make_config(
        env_id="not-registered-v0", total_timesteps=128, vectorization=vectorization
    )
    agent = PPO(config, env_fn=lambda: Local())
    result = agent.learn()
    assert 7.0 <= result.metrics["eval/return_mean"] <= 8.0
    assert agent.act(np.zeros(1)) in (7, 8)
    assert set(agent.evaluate(2).returns) <= {7.0, 8.0}
    assert agent.learn(128).metrics["global_step"] == 256


def test_without_its_function_an_unregistered_environment_is_asked_for(
    make_config: MakeConfig,
) -> None:
    config = make_config(env_id="not-registered-v0", total_timesteps=128)
    path = PPO(config, env_fn=probe_envs.DelayedReward).learn().checkpoint_path
    for use in (evaluate_checkpoint, resume_training):
        with pytest.raises(CheckpointError, match="was trained with env_fn"):
            use(path)
    assert evaluate_checkpoint(path, 3, env_fn=probe_envs.DelayedReward).returns == (1.0,) * 3
    loaded = PPO.load(path, env_fn=probe_envs.DelayedReward)
    assert loaded.evaluate(2).returns == (1.0, 1.0)
    assert load_policy(path).act(np.zeros(1)) in (0, 1)


# -- save and load ---------------------------------------------------------------------------------


def test_save_adds_the_suffix_and_the_folders(trained: PPO, tmp_path: Path) -> None:
    assert trained.save(tmp_path / "model") == tmp_path / "model.pt"
    assert trained.save(str(tmp_path / "model.v1")) == tmp_path / "model.v1.pt"
    assert trained.save(tmp_path / "deep" / "er" / "model.pt") == tmp_path / "deep/er/model.pt"
    assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != SUFFIX]


def test_a_loaded_policy_predicts_the_same(trained: PPO, tmp_path: Path) -> None:
    loaded = PPO.load(trained.save(tmp_path / "model"))
    assert loaded.config == trained.config
    assert np.array_equal(loaded.act(grid()), trained.act(grid()))
    assert loaded.evaluate(3, seed=5) == trained.evaluate(3, seed=5)
    again = PPO.load(loaded.save(tmp_path / "again"))
    assert np.array_equal(again.act(grid()), trained.act(grid()))


def test_a_run_folder_and_a_checkpoint_load_too(trained: PPO) -> None:
    assert trained.result
    for path in (trained.result.run_dir, str(trained.result.checkpoint_path)):
        assert np.array_equal(PPO.load(path).act(grid()), trained.act(grid()))


def test_an_untrained_policy_can_be_saved(make_config: MakeConfig, tmp_path: Path) -> None:
    agent = PPO(make_config(env_id="CartPole-v1"))
    loaded = PPO.load(agent.save(tmp_path / "untrained"))
    assert np.array_equal(loaded.act(grid()), agent.act(grid()))


WITHOUT_ENVIRONMENTS = """
import json, sys
import gymnasium

def broken(*args, **kwargs):
    raise RuntimeError("there are no environments here")

gymnasium.make = gymnasium.make_vec = gymnasium.Env.reset = broken
gymnasium.registry.clear()
gymnasium.spec = gymnasium.envs.registration.spec = broken

import rl_training
from rl_training.runtime import load_policy

obs = json.loads(sys.stdin.read())
path = sys.argv[1]
many = rl_training.PPO.load(path).act(obs)
one = load_policy(path).act(obs[0])
print(json.dumps({"many": many.tolist(), "one": int(one)}))
"""


def test_a_saved_policy_predicts_where_there_are_no_environments(
    trained: PPO, tmp_path: Path
) -> None:
    obs = grid(32)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENVIRONMENTS, str(trained.save(tmp_path / "model"))],
        input=json.dumps(obs.tolist()),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = trained.act(obs).tolist()
    assert json.loads(done.stdout) == {"many": expected, "one": expected[0]}


def test_a_saved_policy_is_not_a_run(trained: PPO, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="without its training state"):
        resume_training(path)


@pytest.mark.parametrize("kind", ["text", "weights", "pickle", "another state", "empty"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other.pt"
    if kind == "text":
        path.write_text("hello")
    elif kind == "weights":
        torch.save({"layer.weight": torch.zeros(3)}, path)
    elif kind == "pickle":
        torch.save({"format": 1, "state": {"config": Shaped}}, path)
    elif kind == "another state":
        save_checkpoint(path, {"anything": 1})
    else:
        path.touch()
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        PPO.load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint or run folder at .*gone"):
        PPO.load(tmp_path / "gone.pt")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        PPO.load(tmp_path)


def test_another_algorithms_policy_is_refused(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "twin", ALGORITHMS["ppo"])

    class Twin(PPO):
        algo = "twin"

    config = make_config(env_id="probe/ConstantReward-v0").with_overrides(algo="twin")
    path = Twin(config).save(tmp_path / "twin")
    with pytest.raises(CheckpointError, match="holds a policy of algo 'twin', not 'ppo'"):
        PPO.load(path)
    assert Twin.load(path).config.algo == "twin"
