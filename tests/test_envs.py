"""Environments from configs: what is made, what is refused and how, how they are brought back."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from conformance_envs import Dataless, FixedLength, OutsideSeed, OwnState, Recorder, ScriptedActor
from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint, save_checkpoint
from rl_training.config import TrainConfig
from rl_training.envs import VectorAdapter, make_env, make_vector_env
from rl_training.envs.episodes import SeededEpisodes
from rl_training.envs.sync import FastSyncVectorEnv
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import ConfigError
from rl_training.runtime.sources import LocalSource
from rl_training.types import ActionSpec, Array, Obs, Progress, VectorStep

START = Progress(0, 1)
FAMILIES = {
    "CartPole-v1": None,
    "Pendulum-v1": None,
    "LunarLander-v3": "Box2D",
    "HalfCheetah-v5": "mujoco",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo leaves a log wherever it warns."""
    monkeypatch.chdir(tmp_path)


def _needs(env_id: str) -> None:
    module = FAMILIES.get(env_id)
    if module is not None:
        pytest.importorskip(module)


def random_actions(spec: ActionSpec, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Policy actions: choices from zero; for Box a little beyond the bounds at [-1, 1]."""
    rng = np.random.default_rng(seed)
    if spec.kind == "box":
        return rng.uniform(-1.3, 1.3, (*shape, *spec.shape)).astype(np.float32)
    if spec.kind == "multi_binary":
        return rng.integers(2, size=(*shape, *spec.shape))
    nvec = np.asarray(spec.nvec).reshape(spec.shape)
    return rng.integers(nvec, size=(*shape, *spec.shape))


def assert_same(left: Any, right: Any) -> None:
    """Equal bit for bit, dtypes included."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same(value, right[key])
    elif isinstance(left, tuple) and not isinstance(left, VectorStep):
        assert left == right
    elif isinstance(left, VectorStep):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif left is None:
        assert right is None
    else:
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


# -- what is made ----------------------------------------------------------------------------------


def test_the_default_vector_is_gymnasiums_sync_vector_with_same_step_autoreset() -> None:
    env = make_vector_env(TrainConfig(env_id="CartPole-v1", num_envs=3))
    assert isinstance(env, SyncVectorEnv)
    assert env.num_envs == 3
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    obs, _ = env.reset()
    assert obs.shape == (3, 4)
    assert obs.dtype == np.float32
    assert make_vector_env(TrainConfig(num_envs=3), 5).num_envs == 5


def test_an_environment_reports_its_return_and_length_at_the_end_only(
    make_config: MakeConfig,
) -> None:
    env = make_env(make_config(env_id="CartPole-v1"))
    for _ in range(3):
        env.reset()
        total, length, over = 0.0, 0, False
        while not over:
            _, reward, terminated, truncated, info = env.step(0)
            total, length, over = total + float(reward), length + 1, terminated or truncated
            assert ("episode" in info) == over
        assert info["episode"] == {"r": total, "l": length}
        assert length > 5


def test_a_vector_reports_episodes_as_gymnasium_does(make_config: MakeConfig) -> None:
    config = make_config(env_id="conform/FixedLength-v0", env_kwargs={"length": 4})
    env = make_vector_env(config)
    env.reset()
    infos = [env.step(np.zeros(2, np.int64))[4] for _ in range(8)]
    assert ["final_info" in info for info in infos] == [False, False, False, True] * 2
    episode = infos[3]["final_info"]["episode"]
    assert episode["r"].tolist() == [4.0, 4.0]
    assert episode["l"].tolist() == [4, 4]


def test_env_kwargs_reach_the_environment(make_config: MakeConfig) -> None:
    config = make_config(
        env_id="CartPole-v1", env_kwargs={"sutton_barto_reward": True, "max_episode_steps": 3}
    )
    env = make_env(config)
    env.reset()
    steps = [env.step(i % 2) for i in range(3)]
    assert [step[1] for step in steps] == [0.0, 0.0, 0.0]
    assert [step[3] for step in steps] == [False, False, True]


def test_wrappers_go_on_innermost_first_with_their_kwargs(make_config: MakeConfig) -> None:
    scale = {"path": "conformance_envs:ScaleReward", "kwargs": {"factor": 10.0}}
    shift = "conformance_envs:ShiftReward"

    def reward(*wrappers: Any) -> Any:
        env = make_env(make_config(env_id="conform/FixedLength-v0", wrappers=wrappers))
        env.reset()
        return env.step(0)[1]

    assert reward(scale, shift) == 11.0
    assert reward(shift, scale) == 20.0
    assert reward() == 1.0


def test_wrappers_can_make_a_refused_observation_fit(make_config: MakeConfig) -> None:
    flatten = {"wrappers": ["gymnasium.wrappers:FlattenObservation"]}
    env = VectorAdapter(make_vector_env(make_config(env_id="FrozenLake-v1", **flatten)), 0)
    assert env.obs_spec.leaves[""].shape == (16,)
    assert env.reset().shape == (2, 16)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("vectorization", "kind"),
    [("sync", FastSyncVectorEnv), ("async", WorkerVectorEnv), ("native", CartPoleVectorEnv)],
)
def test_vectorization_picks_the_vector(
    vectorization: str, kind: type, make_config: MakeConfig
) -> None:
    env = make_vector_env(make_config(env_id="CartPole-v1", vectorization=vectorization))
    try:
        assert isinstance(env.unwrapped, kind)
        assert env.num_envs == 2
        env.reset(seed=0)
        assert env.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
    finally:
        env.close()


def test_native_without_a_vector_of_its_own_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"Pendulum-v1 has no native vector.*sync or async"):
        make_vector_env(make_config(env_id="Pendulum-v1", vectorization="native"))


def test_native_takes_env_kwargs_and_refuses_bad_ones(make_config: MakeConfig) -> None:
    config = make_config(vectorization="native", env_kwargs={"sutton_barto_reward": True})
    env = make_vector_env(config)
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.int64))[1].tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match=r"cannot make CartPole-v1 with env_kwargs.*nonsense"):
        make_vector_env(make_config(vectorization="native", env_kwargs={"nonsense": 1}))


def test_env_fn_makes_an_unregistered_environment_but_no_native_vector(
    make_config: MakeConfig,
) -> None:
    env = make_vector_env(make_config(), env_fn=functools.partial(FixedLength, 2))
    assert env.reset()[0].shape == (2, 1)
    with pytest.raises(ConfigError, match="env_fn"):
        make_vector_env(make_config(vectorization="native"), env_fn=FixedLength)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's that registers an environment when it is imported."""
    name = "somebodys_envs"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        import gymnasium as gym
        from conformance_envs import FixedLength

        gym.register("Somebodys-v0", FixedLength, kwargs={"length": 2})
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(gym.registry, "Somebodys-v0", raising=False)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_module_before_the_id_is_imported_first(
    vectorization: str, user_module: str, make_config: MakeConfig
) -> None:
    config = make_config(env_id=f"{user_module}:Somebodys-v0", vectorization=vectorization)
    env = make_vector_env(config)
    try:
        env.reset()
        env.step(np.zeros(2, np.int64))
        assert env.step(np.zeros(2, np.int64))[2].tolist() == [True, True]
    finally:
        env.close()


# -- mistakes --------------------------------------------------------------------------------------


def test_a_module_that_cannot_be_imported_is_named(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"cannot import 'no_such_package'"):
        make_vector_env(make_config(env_id="no_such_package:Thing-v0"))


@pytest.mark.parametrize(
    ("wrong", "right"), [("CartPoel-v1", "CartPole-v1"), ("LunarLandr-v3", "LunarLander-v3")]
)
def test_an_unknown_id_gets_a_did_you_mean(wrong: str, right: str, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=rf"{wrong}.*Did you mean '{right}'"):
        make_env(make_config(env_id=wrong))


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('Box2D is not installed, you can install it by `pip install "x"`', "rl_training[box2d]"),
        ("MuJoCo is not installed, run `pip install mujoco`", "rl_training[mujoco]"),
        ("gnubg is not installed", "gnubg is not installed"),
    ],
)
def test_a_missing_extra_names_its_installation(
    message: str, hint: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise gym.error.DependencyNotInstalled(message)

    monkeypatch.setattr(gym, "make", refuse)
    with pytest.raises(ConfigError) as caught:
        make_vector_env(make_config(env_id="CartPole-v1"))
    assert hint in str(caught.value)
    assert "CartPole-v1" in str(caught.value)


def test_atari_without_its_extra_names_its_installation(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(gym.registry, "ALE/Pong-v5", raising=False)
    with pytest.raises(ConfigError, match=r"ALE/Pong-v5.*pip install 'rl_training\[atari\]'"):
        make_env(make_config(env_id="ALE/Pong-v5"))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_unknown_env_kwargs_are_a_config_error(vectorization: str, make_config: MakeConfig) -> None:
    config = make_config(env_kwargs={"gravitee": 9.8}, vectorization=vectorization)
    with pytest.raises(ConfigError, match=r"cannot make CartPole-v1 with env_kwargs.*gravitee"):
        make_vector_env(config)


def test_env_kwargs_that_the_environment_rejects_are_a_config_error(
    make_config: MakeConfig,
) -> None:
    _needs("LunarLander-v3")
    config = make_config(env_id="LunarLander-v3", env_kwargs={"gravity": 5.0})
    with pytest.raises(ConfigError, match=r"cannot make LunarLander-v3 with env_kwargs.*gravity"):
        make_vector_env(config)


@pytest.mark.parametrize(
    ("path", "named"),
    [("gymnasium.wrappers:NoSuchWrapper", "NoSuchWrapper"), ("no_such_module:Wrapper", "no_such")],
)
def test_a_wrapper_that_is_not_there_is_a_config_error(
    path: str, named: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=rf"'wrappers': .*{named}"):
        make_env(make_config(wrappers=[path]))


def test_a_wrapper_that_rejects_its_kwargs_is_a_config_error(make_config: MakeConfig) -> None:
    wrapper = {"path": "conformance_envs:ScaleReward", "kwargs": {"faktor": 2.0}}
    with pytest.raises(ConfigError) as caught:
        make_env(make_config(wrappers=[wrapper]))
    assert all(word in str(caught.value) for word in ("wrappers", "ScaleReward", "faktor"))


# -- spaces ----------------------------------------------------------------------------------------

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


def adapted(
    observation: gym.Space[Any] = BOX, action: gym.Space[Any] | None = None
) -> tuple[VectorAdapter, list[Dataless]]:
    """Two environments of these spaces behind an adapter."""
    envs = [Dataless(observation, action or spaces.Discrete(2)) for _ in range(2)]
    makers: list[Callable[[], gym.Env[Any, Any]]] = [
        functools.partial(lambda e: e, e) for e in envs
    ]
    return VectorAdapter(FastSyncVectorEnv(makers), seed=0), envs


def test_a_box_is_observed_as_it_is() -> None:
    env, envs = adapted(BOX)
    assert_same(env.reset(), np.stack([e.shown[-1] for e in envs]))


def test_a_dict_of_boxes_is_observed_key_by_key() -> None:
    image = spaces.Box(0, 255, (4, 4, 1), np.uint8)
    env, envs = adapted(spaces.Dict({"vector": BOX, "image": image}))
    obs = env.reset()
    assert isinstance(obs, dict)
    assert env.obs_spec.shape() == {"vector": (3,), "image": (1, 4, 4)}
    assert_same(obs["vector"], np.stack([e.shown[-1]["vector"] for e in envs]))
    assert_same(obs["image"][:, 0], np.stack([e.shown[-1]["image"][..., 0] for e in envs]))


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ((96, 80, 3), (3, 96, 80)),
        ((3, 96, 80), (3, 96, 80)),
        ((84, 84), (1, 84, 84)),
        ((4, 96, 80, 3), (12, 96, 80)),
        ((4, 3, 96, 80), (12, 96, 80)),
        ((4, 84, 84), (4, 84, 84)),
    ],
)
def test_images_are_stored_channel_first_whatever_their_shape(
    given: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    env, envs = adapted(spaces.Box(0, 255, given, np.uint8))
    obs = env.reset()
    assert env.obs_spec.leaves[""].shape == stored
    assert isinstance(obs, np.ndarray)
    assert obs.flags.c_contiguous
    raw = envs[1].shown[-1]
    channels = raw.reshape(-1, *raw.shape[-2:]) if given[-1] != 3 else None
    if channels is None:  # channels last: one picture after the other, colour by colour
        pictures = raw if raw.ndim == 4 else raw[None]
        channels = np.stack([p[..., c] for p in pictures for c in range(3)])
    assert np.array_equal(obs[1], channels)
    alone: Any = env.obs_spec.cast(raw)
    assert np.array_equal(alone, channels), "as `predict` gets it"
    assert type(env.obs_spec).from_plain(env.obs_spec.to_plain()) == env.obs_spec


def test_final_observations_are_arranged_like_the_others() -> None:
    env, _ = adapted(spaces.Box(0, 255, (40, 50, 3), np.uint8))
    env.reset()
    for _ in range(30):
        step = env.step(np.zeros(2, np.int64))
        if (step.terminated | step.truncated).any():
            break
    assert isinstance(step.final_obs, np.ndarray)
    assert step.final_obs.shape == (2, 3, 40, 50)


def test_bytes_that_are_no_brightness_are_numbers() -> None:
    env, _ = adapted(spaces.Box(0, 3, (8, 8, 3), np.uint8))
    assert env.obs_spec.leaves[""].dtype == "float32"
    assert not env.obs_spec.has_images


@pytest.mark.parametrize(
    ("given", "stored"),
    [("float64", "float32"), ("float32", "float32"), ("uint8", "uint8"), ("int32", "float32")],
)
def test_pixels_stay_bytes_and_every_other_number_is_stored_as_float32(
    given: str, stored: str
) -> None:
    env, envs = adapted(spaces.Box(0, 200, (5,), np.dtype(given).type))
    first = env.reset()
    step = env.step(np.zeros(2, np.int64))
    for obs in (first, step.obs, step.final_obs):
        assert obs.dtype == stored  # type: ignore[union-attr]
    assert envs[0].shown[0].dtype == given
    assert np.array_equal(first[0], envs[0].shown[0].astype(stored))  # type: ignore[index]


def test_observations_are_copies_that_later_steps_leave_alone() -> None:
    env, _ = adapted(BOX)
    first = env.reset()
    assert not isinstance(first, dict)
    kept = first.copy()
    for _ in range(5):
        env.step(np.zeros(2, np.int64))
    assert_same(first, kept)


@pytest.mark.parametrize(
    ("space", "policy_action", "env_action"),
    [
        (spaces.Discrete(3, start=5), [0, 2], [5, 7]),
        (spaces.MultiDiscrete([2, 4]), [[0, 3], [1, 2]], [[0, 3], [1, 2]]),
        (spaces.MultiDiscrete([2, 4], start=[1, 10]), [[0, 3], [1, 2]], [[1, 13], [2, 12]]),
        (spaces.MultiBinary(3), [[0, 1, 1], [1, 0, 1]], [[0, 1, 1], [1, 0, 1]]),
        (spaces.Box(-20.0, 60.0, (1,), np.float32), [[-1.0], [0.5]], [[-20.0], [40.0]]),
        (spaces.Box(-20.0, 60.0, (1,), np.float32), [[7.0], [-7.0]], [[60.0], [-20.0]]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [[7.0], [-3.0]], [[7.0], [-3.0]]),
    ],
    ids=str,
)
def test_policy_actions_become_the_environments_own(
    space: gym.Space[Any], policy_action: Any, env_action: Any
) -> None:
    env, envs = adapted(BOX, space)
    env.reset()
    env.step(np.array(policy_action, env.action_spec.policy_dtype))
    for received, expected in zip([e.actions[-1] for e in envs], env_action, strict=True):
        assert np.array_equal(received, expected)
        assert received.dtype == space.dtype


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Dict({"a": BOX, "b": spaces.Text(4)}), "entry 'b' is Text, which is not an array"),
        (spaces.Dict({"action_mask": spaces.MultiBinary(2)}), "nothing to observe"),
    ],
    ids=["text", "entry", "mask-only"],
)
def test_observations_that_cannot_be_learnt_from_are_refused_by_name(
    space: gym.Space[Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"observation space .*{named}"):
        adapted(space)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Box(0, 5, (1,), np.int32), "Box"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), "Tuple"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "Dict"),
    ],
    ids=["integers", "tuple", "dict"],
)
def test_actions_that_cannot_be_chosen_are_refused_by_name(
    space: gym.Space[Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"action space {named}.* is not supported"):
        adapted(BOX, space)


@pytest.mark.parametrize(
    ("action", "size"), [(spaces.Discrete(4), 4), (spaces.MultiDiscrete([2, 3]), 5)], ids=str
)
def test_an_action_mask_has_an_entry_for_each_choice(action: gym.Space[Any], size: int) -> None:
    def space(count: int) -> gym.Space[Any]:
        return spaces.Dict({"x": BOX, "action_mask": spaces.Box(0, 1, (count,), np.int8)})

    env, envs = adapted(space(size), action)
    assert list(env.obs_spec.encoded) == ["x"]
    obs = env.reset()
    assert isinstance(obs, dict)
    assert obs["action_mask"].dtype == bool
    assert np.array_equal(obs["action_mask"], [e.shown[-1]["action_mask"] for e in envs])
    with pytest.raises(ConfigError, match=rf"'action_mask' must have shape \({size},\)"):
        adapted(space(size + 1), action)


@pytest.mark.parametrize("action", [BOX, spaces.MultiBinary(3)], ids=["box", "multi_binary"])
def test_an_action_mask_without_choices_to_mask_is_refused(action: gym.Space[Any]) -> None:
    mask = spaces.Box(0, 1, (3,), np.int8)
    with pytest.raises(ConfigError, match="'action_mask' goes with Discrete"):
        adapted(spaces.Dict({"x": BOX, "action_mask": mask}), action)


# -- episodes are seeded by run, environment and number --------------------------------------------


def _first_observations(config: TrainConfig[Any], index: int, count: int) -> list[bytes]:
    env = make_env(config, index)
    return [env.reset()[0].tobytes() for _ in range(count)]


def test_two_runs_of_one_seed_have_the_same_episodes_in_each_environment(
    make_config: MakeConfig,
) -> None:
    for index in range(3):
        one = _first_observations(make_config(seed=3), index, 4)
        assert one == _first_observations(make_config(seed=3), index, 4)


def test_no_episode_is_shared_by_neighbouring_seeds_environments_or_numbers(
    make_config: MakeConfig,
) -> None:
    seen = [
        first
        for seed in range(5)
        for index in range(4)
        for first in _first_observations(make_config(seed=seed), index, 5)
    ]
    assert len(set(seen)) == len(seen) == 100


def test_an_episode_depends_on_its_number_and_not_on_what_was_played_before(
    make_config: MakeConfig,
) -> None:
    config = make_config(env_id="CartPole-v1")
    env = make_env(config)
    env.reset()
    for action in (0, 1, 1):
        env.step(action)
    assert env.reset()[0].tobytes() == _first_observations(config, 0, 2)[1]


def test_an_explicit_seed_starts_another_sequence_of_episodes(make_config: MakeConfig) -> None:
    env = make_env(make_config(seed=1))
    env.reset()
    again = [env.reset(seed=9)[0].tobytes(), env.reset()[0].tobytes()]
    assert again == _first_observations(make_config(seed=9), 0, 2)


def test_reseeding_a_vector_begins_the_run_of_that_seed(make_config: MakeConfig) -> None:
    def adapter(seed: int) -> VectorAdapter:
        return VectorAdapter(make_vector_env(make_config(seed=seed)), seed)

    env, other = adapter(1), adapter(2)
    env.reset()
    for _ in range(30):
        env.step(np.zeros(2, np.int64))
    assert_same(env.reseed(2), other.reset())
    for _ in range(30):
        assert_same(env.step(np.zeros(2, np.int64)), other.step(np.zeros(2, np.int64)))


# -- the fast vector is Gymnasium's ----------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "conform/Dataless-v0"])
def test_the_fast_sync_vector_equals_gymnasiums_step_for_step(env_id: str) -> None:
    kwargs: dict[str, Any] = {"max_episode_steps": 50} if env_id == "Pendulum-v1" else {}

    def make(index: int) -> gym.Env[Any, Any]:
        return SeededEpisodes(gym.make(env_id, **kwargs), seed=5, index=index)

    makers = [functools.partial(make, i) for i in range(3)]
    ours = FastSyncVectorEnv(makers)
    theirs: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    assert_same(ours.reset()[0], theirs.reset()[0])
    actions = random_actions(VectorAdapter(ours, 0).action_spec, (400, 3))
    ends = 0
    for action in actions:
        *mine, my_info = ours.step(action)
        *wanted, info = theirs.step(action)
        for value, expected in zip(mine, wanted, strict=True):
            assert_same(value, expected)
        done = wanted[2] | wanted[3]
        assert ("final_obs" in my_info) == done.any()
        for i in np.flatnonzero(done):
            assert_same(my_info["final_obs"][i], info["final_obs"][i])
            episode, same = my_info["final_info"]["episode"], info["final_info"]["episode"]
            assert (episode["r"][i], episode["l"][i]) == (same["r"][i], same["l"][i])
            ends += 1
    assert ends > 10


# -- real families ---------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", FAMILIES)
def test_real_environments_step_through_the_adapter(env_id: str, make_config: MakeConfig) -> None:
    _needs(env_id)
    env = VectorAdapter(make_vector_env(make_config(env_id=env_id)), seed=7)
    assert env.exactly_resumable
    (leaf,) = env.obs_spec.leaves.values()
    obs = env.reset()
    rewards = []
    for action in random_actions(env.action_spec, (60, 2)):
        assert not isinstance(obs, dict)
        assert obs.shape == (2, *leaf.shape)
        assert obs.dtype == np.float32
        assert np.isfinite(obs).all()
        step = env.step(action)
        assert step.valid.all()
        rewards.append(step.reward)
        obs = step.obs
    assert np.isfinite(rewards).all()
    assert np.any(rewards)
    env.close()


def test_atari_registers_itself_and_keeps_its_pixels_as_bytes(make_config: MakeConfig) -> None:
    pytest.importorskip("ale_py")
    env = VectorAdapter(make_vector_env(make_config(env_id="ALE/Pong-v5"), 1), seed=7)
    first = env.reset()
    assert not isinstance(first, dict)
    assert first.dtype == np.uint8
    assert first.shape == (1, 3, 210, 160)
    env.step(np.zeros(1, np.int64))
    env.close()


# -- bringing environments back --------------------------------------------------------------------


class Run:
    """Environments, driven by a source with actions fixed beforehand."""

    def __init__(self, config: TrainConfig[Any]) -> None:
        self.env = VectorAdapter(make_vector_env(config), config.seed)
        actions = random_actions(self.env.action_spec, (1000, config.num_envs))
        actor = ScriptedActor(lambda obs, call: actions[call])
        self.recorder = Recorder()
        self.source = LocalSource(self.env, actor)

    def play(self, steps: int) -> list[tuple[Obs, Array, VectorStep]]:
        self.recorder.rows = []
        self.source.collect(self.recorder, steps, START)
        return self.recorder.rows

    def save(self, path: Path) -> None:
        save_checkpoint(path, self.source.state_dict())

    def load(self, path: Path) -> bool:
        return self.source.load_state_dict(load_checkpoint(path))


CASES: dict[str, dict[str, Any]] = {
    "cartpole": {"env_id": "CartPole-v1"},
    "cartpole-async": {"env_id": "CartPole-v1", "vectorization": "async"},
    "cartpole-native": {"env_id": "CartPole-v1", "vectorization": "native"},
    "cartpole-native-short": {
        "env_id": "CartPole-v1",
        "vectorization": "native",
        "env_kwargs": {"max_episode_steps": 11},
    },
    "pendulum": {"env_id": "Pendulum-v1"},
    "lunar-lander": {"env_id": "LunarLander-v3"},
    "half-cheetah": {"env_id": "HalfCheetah-v5", "env_kwargs": {"max_episode_steps": 150}},
    "wrapped": {
        "env_id": "CartPole-v1",
        "wrappers": [
            {"path": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 3}}
        ],
    },
    "dict": {"env_id": "conform/Dataless-v0"},
    "offered-state": {"env_id": "conform/OwnState-v0"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [0, 1, 77])
def test_environments_come_back_bit_for_bit_in_the_middle_of_episodes(
    case: str, before: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    _needs(CASES[case]["env_id"])
    config = make_config(**CASES[case])
    first = Run(config)
    if before:
        first.play(before)
    first.save(tmp_path / "state.pt")
    again = Run(config)
    assert again.load(tmp_path / "state.pt")
    expected, found = first.play(320), again.play(320)
    first.env.close()
    again.env.close()
    ends = 0
    for (obs, action, step), (same_obs, same_action, same_step) in zip(
        expected, found, strict=True
    ):
        assert_same(obs, same_obs)
        assert_same(action, same_action)
        assert_same(step, same_step)
        ends += len(step.episodes)
    assert ends >= 2
    assert list(first.source.recent) == list(again.source.recent)


def test_a_native_vector_comes_back_right_after_an_episode_ended(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    # The next row is then a reset row, which the restored adapter must know.
    config = make_config(env_id="CartPole-v1", vectorization="native")
    first = Run(config)
    while not first.play(1)[-1][2].episodes:
        pass
    first.save(tmp_path / "state.pt")
    again = Run(config)
    assert again.load(tmp_path / "state.pt")
    ((_, _, expected),), ((_, _, found),) = first.play(1), again.play(1)
    assert not expected.valid.all()
    assert_same(expected, found)


def test_offered_state_takes_the_place_of_the_replay_and_keeps_the_time_limit(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(env_id="conform/OwnState-v0")
    first = Run(config)
    first.play(13)
    first.save(tmp_path / "state.pt")
    again = Run(config)
    assert again.load(tmp_path / "state.pt")
    inner: Any = again.env.env
    walk = inner.envs[0].unwrapped
    assert isinstance(walk, OwnState)
    assert walk.slow_steps == 0
    rows = again.play(7)
    assert [bool(step.truncated[0]) for _, _, step in rows] == [False] * 6 + [True]
    assert rows[-1][2].episodes[0].length == 20


def test_replayed_state_costs_the_steps_of_the_current_episode_only(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    first = Run(make_config(env_id="conform/FixedLength-v0", env_kwargs={"length": 10}))
    first.play(23)
    state = first.source.state_dict()["env"]["envs"]
    assert [(env["episode"], len(env["actions"])) for env in state] == [(2, 3), (2, 3)]


def test_recorded_actions_are_safe_from_a_caller_that_writes_its_array_again(
    make_config: MakeConfig,
) -> None:
    env: Any = make_env(make_config(env_id="Pendulum-v1"))
    env.reset()
    action = np.zeros(1, np.float32)
    for value in (0.5, -1.5):
        action[0] = value
        env.step(action)
    assert env.snapshot()["actions"].tolist() == [[0.5], [-1.5]]


def test_randomness_outside_the_seed_is_detected_as_inexact(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(env_id="conform/OutsideSeed-v0", env_kwargs={"length": 10})
    first = Run(config)
    first.play(15)
    first.save(tmp_path / "state.pt")
    again = Run(config)
    assert not again.load(tmp_path / "state.pt")
    # It goes on all the same, in the middle of the episode, from what the environment now shows.
    rows = again.play(5)
    assert [bool(step.terminated[0]) for _, _, step in rows] == [False] * 4 + [True]
    assert rows[-1][2].episodes[0] == (0, 10.0, 10)


@pytest.mark.parametrize("wrapper", ["NormalizeObservation", "NormalizeReward"])
def test_state_that_outlives_its_episode_is_detected_as_inexact(
    wrapper: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    # These measure all episodes; a replay of the last one cannot bring them back.
    config = make_config(env_id="Pendulum-v1", wrappers=[f"gymnasium.wrappers:{wrapper}"])
    first = Run(config)
    first.play(230)
    first.save(tmp_path / "state.pt")
    again = Run(config)
    assert not again.load(tmp_path / "state.pt")


def test_a_replay_that_ends_early_is_inexact_and_not_an_error(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(env_id="conform/OutsideSeed-v0", env_kwargs={"length": 10})
    first = Run(config)
    first.play(7)
    first.save(tmp_path / "state.pt")
    monkeypatch.setattr(OutsideSeed, "shorter", 6)
    again = Run(config)
    assert not again.load(tmp_path / "state.pt")
    ends = sum(len(step.episodes) for _, _, step in again.play(40))
    assert ends >= 2 * 9


def test_a_vector_whose_state_cannot_be_had_says_so_and_begins_anew(tmp_path: Path) -> None:
    def adapter() -> VectorAdapter:
        makers = [functools.partial(gym.make, "CartPole-v1") for _ in range(2)]
        return VectorAdapter(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), seed=4)

    env, again = adapter(), adapter()
    first = env.reset()
    assert not env.exactly_resumable
    obs = env.step(np.zeros(2, np.int64)).obs
    state = env.state_dict()
    assert state["envs"] is None
    restored, exact = again.load_state_dict(state, obs)
    assert not exact
    assert isinstance(first, np.ndarray)
    assert isinstance(restored, np.ndarray)
    assert not np.array_equal(restored, first), "the run's first episodes are not played again"
