"""Observations of every kind of space: how they are stored, trained on, predicted from, refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance_envs import Dataless
from conftest import MakeConfig
from rl_training import DQN, DRQN, PPO, RecurrentPPO
from rl_training.envs import VectorAdapter, make_vector_env
from rl_training.envs.spaces import action_spec, obs_spec
from rl_training.errors import ConfigError, EnvironmentFailure
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.workflows import load_policy, resume_training
from rl_training.tools.episodes import PolicyPlayer
from rl_training.types import ArraySpec, ObsSpec, OutsideSpaceError
from state_compare import assert_same_run
from test_resume import StopAt

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
MASK = spaces.MultiBinary(2)
TWO = action_spec(spaces.Discrete(2))
NESTED = spaces.Dict(
    {
        "agent": spaces.Dict({"place": spaces.Discrete(5, start=-2), "speed": BOX}),
        "cards": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
        "flat": spaces.MultiDiscrete([2, 3]),
    }
)
SPACES: dict[str, gym.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "discrete with start": spaces.Discrete(3, start=7),
    "multi_discrete": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "multi_discrete grid": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])),
    "multi_binary": spaces.MultiBinary(3),
    "multi_binary grid": spaces.MultiBinary([2, 2]),
    "tuple": spaces.Tuple((spaces.Discrete(2), BOX)),
    "nested": NESTED,
}


def spec_of(space: gym.Space[Any]) -> ObsSpec:
    return obs_spec(space, TWO)


def shapes(spec: ObsSpec) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in spec.leaves.items()}


def adapted(make_config: MakeConfig, env_fn: Any, vectorization: str = "sync") -> VectorAdapter:
    config = make_config(num_envs=3, vectorization=vectorization)
    return VectorAdapter(make_vector_env(config, env_fn=env_fn), 0)


def as_dict(obs: Any) -> dict[str, Any]:
    return obs if isinstance(obs, dict) else {"": obs}


def equal(one: Any, other: Any) -> bool:
    one, other = as_dict(one), as_dict(other)
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


# -- how they are stored ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "obs", "stored"),
    [
        (spaces.Discrete(3), 2, {"": [0, 0, 1]}),
        (spaces.Discrete(3), np.int64(0), {"": [1, 0, 0]}),
        (spaces.Discrete(3, start=-1), -1, {"": [1, 0, 0]}),
        (SPACES["multi_discrete"], np.array([2, -1]), {"": [0, 1, 1, 0, 0]}),
        (
            SPACES["multi_discrete grid"],
            np.array([[1, 0], [3, 1]]),
            {"": [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1]},
        ),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), {"": [1, 0, 1]}),
        (spaces.Tuple((spaces.Discrete(2), BOX)), (1, [0.5, -1.0]), {"0": [0, 1], "1": [0.5, -1]}),
        (
            NESTED,
            {
                "agent": {"place": 2, "speed": [0.25, 0.5]},
                "cards": (1, [0, 1]),
                "flat": [1, 2],
            },
            {
                "agent.place": [0, 0, 0, 0, 1],
                "agent.speed": [0.25, 0.5],
                "cards.0": [0, 1, 0],
                "cards.1": [0, 1],
                "flat": [0, 1, 0, 0, 1],
            },
        ),
    ],
)
def test_observations_become_named_arrays(
    space: gym.Space[Any], obs: Any, stored: dict[str, list[float]]
) -> None:
    spec = spec_of(space)
    arrays = as_dict(spec.cast(obs))
    assert {name: array.tolist() for name, array in arrays.items()} == stored
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    assert shapes(spec) == {name: array.shape for name, array in arrays.items()}


def test_images_in_nested_spaces_are_images() -> None:
    spec = spec_of(spaces.Dict({"eyes": spaces.Tuple((IMAGE, IMAGE)), "at": spaces.Discrete(2)}))
    assert shapes(spec) == {"at": (2,), "eyes.0": (3, 36, 40), "eyes.1": (3, 36, 40)}
    assert spec.leaves["eyes.1"].is_image
    left, right = IMAGE.sample(), IMAGE.sample()
    stored: Any = spec.cast({"eyes": (left, right), "at": 0})
    assert np.array_equal(stored["eyes.1"], np.moveaxis(right, -1, 0))


def test_a_key_with_a_dot_and_a_number_as_key_are_found() -> None:
    spec = spec_of(spaces.Dict({"a.b": BOX, "c": spaces.Dict({"d.e": spaces.Discrete(2)})}))
    stored: Any = spec.cast({"a.b": [1, 2], "c": {"d.e": 1}})
    assert {name: leaf.tolist() for name, leaf in stored.items()} == {
        "a.b": [1, 2],
        "c.d.e": [0, 1],
    }
    numbered: Any = spec_of(spaces.Dict({0: BOX, 1: BOX})).cast({0: [1, 2], 1: [3, 4]})  # type: ignore[dict-item]
    assert numbered["1"].tolist() == [3, 4]


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_batch_is_stored_as_its_rows_are(space: gym.Space[Any], make_config: MakeConfig) -> None:
    env = adapted(make_config, lambda: Dataless(space))
    envs: Any = env.env.unwrapped.envs  # type: ignore[attr-defined]
    ended = 0
    obs = env.reset()
    for _ in range(40):
        for i, one in enumerate(envs):
            row = {name: leaf[i] for name, leaf in as_dict(obs).items()}
            assert equal(row, env.obs_spec.cast(one.unwrapped.shown[-1]))
        step = env.step(np.zeros(3, np.int64))
        for j in np.flatnonzero(step.terminated | step.truncated):
            ended += 1
            row = {name: leaf[j] for name, leaf in as_dict(step.final_obs).items()}
            assert equal(row, env.obs_spec.cast(envs[j].unwrapped.shown[-2]))
        obs = step.obs
    assert ended


@pytest.mark.parametrize("name", ["discrete with start", "multi_discrete grid", "nested"])
def test_workers_return_the_same_as_one_process(name: str, make_config: MakeConfig) -> None:
    make = functools.partial(Dataless, SPACES[name])
    one, workers = (adapted(make_config, make, kind) for kind in ("sync", "async"))
    try:
        assert equal(one.reset(), workers.reset())
        ended = False
        for _ in range(30):
            here, there = (env.step(np.zeros(3, np.int64)) for env in (one, workers))
            assert equal(here.obs, there.obs)
            assert equal(here.final_obs, there.final_obs)
            ended = ended or bool((here.terminated | here.truncated).any())
        assert ended
    finally:
        workers.close()


class NativeCounter(VectorEnv[Any, Any, Any]):
    """Counts to four; a native vector, whose Discrete observations are an array of integers."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 2) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Discrete(5, start=1)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = np.arange(1, 1 + self.num_envs)
        return self.count, {}

    def step(self, actions: Any) -> Any:
        self.count = np.where(self.count == 5, 1, self.count + 1)
        none = np.zeros(self.num_envs, bool)
        return self.count, np.ones(self.num_envs), self.count == 5, none, {}


def test_a_native_vector_of_discrete_observations() -> None:
    env = VectorAdapter(NativeCounter(), 0)
    assert env.reset().tolist() == np.eye(5)[[0, 1]].tolist()  # type: ignore[union-attr]
    for expected in ([1, 2], [2, 3], [3, 4], [4, 0]):
        assert equal(env.step(np.zeros(2, np.int64)).obs, np.eye(5)[expected])


# -- what environments return wrongly --------------------------------------------------------------


class Returns(gym.Env[Any, Any]):
    """Returns ``good`` on reset and after the first step, then ``bad``."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gym.Space[Any], good: Any, bad: Any, ends: bool = False) -> None:
        self.observation_space = space
        self.good, self.bad, self.ends = good, bad, ends

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return self.good, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 2:
            return self.bad, 0.0, self.ends, False, {}
        return self.good, 0.0, False, False, {}


@pytest.mark.parametrize("ends", [False, True], ids=["continues", "ends"])
@pytest.mark.parametrize(
    ("space", "good", "bad", "message"),
    [
        (spaces.Discrete(4), 0, 4, "the observation contains 4, .* the values 0 to 3"),
        (spaces.Discrete(4), 0, -1, "the observation contains -1, .* the values 0 to 3"),
        (
            spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3], start=[5, 1]))),
            (0, np.array([5, 1])),
            (0, np.array([5, 4])),
            r"observation\['1'\] contains 4, .* the values 1 to 3",
        ),
    ],
)
def test_a_value_outside_its_space_is_named(
    space: gym.Space[Any],
    good: Any,
    bad: Any,
    message: str,
    ends: bool,
    make_config: MakeConfig,
) -> None:
    fine = iter([True, False, True])
    env = adapted(make_config, lambda: Returns(space, good, good if next(fine) else bad, ends))
    env.reset()
    env.step(np.zeros(3, np.int64))
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 1 \(Returns\) returned .*: {message}"
    ):
        env.step(np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("space", "good", "bad", "message"),
    [
        (spaces.Discrete(4), 0, np.zeros(2, np.int64), r"the observation must be .*shape \(\)"),
        (spaces.Discrete(4), 0, 0.5, r"the observation must be .*0.5 cannot be stored as int64"),
        (spaces.Tuple((MASK, MASK)), (np.ones(2, np.int8),) * 2, 3, "must be a tuple of 2; got 3"),
        (
            spaces.Tuple((spaces.Dict({"x": BOX}), spaces.Discrete(2))),
            ({"x": np.zeros(2, np.float32)}, 0),
            ({"x": np.zeros(3, np.float32)}, 0),
            r"observation\[0\]\['x'\] must be .* shape \(2,\).* got an array of shape \(3,\)",
        ),
        (
            spaces.Dict({"in": spaces.Dict({"x": BOX})}),
            {"in": {"x": np.zeros(2, np.float32)}},
            {"in": {"y": np.zeros(2, np.float32)}},
            r"observation\['in'\] has no key 'x'; its keys: 'y'",
        ),
    ],
)
def test_a_wrong_shape_inside_is_named(
    space: gym.Space[Any], good: Any, bad: Any, message: str, make_config: MakeConfig
) -> None:
    env = adapted(make_config, lambda: Returns(space, good, bad))
    env.reset()
    env.step(np.zeros(3, np.int64))
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 0 \(Returns\) failed in step 2 .*{message}"
    ):
        env.step(np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("space", "obs", "stored"),
    [
        (spaces.MultiBinary(2), np.array([0.0, 1.0]), {"": [0, 1]}),
        (spaces.Discrete(3), 1.0, {"": [0, 1, 0]}),
        (spaces.Discrete(3, dtype=np.uint8), 2, {"": [0, 0, 1]}),
        (
            spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(1))),
            [True, [1]],
            {"0": [0, 1], "1": [1]},
        ),
        (spaces.Dict({"a": spaces.MultiBinary(1)}), {"a": np.ones(1), "more": 3}, {"a": [1]}),
    ],
)
def test_other_dtypes_with_the_same_values_pass(
    space: gym.Space[Any], obs: Any, stored: dict[str, list[float]], make_config: MakeConfig
) -> None:
    env = adapted(make_config, lambda: Returns(space, obs, obs, ends=True))
    shown = [env.reset()]
    for _ in range(2):
        step = env.step(np.zeros(3, np.int64))
        shown += [step.obs, step.final_obs]
    assert step.terminated.all()
    for one in shown:
        assert {name: leaf[1].tolist() for name, leaf in as_dict(one).items()} == stored


# -- training --------------------------------------------------------------------------------------

TABULAR = ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"]
LIMIT = {"max_episode_steps": 50}


@pytest.mark.parametrize("algo", ["ppo", "dqn", "a2c", "recurrent_ppo", "ppg"])
@pytest.mark.parametrize("env_id", TABULAR)
def test_tabular_environments_train(env_id: str, algo: str, make_config: MakeConfig) -> None:
    config = make_config(algo=algo, env_id=env_id, env_kwargs=LIMIT, total_timesteps=256)
    result = ExperimentManager.setup(config).train()
    assert "eval/return_mean" in result.metrics


def test_drqn_takes_a_discrete_observation_and_a_tuple(make_config: MakeConfig) -> None:
    agent = DRQN(make_config(algo="drqn", env_id="FrozenLake-v1", total_timesteps=256))
    agent.learn()
    action, _ = agent.predict(3)
    assert action in range(4)
    agent = DRQN(make_config(algo="drqn", env_id="Blackjack-v1", total_timesteps=256))
    agent.learn()
    assert agent.predict((12, 5, 0))[0] in range(2)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
@pytest.mark.parametrize("name", ["multi_discrete grid", "multi_binary grid", "nested"])
def test_every_kind_trains(name: str, algo: str, make_config: MakeConfig) -> None:
    config = make_config(algo=algo, total_timesteps=256, normalize_obs=True)
    result = ExperimentManager.setup(config, env_fn=lambda: Dataless(SPACES[name])).train()
    assert result.metrics["global_step"] >= 256


def test_images_and_choices_train_together(make_config: MakeConfig) -> None:
    space = spaces.Dict({"see": spaces.Tuple((IMAGE,)), "at": spaces.Discrete(3)})
    config = make_config(total_timesteps=64, num_steps=16, feature_size=16, device="cpu")
    result = ExperimentManager.setup(config, env_fn=lambda: Dataless(space)).train()
    assert result.metrics["global_step"] >= 64


class Parity(gym.Env[Any, Any]):
    """Choose the parity of a number that is deep inside the observation."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        {"in": spaces.Tuple((spaces.MultiBinary(1), spaces.Discrete(6, start=10)))}
    )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10, 16))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        return self._observe(), float(action == self.number % 2), True, False, {}

    def _observe(self) -> Any:
        return {"in": (np.zeros(1, np.int8), self.number)}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (PPO, {"learning_rate": 0.01, "num_steps": 128}),
        (DQN, {"algo": "dqn", "learning_rate": 0.01, "buffer_size": 4096}),
        (RecurrentPPO, {"algo": "recurrent_ppo", "learning_rate": 0.01}),
    ],
    ids=["ppo", "dqn", "recurrent_ppo"],
)
def test_what_is_observed_can_be_learnt(
    make: Callable[..., Any], settings: dict[str, Any], make_config: MakeConfig
) -> None:
    agent = make(make_config(total_timesteps=3072, **settings), env_fn=Parity)
    agent.learn()
    assert agent.evaluate(30).mean_return == 1.0
    for number in range(10, 16):
        action, _ = agent.predict({"in": (np.zeros(1, np.int8), number)})
        assert action == number % 2


class MaskedRooms(gym.Env[Any, Any]):
    """From each of three rooms one door is locked."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict(
        {"room": spaces.Discrete(3), "action_mask": spaces.MultiBinary(3)}
    )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.room, self.t = 0, 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action != self.room
        self.room, self.t = int(action), self.t + 1
        return self._observe(), float(self.room == 2), False, self.t == 9, {}

    def _observe(self) -> Any:
        return {"room": self.room, "action_mask": np.arange(3) != self.room}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_masks_work_beside_choices(algo: str, make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(algo=algo), env_fn=MaskedRooms)
    policy = load_policy(trainer.train().checkpoint_path)
    action, _ = policy.predict({"room": 1, "action_mask": [1, 0, 0]})
    assert action == 0


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_frozen_lake_resumes_exactly(
    algo: str, vectorization: str, make_config: MakeConfig
) -> None:
    config = make_config(
        algo=algo, env_id="FrozenLake-v1", vectorization=vectorization, total_timesteps=1024
    )
    whole = ExperimentManager.setup(config).train()
    part = ExperimentManager.setup(config, callbacks=[StopAt(300)]).train()
    assert part.interrupted
    resume_training(part.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)


def test_a_nested_observation_resumes_exactly(make_config: MakeConfig) -> None:
    config = make_config(total_timesteps=512)
    make = functools.partial(Dataless, NESTED)
    whole = ExperimentManager.setup(config, env_fn=make).train()
    part = ExperimentManager.setup(config, env_fn=make, callbacks=[StopAt(200)]).train()
    assert part.interrupted
    resume_training(part.run_dir, env_fn=make)
    assert_same_run(whole.run_dir, part.run_dir)


# -- prediction ------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_predict_takes_the_environments_own_observations(
    space: gym.Space[Any], make_config: MakeConfig
) -> None:
    agent = PPO(make_config(), env_fn=lambda: Dataless(space))
    policy = agent._current_policy()
    space.seed(3)
    rows = [space.sample() for _ in range(4)]
    empty: Any = create_empty_array(space, 4)
    together = concatenate(space, rows, empty)
    actions, _ = agent.predict(together)
    assert actions.shape == (4,)
    for i, row in enumerate(rows):
        batch, single = policy._as_batch(row)
        assert single
        assert equal(
            {name: leaf[0] for name, leaf in as_dict(batch).items()}, policy.obs_spec.cast(row)
        )
        assert agent.predict(row)[0] == actions[i]


def test_a_saved_policy_takes_the_environments_own_observations(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    agent = PPO(make_config(env_id="Blackjack-v1"))
    agent.learn()
    loaded = PPO.load(agent.save(tmp_path / "policy"))
    env = gym.make("Blackjack-v1")
    player = PolicyPlayer(loaded._current_policy(), deterministic=True, seed=0)
    for seed in range(10):
        obs, _ = env.reset(seed=seed)
        action, _ = loaded.predict(obs)
        assert action == agent.predict(obs)[0] == player.act(obs)


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (spaces.Discrete(4), 4, "the observation contains 4, .* values 0 to 3"),
        (spaces.Discrete(4), [0, 1, 9], "the observation contains 9, .* values 0 to 3"),
        (spaces.Discrete(4), 1.5, "the observation contains 1.5"),
        (spaces.Discrete(4), "1", "the observation has dtype"),
        (spaces.Discrete(4), [[1]], r"shape \(1, 1\); expected \(\), or \(n,\) for a batch"),
        (SPACES["multi_discrete"], [1, 0, 0], r"shape \(3,\); expected \(2,\), or \(n, 2\)"),
        (SPACES["tuple"], [0, [1, 2]], "the observation must be a tuple of 2; got list"),
        (SPACES["tuple"], np.zeros((2, 2)), "must be a tuple of 2; got ndarray"),
        (SPACES["tuple"], (0,), "the observation must be a tuple of 2; got tuple"),
        (SPACES["tuple"], (0, [[1, 2]]), "some entries .* are batched and some are not"),
        (
            NESTED,
            {"agent": 0},
            r"must be a dict with \['agent', 'cards', 'flat'\]; got \['agent'\]",
        ),
        (
            NESTED,
            {"agent": {"place": 0}, "cards": (0, [0, 0]), "flat": [0, 0]},
            r"the observation\['agent'\] must be a dict with \['place', 'speed'\]; got \['place'\]",
        ),
        (
            NESTED,
            {"agent": {"place": 0, "speed": [0, 0]}, "cards": {0: 0}, "flat": [0, 0]},
            r"the observation\['cards'\] must be a tuple of 2; got \[0\]",
        ),
    ],
)
def test_a_wrong_observation_is_refused_by_predict(
    space: gym.Space[Any], obs: Any, message: str, make_config: MakeConfig
) -> None:
    agent = PPO(make_config(), env_fn=lambda: Dataless(space))
    with pytest.raises(ConfigError, match=message):
        agent.predict(obs)


# -- refusals --------------------------------------------------------------------------------------


class Grid(gym.Env[Any, Any]):
    """Observations of the form that MiniGrid returns: a small image, a direction and a text."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict(
        {
            "direction": spaces.Discrete(4),
            "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "mission": spaces.Text(50),
        }
    )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, self.np_random.random() < 0.2, False, {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_hint_for_a_text_field_works(vectorization: str, make_config: MakeConfig) -> None:
    config = make_config(vectorization=vectorization, total_timesteps=128)
    with pytest.raises(ConfigError, match=r"entry 'mission' is Text.* not an array") as caught:
        ExperimentManager.setup(config, env_fn=Grid)
    hint = re.search(r"set wrappers: (\[.*\])$", str(caught.value))
    assert hint, str(caught.value)
    wrappers = yaml.safe_load(hint[1])
    assert wrappers[0]["kwargs"] == {"filter_keys": ["direction", "image"]}
    # The image is too small for convolutions.
    flat = config.with_overrides(
        wrappers=[*wrappers, "gymnasium.wrappers:FlattenObservation"], vectorization="sync"
    )
    assert ExperimentManager.setup(flat, env_fn=Grid).train().metrics["global_step"] >= 128


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(5), "it is Text.*, which is not an array.*ObservationWrapper"),
        (spaces.Sequence(BOX), "it is Sequence.* not an array"),
        (
            spaces.Tuple((BOX, spaces.Graph(BOX, None), spaces.Discrete(2))),
            r"entry '1' is Graph.*FilterObservation', kwargs: {filter_keys: \[0, 2\]}",
        ),
        (
            spaces.Dict({"a": spaces.Dict({"b": spaces.Sequence(BOX), "c": BOX})}),
            "entry 'a.b' is Sequence.*ObservationWrapper",
        ),
        (spaces.Dict({"a": BOX, "b": spaces.OneOf((BOX, BOX))}), "entry 'b' is OneOf"),
        (spaces.Dict({"a": BOX, "b": spaces.Tuple(())}), "entry 'b' contains nothing"),
        (spaces.Dict(), "it contains nothing to observe"),
        (spaces.Dict({"action_mask": MASK}), "it contains nothing to observe"),
        (spaces.Dict({"a.b": BOX, "a": spaces.Dict({"b": BOX})}), r"no unique name .*\['a.b'\]"),
        (spaces.Dict({"": BOX}), r"no unique name .*\[''\]"),
        (spaces.Dict({(0, 1): BOX}), "neither text nor a number"),  # type: ignore[dict-item]
        (
            spaces.Dict({"a": BOX, "in": spaces.Dict({"action_mask": MASK})}),
            "'in.action_mask': an action mask must be one array at the top level",
        ),
        (spaces.Dict({"a": BOX, "action_mask": spaces.MultiBinary(3)}), r"must have shape \(2,\)"),
    ],
)
def test_spaces_that_cannot_be_learnt_from_are_refused(
    space: gym.Space[Any], message: str, vectorization: str, make_config: MakeConfig
) -> None:
    config = make_config(vectorization=vectorization, num_envs=1)
    with pytest.raises(ConfigError, match=message):
        ExperimentManager.setup(config, env_fn=functools.partial(Returns, space, None, None))


# -- plain forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [*SPACES.values(), BOX, IMAGE], ids=[*SPACES, "box", "image"])
def test_plain_forms_round_trip(space: gym.Space[Any]) -> None:
    spec = spec_of(space)
    plain = yaml.safe_load(yaml.safe_dump(spec.to_plain()))
    assert plain == spec.to_plain()
    restored = ObsSpec.from_plain(plain)
    assert restored == spec
    space.seed(1)
    obs = space.sample()
    assert equal(restored.cast(obs), spec.cast(obs))


def test_the_plain_forms_of_arrays_and_images_are_the_earlier_ones() -> None:
    plain = {"a": [[2], "float32"], "b.c": [[3, 36, 40], "uint8", [36, 40, 3]]}
    spec = spec_of(spaces.Dict({"a": BOX, "b.c": IMAGE}))
    assert spec.to_plain() == plain
    assert ObsSpec.from_plain(plain) == spec
    assert spec_of(BOX).to_plain() == {"": [[2], "float32"]}


HOT = [[5], "float32", [2], [2, 3], [0, 0], []]


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        [],
        "ab",
        [[2]],
        [[2], "float64"],
        [[2], "float32", [3]],
        [[-2], "float32"],
        [[2.0], "float32"],
        [[True], "float32"],
        HOT[:4],
        HOT[:5],
        [*HOT, []],
        [[6], *HOT[1:]],
        [[5, 1], *HOT[1:]],
        [[5], "uint8", *HOT[2:]],
        [[5], "float32", [3], *HOT[3:]],
        [[5], "float32", [2], [5, 0], [0, 0], []],
        [[5], "float32", [2], [2, 3], [0], []],
        [[5], "float32", [2], [2, 3], [0, 2**63], []],
        [[5], "float32", [2], [2, 3], [0, 0.0], []],
        [[5], "float32", [2], [], [0, 0], []],
        [*HOT[:5], ["other"]],
        [*HOT[:5], ["a", "b"]],
        [*HOT[:5], [None]],
        [*HOT[:5], [["a"]]],
        [*HOT[:5], "a"],
    ],
    ids=str,
)
def test_a_plain_form_that_is_none_is_refused(leaf: Any) -> None:
    ObsSpec.from_plain({"a": HOT})
    with pytest.raises(ValueError, match=r"."):
        ObsSpec.from_plain({"a": leaf})


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {0: [[2], "float32"]},
        {"": [[2], "float32"], "a": [[2], "float32"]},
        {"action_mask": [[2], "bool"]},
        {"": [*HOT[:5], ["a"]]},
    ],
    ids=str,
)
def test_arrays_that_make_no_observation_are_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        ObsSpec.from_plain(plain)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.sampled_from(["float32", "uint8", "bool", "a", "", "0"]),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)
COUNTS = st.lists(st.integers(0, 6) | PLAIN, max_size=3)
LEAVES = PLAIN | st.lists(COUNTS | st.sampled_from(["float32", "uint8"]) | PLAIN, max_size=7)


@given(st.dictionaries(st.sampled_from(["", "a", "a.b", "0", "action_mask"]), LEAVES, max_size=3))
@settings(max_examples=300, deadline=None)
def test_a_fuzzed_plain_form_is_refused_or_round_trips(plain: dict[str, Any]) -> None:
    try:
        spec = ObsSpec.from_plain(plain)
    except ValueError:
        return
    assert ObsSpec.from_plain(spec.to_plain()) == spec


@given(st.permutations([[5], "float32", [2], [2, 3], [0, 0], ["a"]]))
@settings(max_examples=100, deadline=None)
def test_shuffled_fields_are_refused_or_round_trip(leaf: list[Any]) -> None:
    try:
        spec = ArraySpec.from_plain(leaf)
    except ValueError:
        return
    assert spec.to_plain() == leaf


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 3)), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_one_hot_vectors_can_be_read_back(parts: list[tuple[int, int]], seed: int) -> None:
    space = spaces.MultiDiscrete([n for n, _ in parts], start=[s for _, s in parts], seed=seed)
    spec = spec_of(space)
    batch = np.stack([space.sample() for _ in range(5)])
    stored: Any = spec.cast(batch)
    blocks = np.split(stored, np.cumsum(space.nvec)[:-1], axis=1)
    assert np.array_equal(np.stack([b.argmax(1) for b in blocks], 1) + space.start, batch)
    assert (stored.sum(1) == len(parts)).all()
    with pytest.raises(OutsideSpaceError) as caught:
        spec.cast(np.concatenate([batch, batch[:1] + space.nvec[0] + 10]))
    assert caught.value.row == 5
