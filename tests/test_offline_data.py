"""Recorded episodes in a replay: against single steps, and against what Minari returns."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")

from minari.data_collector import EpisodeBuffer  # noqa: E402

from rl_training import BC, TD3BC  # noqa: E402
from rl_training._internal.tree import tree_leaves, tree_map  # noqa: E402
from rl_training.config import TrainConfig  # noqa: E402
from rl_training.data.mixed_replay import MixedReplay  # noqa: E402
from rl_training.data.replay_buffer import Prioritization, ReplayBuffer  # noqa: E402
from rl_training.datasets.reading import Dataset, open_dataset  # noqa: E402
from rl_training.envs.spaces import action_spec, obs_spec  # noqa: E402
from rl_training.errors import CheckpointError, ConfigError  # noqa: E402
from rl_training.experiment import ExperimentManager  # noqa: E402
from rl_training.models.normalizer import RunningNorm  # noqa: E402
from rl_training.runtime import memory  # noqa: E402
from rl_training.runtime.dataset_source import (  # noqa: E402
    DatasetSource,
    check_spaces_of,
    selected_episodes,
    specs_of,
)
from rl_training.types import (  # noqa: E402
    ActionSpec,
    Array,
    ArraySpec,
    EnvInfo,
    ObsSpec,
    Progress,
    VectorStep,
)

# Minari warns of every field of its metadata that is not given.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari.utils")

CPU = torch.device("cpu")
GAMMA = 0.5
VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float64)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
FOUR = spaces.Discrete(4, start=2)
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
STACK = spaces.Box(0, 255, (4, 8, 8), np.uint8)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "discrete": spaces.Discrete(5, start=-1),
    "dict": spaces.Dict(
        {"vector": VECTOR, "place": spaces.Discrete(3), "flags": spaces.MultiBinary(4)}
    ),
    "tuple": spaces.Tuple((VECTOR, spaces.Dict({"image": IMAGE}))),
    "image": IMAGE,
}
ACTIONS: dict[str, spaces.Space[Any]] = {"discrete": FOUR, "box": BOX}
TERMINATED, TRUNCATED, NEITHER = "terminated", "truncated", "neither"


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@dataclasses.dataclass
class Recording:
    """An episode, as an environment returned it."""

    observations: list[Any]
    """One more than there are actions."""
    actions: list[Any]
    rewards: list[float]
    end: str = TRUNCATED

    def __len__(self) -> int:
        return len(self.rewards)

    def buffer(self, space: spaces.Space[Any]) -> Any:
        last = np.arange(len(self)) == len(self) - 1
        return EpisodeBuffer(
            observations=by_leaf(space, self.observations),
            actions=np.array(self.actions),
            rewards=self.rewards,
            terminations=list(last & (self.end == TERMINATED)),
            truncations=list(last & (self.end == TRUNCATED)),
        )


def by_leaf(space: spaces.Space[Any], samples: list[Any]) -> Any:
    """Observations one after the other as one array for every leaf of their space."""
    if isinstance(space, spaces.Dict):
        return {k: by_leaf(part, [one[k] for one in samples]) for k, part in space.items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(by_leaf(part, [one[i] for one in samples]) for i, part in parts)
    return np.array(samples)


def recordings(
    space: spaces.Space[Any],
    actions: spaces.Space[Any],
    lengths: tuple[int, ...] = (4, 1, 6, 3),
    ends: tuple[str, ...] = (TERMINATED, TRUNCATED, TRUNCATED, NEITHER),
) -> list[Recording]:
    space.seed(3)
    actions.seed(4)
    random = np.random.default_rng(5)
    return [
        Recording(
            [space.sample() for _ in range(length + 1)],
            [actions.sample() for _ in range(length)],
            random.normal(size=length).tolist(),
            end,
        )
        for length, end in zip(lengths, ends, strict=True)
    ]


def counted(
    lengths: tuple[int, ...], rewards: float = 1.0, end: str = TRUNCATED
) -> list[Recording]:
    """Episodes whose observations are [episode, step]."""
    return [
        Recording(
            [np.array([i, t], np.float64) for t in range(length + 1)],
            [2 + (i + t) % 4 for t in range(length)],
            [rewards] * length,
            end,
        )
        for i, length in enumerate(lengths)
    ]


def record(
    found: list[Recording],
    space: spaces.Space[Any] = VECTOR,
    actions: spaces.Space[Any] = FOUR,
    name: str = "test/data-v0",
    **options: Any,
) -> Dataset:
    """Write episodes with Minari's own API; return them as this package opens them."""
    minari.create_dataset_from_buffers(
        name,
        [one.buffer(space) for one in found],
        observation_space=space,
        action_space=actions,
        **{"jpeg_encoding": False, **options},
    )
    return open_dataset(name)


def config_of(algo: str = "bc", **overrides: Any) -> TrainConfig[Any]:
    base: TrainConfig[Any] = TrainConfig(algo=algo, dataset="test/data-v0", progress=False)
    return base.with_overrides(**overrides)


def source_of(dataset: Dataset, *, frame_stack: int = 1, **overrides: Any) -> DatasetSource:
    algo = overrides.pop("algo", "iql")
    info = EnvInfo(*specs_of(dataset), num_envs=1, frame_stack=frame_stack)
    return DatasetSource(dataset, info, config_of(algo, **overrides))


def stepped(
    found: list[Recording], space: spaces.Space[Any], actions: spaces.Space[Any], **options: Any
) -> ReplayBuffer:
    """A replay that was filled by `ReplayBuffer.add`, one step after the other."""
    to_action = action_spec(actions)
    spec = obs_spec(space, to_action)
    replay = ReplayBuffer(sum(map(len, found)), 1, spec, to_action, gamma=GAMMA, **options)

    def row(sample: Any) -> Any:
        return tree_map(lambda leaf: leaf[None], spec.cast(sample))

    for i, one in enumerate(found):
        following = found[(i + 1) % len(found)].observations[0]
        for t in range(len(one)):
            ends = t == len(one) - 1
            final = row(one.observations[t + 1])
            step = VectorStep(
                row(following) if ends else final,
                final,
                np.array([one.rewards[t]]),
                np.array([ends and one.end == TERMINATED]),
                np.array([ends and one.end != TERMINATED]),
                np.ones(1, bool),
                (),
            )
            action = to_action.from_env(np.array([one.actions[t]]))
            replay.add(row(one.observations[t]), action, {}, step)
    return replay


def whole(
    found: list[Recording], space: spaces.Space[Any], actions: spaces.Space[Any], **options: Any
) -> ReplayBuffer:
    """A replay that was filled by `ReplayBuffer.add_episode`."""
    to_action = action_spec(actions)
    spec = obs_spec(space, to_action)
    replay = ReplayBuffer(sum(map(len, found)), 1, spec, to_action, gamma=GAMMA, **options)
    for one in found:
        replay.add_episode(
            spec.cast(by_leaf(space, one.observations)),
            to_action.from_env(np.array(one.actions)),
            np.array(one.rewards),
            terminated=one.end == TERMINATED,
        )
    return replay


def sample(replay: Any, count: int = 64, seed: int = 0, **options: Any) -> dict[str, Any]:
    batch: dict[str, Any] = replay.sample(count, torch.Generator().manual_seed(seed), **options)
    return batch


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        pairs = zip(tree_leaves(found[name]), tree_leaves(value), strict=True)
        for one, other in pairs:
            assert one.dtype == other.dtype, name
            assert np.array_equal(np.asarray(one), np.asarray(other)), name


# -- whole episodes and single steps ---------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_an_episode_is_its_steps(observations: str, actions: str, n_step: int) -> None:
    space, action_space = OBSERVATIONS[observations], ACTIONS[actions]
    found = recordings(space, action_space)
    options = {"n_step": n_step, "next_actions": True}
    episodes = whole(found, space, action_space, **options)
    steps = stepped(found, space, action_space, **options)
    assert len(episodes) == len(steps) == 14
    for seed in range(3):
        batch = sample(episodes, seed=seed)
        assert set(batch["cells"]) == set(range(14))
        assert_same(batch, sample(steps, seed=seed))


def stacks(start: str, length: int, seed: int) -> list[Any]:
    """Observations of four images; ``start`` is what the older ones are at first."""
    images = np.random.default_rng(seed).integers(1, 255, (length + 4, 8, 8), np.uint8)
    if start == "repeated":
        images[:3] = images[3]
    elif start == "black":
        images[:3] = 0
    return [images[t : t + 4] for t in range(length + 1)]


@pytest.mark.parametrize("frame_stack", [1, 4])
@pytest.mark.parametrize("start", ["repeated", "black", "any"])
def test_an_episode_of_stacked_images_is_its_steps(start: str, frame_stack: int) -> None:
    found = recordings(STACK, FOUR)
    for i, one in enumerate(found):
        one.observations = stacks(start, len(one), i)
    options = {"frame_stack": frame_stack, "n_step": 2}
    batch = sample(whole(found, STACK, FOUR, **options))
    assert_same(batch, sample(stepped(found, STACK, FOUR, **options)))
    # The same again, without any stacking, from the episodes themselves.
    rows = [obs for one in found for obs in one.observations[:-1]]
    assert np.array_equal(batch["obs"].numpy(), np.array(rows)[batch["cells"]])


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_stacked_images_of_a_dataset(frame_stack: int) -> None:
    found = recordings(STACK, FOUR)
    for i, one in enumerate(found):
        one.observations = stacks("repeated", len(one), i)
    source = source_of(record(found, STACK), frame_stack=frame_stack, gamma=GAMMA)
    replay = source.load(CPU)
    assert_same(sample(replay), sample(stepped(found, STACK, FOUR)))
    # Each image of a stack is stored once.
    cells = replay._obs.rows
    assert cells.shape[2:] == ((4, 8, 8) if frame_stack == 1 else (1, 8, 8))


def test_priorities_of_episodes_are_those_of_steps() -> None:
    found = recordings(VECTOR, FOUR)
    options = {"prioritization": Prioritization(alpha=1.0, epsilon=0.0), "n_step": 2}
    episodes, steps = (make(found, VECTOR, FOUR, **options) for make in (whole, stepped))
    assert_same(sample(episodes), sample(steps))
    for replay in (episodes, steps):
        replay.update_priorities(np.arange(14), torch.arange(14.0))
    batch = sample(episodes, 2000)
    assert_same(batch, sample(steps, 2000))
    counts = np.bincount(batch["cells"], minlength=14)
    # In proportion to the errors 0 to 13, whose sum is 91.
    np.testing.assert_allclose(counts / 2000, np.arange(14) / 91, atol=0.03)
    assert counts[0] == 0
    # The smallest probability over that of the row.
    weights = batch["cells"].min() / batch["cells"]
    np.testing.assert_allclose(batch["weights"].numpy(), weights, rtol=1e-5)


def test_a_later_episode_has_the_largest_priority() -> None:
    rule = Prioritization(alpha=1.0, epsilon=0.0)
    replay = ReplayBuffer(5, 1, OBS, ACTION, prioritization=rule)
    first, second = counted((2, 3))
    for one in (first, second):
        replay.add_episode(
            np.array(one.observations, np.float32),
            np.array(one.actions) - 2,
            np.array(one.rewards),
            terminated=False,
        )
        if one is first:
            replay.update_priorities(np.arange(2), torch.tensor([1.0, 8.0]))
    counts = np.bincount(sample(replay, 3300)["cells"], minlength=5)
    np.testing.assert_allclose(counts / 100, [1, 8, 8, 8, 8], atol=1.3)


OBS = ObsSpec({"": ArraySpec((2,), "float32")})
ACTION = ActionSpec("discrete", (), "int64", nvec=(4,), start=(2,))


def test_episodes_do_not_wrap_round() -> None:
    replay = ReplayBuffer(5, 1, OBS, ACTION)
    obs = np.zeros((4, 2), np.float32)
    replay.add_episode(obs, np.zeros(3, np.int64), np.zeros(3), terminated=True)
    with pytest.raises(ValueError, match="an episode of 3 steps does not fit into rows 3 to 5"):
        replay.add_episode(obs, np.zeros(3, np.int64), np.zeros(3), terminated=True)
    with pytest.raises(ValueError, match="replay of 2 environments"):
        ReplayBuffer(8, 2, OBS, ACTION).add_episode(
            obs, np.zeros(3, np.int64), np.zeros(3), terminated=True
        )


def test_many_episodes_have_final_observations_of_their_own() -> None:
    # More than the pool holds at first: it grows.
    lengths = tuple(1 + i % 3 for i in range(150))
    batch = sample(whole(counted(lengths), VECTOR, FOUR), 2000)
    following = batch["obs"] + torch.tensor([0.0, 1.0])
    assert torch.equal(batch["next_obs"], following)


# -- returns by hand -------------------------------------------------------------------------------


def by_hand(**options: Any) -> dict[str, Any]:
    """Three episodes of rewards 1 2 4, 8 and 16 32: terminated, truncated, neither."""
    found = counted((3, 1, 2))
    for one, rewards in zip(found, ([1.0, 2.0, 4.0], [8.0], [16.0, 32.0]), strict=True):
        one.rewards = rewards
    for one, end in zip(found, (TERMINATED, TRUNCATED, NEITHER), strict=True):
        one.end = end
    replay = source_of(record(found), gamma=GAMMA, **options).load(CPU, next_actions=True)
    batch = sample(replay, 200)
    first = [int(np.flatnonzero(batch["cells"] == cell)[0]) for cell in range(6)]
    return {name: np.asarray(value)[first].tolist() for name, value in batch.items()}


def test_one_step_by_hand() -> None:
    batch = by_hand()
    assert batch["obs"] == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1]]
    # Truncated and unfinished episodes keep their true successor.
    assert batch["next_obs"] == [[0, 1], [0, 2], [0, 3], [1, 1], [2, 1], [2, 2]]
    assert batch["rewards"] == [1, 2, 4, 8, 16, 32]
    assert batch["discounts"] == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5]
    assert batch["actions"] == [0, 1, 2, 1, 2, 3]


def test_the_following_actions_by_hand() -> None:
    batch = by_hand()
    assert batch["next_actions"] == [1, 2, 0, 0, 3, 0]
    assert batch["next_recorded"] == [1, 1, 0, 0, 1, 0]


def test_three_steps_by_hand() -> None:
    batch = by_hand(n_step=3)
    # No return contains a reward of another episode.
    assert batch["rewards"] == [1 + 1 + 1, 2 + 2, 4, 8, 16 + 16, 32]
    assert batch["discounts"] == [0.0, 0.0, 0.0, 0.5, 0.25, 0.5]
    assert batch["next_obs"] == [[0, 3], [0, 3], [0, 3], [1, 1], [2, 2], [2, 2]]
    # After three steps: the action in the observation that the return bootstraps from.
    assert batch["next_recorded"] == [0, 0, 0, 0, 0, 0]


def test_two_steps_by_hand() -> None:
    batch = by_hand(n_step=2)
    assert batch["rewards"] == [1 + 1, 2 + 2, 4, 8, 16 + 16, 32]
    assert batch["discounts"] == [0.25, 0.0, 0.0, 0.5, 0.25, 0.5]
    assert batch["next_obs"] == [[0, 2], [0, 3], [0, 3], [1, 1], [2, 2], [2, 2]]
    assert batch["next_actions"] == [2, 0, 0, 0, 0, 0]
    assert batch["next_recorded"] == [1, 0, 0, 0, 0, 0]


# -- what Minari returns ---------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_dataset_is_what_minari_returns(observations: str, actions: str) -> None:
    space, action_space = OBSERVATIONS[observations], ACTIONS[actions]
    found = recordings(space, action_space)
    dataset = record(found, space, action_space)
    replay = source_of(dataset, gamma=GAMMA).load(CPU)
    assert len(replay) == 14
    assert_same(sample(replay), sample(stepped(found, space, action_space)))

    spec, to_action = specs_of(dataset)
    batch = sample(replay)
    offset = 0
    for episode in minari.load_dataset("test/data-v0").iterate_episodes():
        obs = spec.cast(episode.observations)
        count = len(episode.rewards)
        rows = np.flatnonzero((batch["cells"] >= offset) & (batch["cells"] < offset + count))
        t = batch["cells"][rows] - offset
        for name, shift in (("obs", 0), ("next_obs", 1)):
            pairs = zip(tree_leaves(batch[name]), tree_leaves(obs), strict=True)
            for stored, wanted in pairs:
                assert np.array_equal(stored.numpy()[rows], wanted[t + shift])
        assert np.array_equal(batch["rewards"].numpy()[rows], episode.rewards[t].astype("float32"))
        factor = np.where(episode.terminations[t], 0.0, GAMMA)
        assert np.array_equal(batch["discounts"].numpy()[rows], factor.astype("float32"))
        executed = to_action.to_env(batch["actions"].numpy()[rows])
        np.testing.assert_allclose(executed, episode.actions[t], rtol=1e-5, atol=1e-5)
        offset += count


def test_actions_are_mapped_to_the_policys_range() -> None:
    found = recordings(VECTOR, BOX, (3,), (TRUNCATED,))
    found[0].actions = [np.array(one, np.float32) for one in ([-2, 0], [0, 5], [1, 10])]
    batch = sample(source_of(record(found, VECTOR, BOX)).load(CPU))
    wanted = np.array([[-1, -1], [0, 0], [0.5, 1]], np.float32)[batch["cells"]]
    assert np.array_equal(batch["actions"].numpy(), wanted)


def test_discrete_observations_are_one_hot() -> None:
    space = spaces.Discrete(3, start=5)
    found = recordings(space, FOUR, (3,), (TRUNCATED,))
    found[0].observations = [np.int64(value) for value in (5, 7, 6, 5)]
    batch = sample(source_of(record(found, space)).load(CPU))
    hot = np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]], np.float32)
    assert np.array_equal(batch["obs"].numpy(), hot[batch["cells"]])
    assert np.array_equal(batch["next_obs"].numpy(), hot[batch["cells"] + 1])


# -- a dataset beside a replay ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "batch_size", "recorded"),
    [(0.5, 8, 4), (0.25, 8, 2), (0.5, 7, 4), (0.01, 8, 1), (0.99, 8, 7), (0.3, 10, 3)],
)
def test_batches_are_mixed_in_a_fixed_ratio(
    fraction: float, batch_size: int, recorded: int
) -> None:
    data = whole(counted((5, 5)), VECTOR, FOUR, next_actions=True)
    # Another world, whose observations are below zero.
    own = counted((4, 4, 4), rewards=7.0, end=TERMINATED)
    for one in own:
        one.observations = [-1 - obs for obs in one.observations]
    replay = stepped(own, VECTOR, FOUR, next_actions=True)
    mixed = MixedReplay(replay, data, fraction)
    batch = sample(mixed, batch_size)
    is_data = np.arange(batch_size) < recorded  # those of the dataset come first
    assert np.array_equal(batch["obs"][:, 0].numpy() >= 0, is_data)
    assert np.array_equal(batch["next_obs"][:, 1].numpy() > 0, is_data)
    assert np.array_equal(batch["rewards"].numpy(), np.where(is_data, 1, 7))
    lengths = {name: len(value) for name, value in batch.items()}
    assert lengths == dict.fromkeys((*sample(data), "cells"), batch_size)
    # Every row is a whole transition of one of the two.
    assert torch.equal(
        batch["next_obs"][:, 1] - batch["obs"][:, 1],
        torch.from_numpy(np.where(is_data, 1.0, -1.0)).float(),
    )
    # One generator draws for both, the dataset first: the same batch again.
    generator = torch.Generator().manual_seed(0)
    first = data.sample(recorded, generator)
    second = replay.sample(batch_size - recorded, generator)
    assert torch.equal(batch["obs"], torch.cat((first["obs"], second["obs"])))
    assert np.array_equal(batch["cells"], np.concatenate((first["cells"], second["cells"])))
    assert_same(sample(mixed, batch_size), batch)


def test_mixed_batches_of_nested_observations() -> None:
    space = OBSERVATIONS["dict"]
    found = recordings(space, BOX)
    data, replay = whole(found, space, BOX), stepped(found, space, BOX)
    batch = sample(MixedReplay(replay, data, 0.5), 10)
    generator = torch.Generator().manual_seed(0)
    first, second = data.sample(5, generator), replay.sample(5, generator)
    assert set(batch["obs"]) == {"vector", "place", "flags"}
    for name in ("obs", "next_obs"):
        for key, leaf in batch[name].items():
            assert torch.equal(leaf, torch.cat((first[name][key], second[name][key])))


# -- spaces ----------------------------------------------------------------------------------------


def info_of(space: spaces.Space[Any], actions: spaces.Space[Any]) -> EnvInfo:
    to_action = action_spec(actions)
    return EnvInfo(obs_spec(space, to_action), to_action, num_envs=4)


def test_equal_spaces_are_accepted() -> None:
    dataset = record(recordings(VECTOR, BOX), VECTOR, BOX)
    other = spaces.Box(BOX.low.astype(np.float64), BOX.high.astype(np.float64), dtype=np.float64)
    check_spaces_of(dataset, info_of(VECTOR, BOX), "Env-v0")
    check_spaces_of(dataset, info_of(VECTOR, other), "Env-v0")


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [
        (
            spaces.Box(-1, 1, (3,)),
            BOX,
            r"its observations are float32 of shape \(2,\), those .* float32 of shape \(3,\)",
        ),
        (
            spaces.Dict({"a": spaces.Box(-1, 1, (2,))}),
            BOX,
            r"those of the environment 'a': float32 of shape \(2,\)",
        ),
        (
            VECTOR,
            spaces.Box(-2, 2, (2,)),
            r"its actions are .*, low \[-2.0, 0.0\], high .* those .*, low \[-2.0, -2.0\], high",
        ),
        (VECTOR, FOUR, r"those of the environment Discrete\(4, start 2\)"),
    ],
)
def test_other_spaces_are_refused(space: Any, actions: Any, message: str) -> None:
    dataset = record(recordings(VECTOR, BOX), VECTOR, BOX)
    with pytest.raises(ConfigError, match=f"test/data-v0 does not fit Env-v0: .*{message}"):
        check_spaces_of(dataset, info_of(space, actions), "Env-v0")


def test_a_run_compares_the_spaces_with_those_of_its_environment() -> None:
    record(recordings(VECTOR, FOUR))
    with pytest.raises(ConfigError, match="does not fit CartPole-v1: its observations"):
        BC("CartPole-v1", dataset="test/data-v0", progress=False).learn(1, run_dir=None)


# -- which episodes --------------------------------------------------------------------------------


def with_returns(*returns: float) -> list[Recording]:
    found = counted((2,) * len(returns))
    for one, ret in zip(found, returns, strict=True):
        one.rewards = [ret + 1.0, -1.0]
    return found


@pytest.mark.parametrize(
    ("returns", "fraction", "chosen"),
    [
        ((1, 5, 5, 0), 1.0, [0, 1, 2, 3]),
        ((1, 5, 5, 0), 0.25, [1]),  # of equal ones the first
        ((1, 5, 5, 0), 0.5, [1, 2]),
        ((1, 5, 5, 0), 0.3, [1, 2]),  # rounded up
        ((1, 5, 5, 0), 0.75, [0, 1, 2]),  # in the order of the dataset
        ((3, 3, 3, 3), 0.5, [0, 1]),
        ((-4,), 0.1, [0]),
        ((-4, -9, -1), 0.01, [2]),
        (tuple(range(100)), 0.07, list(range(93, 100))),  # 0.07 x 100 is above 7 in floats
    ],
)
def test_the_best_episodes(returns: Any, fraction: float, chosen: list[int]) -> None:
    source = source_of(record(with_returns(*returns)), algo="bc", top_fraction=fraction)
    assert source.indices.tolist() == chosen
    assert source.transitions == 2 * len(chosen)
    replay = source.load(CPU)
    assert sorted(set(sample(replay, 3000)["obs"][:, 0].int().tolist())) == chosen


def test_parts_of_episodes_are_not_the_best() -> None:
    """Of negative rewards a part has the highest return."""
    dataset = record(with_returns(-4, -1, -9))
    about = {"rl_training": {"cut_episodes": [1]}}
    dataset = dataclasses.replace(dataset, metadata={**dataset.metadata, **about})
    assert source_of(dataset, algo="bc", top_fraction=0.3).indices.tolist() == [0]
    assert source_of(dataset, algo="bc", top_fraction=1.0).indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("space", "scale", "fits"),
    [(IMAGE, 1 / 255, False), (IMAGE, 2.0, False), (IMAGE, 1.0, True), (VECTOR, 1 / 255, True)],
)
def test_observations_that_their_space_cannot_hold_are_refused(
    space: spaces.Space[Any], scale: float, fits: bool
) -> None:
    """Images in [0, 1] would become zeros."""
    found = recordings(space, FOUR, (3,), (TRUNCATED,))
    found[0].observations = [np.asarray(one * scale, np.float64) for one in found[0].observations]
    source = source_of(record(found, space))
    if fits:
        assert len(source.load(CPU)) == 3
        return
    with pytest.raises(ConfigError, match="episode 0: observations are stored as float64, from"):
        source.load(CPU)


def test_fractions_of_discrete_actions_are_refused() -> None:
    dataset = record(counted((2, 3)))
    change(dataset, "actions", lambda actions: actions + 0.5)
    with pytest.raises(ConfigError, match="actions are stored as float64, from 3"):
        source_of(dataset).load(CPU)


@pytest.mark.parametrize(("factor", "warned"), [(1.0, 0), (5.0, 3)])
def test_actions_outside_their_bounds_are_clipped_with_a_warning(
    factor: float, warned: int
) -> None:
    found = recordings(VECTOR, BOX, (3,), (TRUNCATED,))
    found[0].actions = [np.asarray(factor * BOX.high) for _ in range(3)]
    source = source_of(record(found, VECTOR, BOX), algo="td3_bc")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source.load(CPU)
    told = [str(one.message) for one in caught if "outside the bounds" in str(one.message)]
    assert len(told) == (warned > 0)
    assert not told or told[0].startswith("3 of 3 actions of dataset test/data-v0")


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, ""),
        ({"max_episode_steps": 20}, 'env_kwargs {"max_episode_steps": 20}'),
        ({"g": 5.0}, 'env_kwargs {"g": 5.0}'),
    ],
)
def test_what_differs_from_the_registered_environment(
    options: dict[str, Any], changes: str
) -> None:
    env = gym.make("Pendulum-v1", **options)
    found = recordings(env.observation_space, env.action_space, (3,), (TRUNCATED,))
    minari.create_dataset_from_buffers(
        "test/env-v0", [one.buffer(env.observation_space) for one in found], env=env
    )
    assert open_dataset("test/env-v0").env_changes == changes


def test_a_part_of_the_dataset_is_whole_episodes() -> None:
    lengths = (5, 3, 7, 2, 4, 6)
    dataset = record(counted(lengths))
    found = {}
    for seed in range(8):
        source = source_of(dataset, dataset_transitions=12, seed=seed)
        again = source_of(dataset, dataset_transitions=12, seed=seed)
        assert source.indices.tolist() == again.indices.tolist() == sorted(source.indices.tolist())
        assert 5 < source.transitions == sum(lengths[i] for i in source.indices) <= 12
        replay = source.load(CPU)
        assert len(replay) == source.transitions
        stored = {tuple(row) for row in sample(replay, 500)["obs"].int().tolist()}
        assert stored == {(i, t) for i in source.indices for t in range(lengths[i])}
        found[tuple(source.indices.tolist())] = seed
    assert len(found) > 3  # they depend on the seed


def test_a_part_that_holds_everything() -> None:
    source = source_of(record(counted((5, 3))), dataset_transitions=8)
    assert source.indices.tolist() == [0, 1]


def test_the_best_episodes_are_selected_before_a_part_of_them() -> None:
    dataset = record(with_returns(*range(10)))
    source = source_of(dataset, algo="bc", top_fraction=0.5, dataset_transitions=4)
    assert len(source.indices) == 2
    assert source.indices.min() >= 5


def test_a_part_smaller_than_any_episode_is_refused() -> None:
    dataset = record(counted((5, 3)))
    message = (
        "'dataset_transitions' is 2, less than one whole episode of dataset test/data-v0: they"
    )
    with pytest.raises(ConfigError, match=f"{message} have 3 to 5"):
        source_of(dataset, dataset_transitions=2)


def test_a_part_that_only_some_episodes_fit_into() -> None:
    dataset = record(counted((50, 3, 60)))
    for seed in range(6):
        config = config_of("iql", dataset_transitions=10, seed=seed)
        assert selected_episodes(dataset, dataset.lengths(), config).tolist() == [1]


# -- memory ----------------------------------------------------------------------------------------


def test_a_dataset_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(record(counted((500, 300, 200))))
    # Observation 2 x 4, action 8, and nine bytes; two more rows for every episode.
    needed = (1000 + 2 * 3) * 25
    monkeypatch.setattr(memory, "available_memory", lambda: memory.Limit(needed, "test"))
    source.check_memory(CPU)
    monkeypatch.setattr(memory, "available_memory", lambda: memory.Limit(needed - 1, "test"))
    with pytest.raises(ConfigError) as caught:
        source.load(CPU)
    text = str(caught.value)
    assert "dataset test/data-v0: 1,006 transitions x 25 bytes = 0.0 MiB" in text
    assert (
        "only 0.0 MiB are available to this process (limit: test): set dataset_transitions" in text
    )
    # What is asked for fits.
    source_of(open_dataset("test/data-v0"), dataset_transitions=300).load(CPU)


def test_the_memory_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(counted((5, 3)))
    monkeypatch.setattr(memory, "available_memory", lambda: memory.Limit(10, "test"))
    bc = BC(dataset="test/data-v0", eval_episodes=0, output_dir=tmp_path / "runs", progress=False)
    with pytest.raises(ConfigError, match="set dataset_transitions"):
        bc.learn(1)
    assert not list(tmp_path.glob("runs/**/*.*"))


# -- damaged data ----------------------------------------------------------------------------------


def hdf5(dataset: Dataset) -> Path:
    return dataset.path / "data" / "main_data.hdf5"


def change(dataset: Dataset, name: str, edit: Callable[[Array], Array]) -> None:
    """Replace an array of the second episode."""
    with h5py.File(hdf5(dataset), "r+") as file:
        episode = file["episode_1"]
        changed = edit(episode[name][()])
        del episode[name]
        episode[name] = changed


def set_at(index: Any, value: float) -> Callable[[Array], Array]:
    def edit(array: Array) -> Array:
        changed = array.astype(np.float64)
        changed[index] = value
        return changed

    return edit


def ends_at(step: int) -> Callable[[Array], Array]:
    return lambda array: np.arange(len(array)) == step


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "observations",
            set_at((4, 1), np.nan),
            "episode 1: observations contain a NaN or infinity",
        ),
        ("observations", lambda a: a[:-1], r"episode 1 has 4 observations, 4 actions, 4 rewards"),
        (
            "observations",
            lambda a: a[:, :1],
            r"observations has the shape \(1,\), and its space \(2,\)",
        ),
        ("actions", set_at((2, 0), np.nan), "episode 1: actions contain a NaN or infinity"),
        ("actions", set_at((0, 1), np.inf), "episode 1: actions contain a NaN or infinity"),
        ("actions", lambda a: a[:3], "episode 1 has 5 observations, 3 actions, 4 rewards"),
        ("actions", lambda a: a[:, :1], r"actions has the shape \(1,\), and its space \(2,\)"),
        ("rewards", set_at(3, np.nan), "episode 1 has a reward that is not finite"),
        ("truncations", ends_at(1), "episode 1 ends at step 1 and continues after it"),
        ("terminations", ends_at(0), "episode 1 ends at step 0 and continues after it"),
    ],
)
def test_a_damaged_episode_is_refused(name: str, edit: Any, message: str) -> None:
    found = recordings(VECTOR, BOX, (3, 4, 2), (TRUNCATED,) * 3)
    dataset = record(found, VECTOR, BOX)
    change(dataset, name, edit)
    with pytest.raises(ConfigError, match=message) as caught:
        source_of(open_dataset("test/data-v0")).load(CPU)
    assert str(dataset.path) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "message"),
    [(2, "it has 2 steps, not 3"), (4, "observations has 5 rows, and the episode 3 steps")],
)
def test_an_episode_of_another_length_than_its_metadata_is_refused(
    count: int, message: str
) -> None:
    dataset = record(counted((2, 3, 2)))
    for name in ("actions", "rewards", "terminations", "truncations", "observations"):
        rows = np.arange(4 - count - 1, 4 if name == "observations" else 3).clip(0)
        change(dataset, name, lambda array, rows=rows: array[rows])  # type: ignore[misc]
    with pytest.raises(ConfigError, match=f"episode.1.*{message}"):
        source_of(open_dataset("test/data-v0")).load(CPU)


@pytest.mark.parametrize("value", [1, 6])
def test_a_discrete_action_outside_its_space_is_refused(value: int) -> None:
    dataset = record(counted((2, 3)))
    change(dataset, "actions", lambda actions: np.full_like(actions, value))
    with pytest.raises(ConfigError, match="episode 1: actions are outside their space"):
        source_of(open_dataset("test/data-v0")).load(CPU)


def test_a_discrete_observation_outside_its_space_is_refused() -> None:
    space = spaces.Discrete(3)
    dataset = record(recordings(space, FOUR, (2, 3), (TRUNCATED,) * 2), space)
    change(dataset, "observations", lambda obs: np.full_like(obs, 3))
    with pytest.raises(ConfigError, match="episode 1: observations do not fit their space"):
        source_of(open_dataset("test/data-v0")).load(CPU)


def test_a_file_that_was_cut_is_refused() -> None:
    dataset = record(counted((50, 30)))
    whole_file = hdf5(dataset).read_bytes()
    hdf5(dataset).write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        source_of(open_dataset("test/data-v0")).load(CPU)


# -- images ----------------------------------------------------------------------------------------


def test_images_that_were_compressed_as_jpeg_warn(recwarn: pytest.WarningsRecorder) -> None:
    dataset = record(recordings(IMAGE, FOUR, (2,), (TRUNCATED,)), IMAGE, jpeg_encoding=True)
    recwarn.clear()
    replay = source_of(dataset).load(CPU)
    (warning,) = [str(one.message) for one in recwarn if "JPEG" in str(one.message)]
    assert warning.startswith("the images of dataset test/data-v0 were compressed as JPEG")
    assert sample(replay)["obs"].shape[1:] == (3, 36, 40)


def test_exact_images_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    found = recordings(IMAGE, FOUR, (2,), (TRUNCATED,))
    dataset = record(found, IMAGE)
    batch = sample(source_of(dataset).load(CPU))
    assert not [one for one in recwarn if "JPEG" in str(one.message)]
    first = np.moveaxis(np.array(found[0].observations), -1, 1)
    assert np.array_equal(batch["next_obs"].numpy(), first[batch["cells"] + 1])


# -- runs ------------------------------------------------------------------------------------------


def tiny(algo: Any, *arguments: Any, **settings: Any) -> Any:
    return algo(
        *arguments,
        dataset="test/data-v0",
        progress=False,
        tensorboard=False,
        hidden_sizes=(8, 8),
        batch_size=8,
        **settings,
    )


def test_without_an_environment_nothing_is_evaluated(tmp_path: Path) -> None:
    record(counted((20, 30)))
    bc = tiny(BC, output_dir=tmp_path / "runs")
    with pytest.warns(UserWarning, match="the policy will not be evaluated: no environment"):
        result = bc.learn(20)
    assert bc.config.eval_episodes == 0
    assert not list(result.folder.rglob("*best*"))
    rows = (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert rows
    assert not any(name.startswith("eval") for row in rows for name in json.loads(row))
    assert int(bc.predict(np.zeros(2, np.float32))[0]) in range(2, 6)


def test_no_warning_where_no_evaluation_is_wanted(recwarn: pytest.WarningsRecorder) -> None:
    record(counted((20, 30)))
    tiny(BC, eval_episodes=0).learn(20, run_dir=None)
    assert not [one for one in recwarn if "evaluated" in str(one.message)]


def test_the_environment_of_the_dataset_evaluates(recwarn: pytest.WarningsRecorder) -> None:
    env = gym.make("CartPole-v1")
    found = recordings(env.observation_space, env.action_space, (20, 30), (TRUNCATED,) * 2)
    record(found, env.observation_space, env.action_space, env=env)
    bc = tiny(BC, eval_episodes=1)
    result = bc.learn(20, run_dir=None)
    assert bc.config.env_id == "CartPole-v1"
    assert not [one for one in recwarn if "evaluated" in str(one.message)]
    assert 1 <= result.metrics["eval/return_mean"] <= 500


def pendulum_like(lengths: tuple[int, ...] = (30, 20, 25)) -> list[Recording]:
    found = recordings(VECTOR, BOX, lengths, (TRUNCATED,) * len(lengths))
    for i, one in enumerate(found):
        one.observations = [np.array([5.0, -3.0]) + (1 + i) * obs for obs in one.observations]
    return found


def test_statistics_are_those_of_the_data(tmp_path: Path) -> None:
    found = pendulum_like()
    record(found, VECTOR, BOX)
    learner = tiny(TD3BC, normalize_obs=True, eval_episodes=0, output_dir=tmp_path / "runs")
    result = learner.learn(30)
    # The observations in which actions were chosen, in the precision of storage.
    rows = np.concatenate([one.observations[:-1] for one in found]).astype(np.float32)
    mean, deviation = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
    loaded = TD3BC.load(result.folder)
    for one in (learner, loaded):
        policy: Any = one._policy
        norms = [part for part in policy.module.modules() if isinstance(part, RunningNorm)]
        assert norms
        for norm in norms:
            assert float(norm.count) == 75
            np.testing.assert_allclose(norm.mean.numpy(), mean, rtol=1e-12)
            np.testing.assert_allclose(norm.shift.numpy(), mean, rtol=1e-6)
            np.testing.assert_allclose(norm.scale.numpy(), 1 / deviation, rtol=1e-6)
    obs = rows[:5]
    assert np.array_equal(learner.predict(obs)[0], loaded.predict(obs)[0])


def test_targets_and_networks_have_the_same_statistics() -> None:
    record(pendulum_like(), VECTOR, BOX)
    config = config_of("td3_bc", normalize_obs=True, eval_episodes=0, total_updates=5, env_id="")
    trainer = ExperimentManager.setup(config, run_dir=None)
    learner: Any = trainer.learner
    modules = (
        learner.model.actor,
        learner.model.critics,
        learner.target_actor.module,
        learner.target_critics.module,
    )
    shifts = [module.norm["leaf0"].shift for module in modules]
    assert float(shifts[0].abs().min()) > 0
    assert all(torch.equal(shift, shifts[0]) for shift in shifts)


def test_statistics_of_a_part_of_the_episodes() -> None:
    found = pendulum_like((40, 10, 30))
    for one, reward in zip(found, (0.0, 5.0, 1.0), strict=True):
        one.rewards = [reward] * len(one)
    record(found, VECTOR, BOX)
    config = config_of("bc", normalize_obs=True, top_fraction=0.3, eval_episodes=0, env_id="")
    trainer = ExperimentManager.setup(config, run_dir=None)
    learner: Any = trainer.learner
    norm = learner.model.actor.norm["leaf0"]
    assert float(norm.count) == 10
    mean = np.array(found[1].observations[:-1]).mean(0)
    np.testing.assert_allclose(norm.mean.numpy(), mean, rtol=1e-6)


def test_another_dataset_is_refused_on_resume(tmp_path: Path) -> None:
    found = pendulum_like()
    dataset = record(found, VECTOR, BOX)
    learner = tiny(TD3BC, eval_episodes=0, output_dir=tmp_path / "runs")
    folder = learner.learn(10).folder
    resumed = ExperimentManager.resume(folder, total_updates=20)
    assert resumed.train().metrics["global_step"] == 20

    change(dataset, "rewards", lambda rewards: rewards + 1e-3)
    with pytest.raises(
        CheckpointError, match="is not the one that this run was trained on: its content"
    ):
        ExperimentManager.resume(folder, total_updates=30)
    minari.delete_dataset("test/data-v0")
    with pytest.raises(ConfigError, match="no dataset 'test/data-v0'"):
        ExperimentManager.resume(folder, total_updates=30)


def test_the_same_data_under_another_name_continues() -> None:
    found = pendulum_like()
    record(found, VECTOR, BOX)
    before = source_of(open_dataset("test/data-v0"))
    record(found, VECTOR, BOX, name="test/copy-v0")
    after = source_of(open_dataset("test/copy-v0"))
    for source in (before, after):
        source.load(CPU)
    assert after.load_state_dict(before.state_dict())
    for name, message in (
        ("episodes", "its episodes are 3"),
        ("transitions", "its transitions are 75"),
    ):
        state = before.state_dict()
        state[name] += 1
        with pytest.raises(CheckpointError, match=message):
            after.load_state_dict(state)


def test_a_source_adds_whole_episodes_each_once() -> None:
    source = source_of(record(counted((5, 3, 4))))
    replay = ReplayBuffer(12, 1, *specs_of(source.dataset))
    start = Progress(0, 1)
    assert [source.collect(replay, 6, start).steps for _ in range(3)] == [8, 4, 0]
    assert len(replay) == 12
    loaded = source_of(source.dataset)
    assert loaded.load(CPU) is loaded.load(CPU)  # read once
