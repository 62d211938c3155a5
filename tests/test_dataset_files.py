"""Datasets that this package writes: what Minari reads from them, and what is never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

minari = pytest.importorskip("minari")

from rl_training.datasets import writing  # noqa: E402
from rl_training.datasets.reading import (  # noqa: E402
    PROVENANCE,
    RecordedEpisode,
    local_ids,
    open_dataset,
)
from rl_training.datasets.writing import (  # noqa: E402
    Recorded,
    find_destination,
    nested,
    stacked,
    write_dataset,
)
from rl_training.envs.spaces import action_spec, obs_spec  # noqa: E402
from rl_training.errors import ConfigError, NonFiniteError  # noqa: E402
from rl_training.types import ActionSpec  # noqa: E402

IMAGE = spaces.Box(0, 255, (40, 36, 3), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
NESTED = spaces.Dict(
    {
        "image": IMAGE,
        "both": spaces.Tuple((VECTOR, spaces.Discrete(4, start=2))),
        "flags": spaces.MultiBinary(5),
        "counts": spaces.MultiDiscrete(
            np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [0, 7]])
        ),
    }
)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "image": IMAGE,
    "discrete": spaces.Discrete(6, start=3),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2, 2), np.float32))),
    "nested dict": NESTED,
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-2.0, 5.0, (2,), np.float32),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(3),
}
DISCRETE = ACTIONS["discrete"]


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def episodes(
    space: spaces.Space[Any], actions: spaces.Space[Any], lengths: tuple[int, ...] = (4, 1, 7)
) -> list[RecordedEpisode]:
    """Random episodes; every second one is terminated, the others are truncated."""
    space.seed(3)
    actions.seed(4)
    random = np.random.default_rng(5)
    found = []
    for index, length in enumerate(lengths):
        ends = np.zeros((2, length), bool)
        ends[index % 2, -1] = True
        found.append(
            RecordedEpisode(
                index,
                stacked(space, [space.sample() for _ in range(length + 1)]),
                np.stack([np.asarray(actions.sample()) for _ in range(length)]),
                random.normal(size=length),
                *ends,
            )
        )
    return found


def write(name: str | Path, found: Any, space: Any = VECTOR, actions: Any = DISCRETE) -> Path:
    recorded = Recorded(space, actions, "ppo", gym.spec("CartPole-v1"))
    return write_dataset(find_destination(name), found, recorded, lambda: {"seed": 3})


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, tuple):
        assert isinstance(found, tuple)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


# -- what Minari reads -----------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_minari_reads_what_was_recorded(observations: str, actions: str) -> None:
    space, action_space = OBSERVATIONS[observations], ACTIONS[actions]
    wanted = episodes(space, action_space)
    write("test/data-v0", wanted, space, action_space)

    dataset = minari.load_dataset("test/data-v0")
    assert dataset.observation_space == space
    assert dataset.action_space == action_space
    assert (dataset.total_episodes, dataset.total_steps) == (3, 12)
    assert dataset.spec.namespace == "test"
    assert dataset.spec.env_spec.id == "CartPole-v1"
    assert dataset.storage.metadata["algorithm_name"] == "ppo"
    assert dataset.storage.metadata[PROVENANCE] == {"seed": 3}
    found = list(dataset.iterate_episodes())
    for one, other in zip(found, wanted, strict=True):
        assert repr(one)  # fails without infos
        assert len(one) == len(other)
        assert_same(one.observations, other.observations)
        for name in ("actions", "rewards", "terminations", "truncations"):
            assert_same(getattr(one, name), getattr(other, name))

    ours = open_dataset("test/data-v0")
    assert not ours.lossy_images
    for own, other in zip(ours.episodes(), wanted, strict=True):
        assert_same(own.observations, other.observations)
        assert_same(own.actions, other.actions)


def test_minari_lists_the_dataset_and_its_namespaces() -> None:
    write("outer/inner/data-v2", episodes(VECTOR, DISCRETE))
    write("plain-v0", episodes(VECTOR, DISCRETE))
    assert set(minari.list_local_datasets()) == set(local_ids())
    assert set(local_ids()) == {"outer/inner/data-v2", "plain-v0"}
    assert minari.namespace.list_local_namespaces() == ["outer", "outer/inner"]
    write("outer/other-v0", episodes(VECTOR, DISCRETE))  # in a namespace that exists


def test_a_dataset_in_any_folder_is_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = episodes(VECTOR, DISCRETE)
    folder = write(tmp_path / "some where" / "my data", wanted)
    dataset = minari.MinariDataset(folder / "data")
    assert dataset.spec.dataset_id == "my-data-v0"
    assert_same(dataset[0].observations, wanted[0].observations)
    monkeypatch.chdir(tmp_path)
    assert write("./relative/kept-v3", wanted) == tmp_path / "relative" / "kept-v3"
    assert minari.MinariDataset("relative/kept-v3/data").spec.dataset_id == "kept-v3"
    assert not (tmp_path / "minari" / "relative").exists()


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "data-v0", episodes(NESTED, DISCRETE), NESTED)
    time.sleep(1.1)  # HDF5 can store times, in seconds
    second = write(tmp_path / "b" / "data-v0", episodes(NESTED, DISCRETE), NESTED)
    assert files_of(first) == files_of(second)
    assert set(files_of(first)) == {"data/main_data.hdf5", "data/metadata.json"}
    other = write(tmp_path / "c" / "data-v0", episodes(NESTED, DISCRETE, (4, 2, 7)), NESTED)
    assert files_of(first) != files_of(other)


def test_episodes_are_written_one_at_a_time(tmp_path: Path) -> None:
    sizes: list[int] = []
    file = tmp_path / "minari" / ".big-v0.tmp" / "data" / "main_data.hdf5"

    def produced() -> Iterator[RecordedEpisode]:
        for _ in range(8):
            sizes.append(file.stat().st_size)
            yield episodes(IMAGE, DISCRETE, (500,))[0]

    write("big-v0", produced(), IMAGE)
    assert sizes[-1] > 5 * 500 * 40 * 36 * 3  # most is on disk before the last one is made


# -- destinations ----------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write("test/data-v0", episodes(VECTOR, DISCRETE))
    before = files_of(folder)
    with pytest.raises(ConfigError, match="exists already"):
        find_destination("test/data-v0")
    with pytest.raises(ConfigError, match="exists already"):
        find_destination(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        find_destination(tmp_path / "empty")
    assert files_of(folder) == before


def test_a_dataset_that_appears_meanwhile_is_kept() -> None:
    place = find_destination("test/data-v0")

    def produced() -> Iterator[RecordedEpisode]:
        yield from episodes(VECTOR, DISCRETE)
        (place.folder / "data").mkdir(parents=True)
        (place.folder / "data" / "metadata.json").write_text("{}")

    with pytest.raises(ConfigError, match="exists already"):
        write_dataset(place, produced(), Recorded(VECTOR, DISCRETE, "ppo"), dict)
    assert (place.folder / "data" / "metadata.json").read_text() == "{}"
    assert [path.name for path in place.folder.parent.iterdir() if path.is_dir()] == ["data-v0"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("medium", "not the id of a dataset.*begins with './'"),
        ("pendulum/medium", "not the id of a dataset"),
        ("a/medium-v0", "two letters or more"),
        ("", "not the id of a dataset"),
        ("test/../data-v0", "not the id of a dataset"),
        ("test/data-v0/inner-v0", "inside the dataset"),
    ],
)
def test_a_name_that_minari_cannot_load_is_refused(name: str, reason: str) -> None:
    write("test/data-v0", episodes(VECTOR, DISCRETE))
    with pytest.raises(ConfigError, match=reason):
        find_destination(name)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create"):
        write(tmp_path / "file" / "data", episodes(VECTOR, DISCRETE))


# -- what is left behind ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_nothing_remains_of_a_write_that_fails(tmp_path: Path, error: BaseException) -> None:
    def produced() -> Iterator[RecordedEpisode]:
        yield from episodes(VECTOR, DISCRETE)
        raise error

    with pytest.raises(type(error)):
        write("test/inner/data-v0", produced())
    assert list((tmp_path / "minari").iterdir()) == []
    write("test/inner/data-v0", episodes(VECTOR, DISCRETE))


def test_the_next_write_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    left = tmp_path / "minari" / "test" / ".data-v0.tmp" / "data"
    left.mkdir(parents=True)
    (left / "metadata.json").write_text(json.dumps({"dataset_id": "test/data-v0"}))
    (left / "main_data.hdf5").write_bytes(b"half")
    assert local_ids() == []
    assert minari.list_local_datasets() == {}
    write("test/data-v0", episodes(VECTOR, DISCRETE))
    assert not left.parent.exists()
    assert local_ids() == ["test/data-v0"]


def test_two_processes_do_not_write_to_the_same_place() -> None:
    place = find_destination("test/data-v0")

    def produced() -> Iterator[RecordedEpisode]:
        with pytest.raises(ConfigError, match="another process is writing"):
            write("test/data-v0", episodes(VECTOR, DISCRETE))
        yield from episodes(VECTOR, DISCRETE)

    write_dataset(place, produced(), Recorded(VECTOR, DISCRETE, "ppo"), dict)
    assert open_dataset("test/data-v0").total_steps == 12


# -- what is refused -------------------------------------------------------------------------------


def test_no_episodes_are_no_dataset() -> None:
    with pytest.raises(ConfigError, match="no transitions"):
        write("test/data-v0", [])
    assert local_ids() == []


def test_values_that_are_not_finite_are_refused() -> None:
    (one,) = episodes(VECTOR, DISCRETE, (4,))
    one.observations[3, 1] = np.nan
    with pytest.raises(NonFiniteError, match="the observation is not finite after 3 steps"):
        write("test/data-v0", [one])
    (one,) = episodes(NESTED, DISCRETE, (4,))
    one.observations["both"][0][2, 1] = np.inf
    with pytest.raises(NonFiniteError, match=r"observation\['both\.0'\] is not finite after 2"):
        write("test/data-v0", [one], NESTED)
    (one,) = episodes(VECTOR, DISCRETE, (4,))
    one.rewards[2] = np.inf
    with pytest.raises(NonFiniteError, match="reward"):
        write("test/data-v0", [one])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"a/b": VECTOR}),
        spaces.Dict({3: VECTOR}),  # type: ignore[dict-item]
        spaces.Sequence(VECTOR),
    ],
)
def test_a_space_that_minari_cannot_store_is_refused(space: Any) -> None:
    with pytest.raises(ConfigError, match="Minari cannot store the observation space"):
        write("test/data-v0", [], space)
    assert local_ids() == []


def test_an_environment_that_cannot_be_named_is_left_out() -> None:
    spec = gym.envs.registration.EnvSpec("Own-v0", entry_point=lambda: None)  # type: ignore[arg-type]
    recorded = Recorded(VECTOR, DISCRETE, "ppo", spec)
    place = find_destination("test/data-v0")
    write_dataset(place, episodes(VECTOR, DISCRETE), recorded, dict)
    assert minari.load_dataset("test/data-v0").spec.env_spec is None


# -- stored forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        *OBSERVATIONS.values(),
        spaces.Box(0, 255, (40, 36), np.uint8),
        spaces.Box(0, 255, (4, 40, 36), np.uint8),
        spaces.Box(0, 255, (4, 40, 36, 3), np.uint8),
        spaces.Box(0, 9, (5, 5), np.uint8),
    ],
)
def test_stored_observations_return_to_the_form_of_the_environment(space: Any) -> None:
    space.seed(1)
    given = stacked(space, [space.sample() for _ in range(3)])
    if space is VECTOR:
        given = given.astype(np.float32).astype(np.float64)  # the precision of storage
    elif space is NESTED:
        given["both"] = (given["both"][0].astype(np.float32).astype(np.float64), given["both"][1])
    spec = obs_spec(space, action_spec(DISCRETE))
    stored = spec.cast(given)
    arrays = {
        name: leaf.returned(stored[name] if isinstance(stored, dict) else stored)
        for name, leaf in spec.leaves.items()
    }
    assert_same(nested(space, arrays), given)


def test_actions_of_the_environment_return_to_those_of_the_policy() -> None:
    box = action_spec(spaces.Box(np.array([-2.0, 0.0]), np.array([6.0, 1.0]), dtype=np.float64))
    given = np.array([[-2.0, 0.5], [2.0, 1.0], [9.0, -0.5]])
    found = box.from_env(given)
    assert found.dtype == np.float32
    assert found.tolist() == [[-1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]
    assert np.array_equal(box.to_env(found), np.clip(given, [-2, 0], [6, 1]))

    half_open = action_spec(
        spaces.Box(np.array([-np.inf, 0.0, 3.0]), np.array([np.inf, np.inf, 3.0]), dtype=np.float64)
    )
    assert half_open.from_env([[7.0, 5.0, 3.0]]).tolist() == [[7.0, 5.0, 0.0]]

    discrete: ActionSpec = action_spec(spaces.Discrete(3, start=-1))
    found = discrete.from_env(np.array([-1, 0, 1], np.int32))
    assert found.dtype == np.int64
    assert found.tolist() == [0, 1, 2]
    multi = action_spec(spaces.MultiDiscrete([2, 3], start=[4, 0]))
    assert multi.from_env([[5, 2]]).tolist() == [[1, 2]]
    assert action_spec(spaces.MultiBinary(2)).from_env([[1, 0]]).tolist() == [[1, 0]]


def test_writing_loads_no_torch() -> None:
    code = f"import sys, {writing.__name__}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(writing.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
