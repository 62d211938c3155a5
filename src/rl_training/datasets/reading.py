"""Datasets of recorded episodes, read through Minari.

A dataset is a folder ``ROOT/namespace/name-v0`` with ``data/main_data.hdf5`` and
``data/metadata.json``. Its metadata may name an environment and the module that it is defined in:
nothing of that is imported here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gymnasium as gym
import numpy as np

from rl_training.datasets.hdf5_checks import EpisodeChecks
from rl_training.errors import ConfigError, did_you_mean
from rl_training.types import Array

if TYPE_CHECKING:
    from gymnasium import spaces
    from minari.dataset.minari_storage import MinariStorage

_FIELDS = ("observation_space", "action_space", "total_episodes", "total_steps", "data_format")
_HASHED_AT_ONCE = 1 << 20
_ROOT_VARIABLE = "MINARI_DATASETS_PATH"
PROVENANCE = "rl_training"
"""Key of a dataset's metadata under which this package writes where the data comes from."""


@dataclasses.dataclass(frozen=True)
class RecordedEpisode:
    """One episode, as the environment returned it."""

    index: int
    """Its number in the dataset."""
    observations: Any
    """One more than there are actions; an array, or nested dicts and tuples of arrays."""
    actions: Array
    rewards: Array
    terminations: Array
    truncations: Array

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self.rewards)

    @property
    def ret(self) -> float:
        """Sum of its rewards."""
        return float(np.sum(self.rewards, dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset on disk: what it contains, and its episodes one by one."""

    path: Path
    """The folder that contains ``data``."""
    metadata: dict[str, Any]
    storage: MinariStorage

    @property
    def id(self) -> str:
        """Its Minari id, or the name of its folder."""
        return str(self.metadata.get("dataset_id", self.path.name))

    @property
    def total_episodes(self) -> int:
        """Number of episodes."""
        return int(self.metadata["total_episodes"])

    @property
    def total_steps(self) -> int:
        """Number of transitions."""
        return int(self.metadata["total_steps"])

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The space of its observations."""
        return cast("spaces.Space[Any]", self.storage.observation_space)

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The space of its actions."""
        return cast("spaces.Space[Any]", self.storage.action_space)

    @property
    def env_id(self) -> str | None:
        """The id of the environment that was recorded, without the module that defines it."""
        try:
            name = json.loads(self.metadata["env_spec"])["id"]
        except (KeyError, TypeError, ValueError, RecursionError):
            return None
        return name.rpartition(":")[2] if isinstance(name, str) else None

    @property
    def env_changes(self) -> str:
        """What the recorded environment had besides the registered one of its id, as text."""
        try:
            spec = json.loads(self.metadata["env_spec"])
            wrappers = [str(one["name"]) for one in spec.get("additional_wrappers") or ()]
            given = dict(spec.get("kwargs") or {})
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return ""
        registered = gym.registry.get(self.env_id or "")
        known = {} if registered is None else registered.kwargs
        kwargs = {k: v for k, v in given.items() if k != "render_mode" and known.get(k) != v}
        limit = spec.get("max_episode_steps")
        if registered is not None and limit not in (None, registered.max_episode_steps):
            kwargs["max_episode_steps"] = limit
        parts = [f"env_kwargs {json.dumps(kwargs)}"] if kwargs else []
        made_by = str(spec.get("entry_point") or "")
        if registered is not None and made_by and _class_of(made_by) != _class_of(registered):
            parts.append(f"the class {made_by}")
        return " and ".join([*parts, *([f"wrappers {', '.join(wrappers)}"] if wrappers else [])])

    @property
    def lossy_images(self) -> bool:
        """Whether it contains images that were compressed as JPEG, which changes their pixels."""
        from minari.dataset.minari_storage import is_image_space

        return self.storage.jpeg_encoding and any(
            is_image_space(space) for space in _arrays_of(self.observation_space)
        )

    @property
    def cut_episodes(self) -> tuple[int, ...]:
        """The episodes that are known to lack their beginning or end.

        All others count as whole. The mean return of a dataset is that of its whole episodes.
        """
        about = self.metadata.get(PROVENANCE)
        found = about.get("cut_episodes") if isinstance(about, dict) else None
        numbers = found if isinstance(found, list) else []
        return tuple(one for one in numbers if type(one) is int)

    def lengths(self) -> Array:
        """Return the number of transitions of each episode, without reading them."""
        try:
            about = self.storage.get_episode_metadata(range(self.total_episodes))
            lengths = np.array([int(one["total_steps"]) for one in about], np.int64)
        except Exception as error:  # whatever a damaged file makes Minari raise
            raise self._damaged(f"its episodes cannot be read ({error})") from error
        if (lengths < 0).any() or int(lengths.sum()) != self.total_steps:
            raise self._damaged(
                f"its episodes have {int(lengths.sum()):,} steps, its metadata.json states"
                f" {self.total_steps:,}"
            )
        return lengths

    def episodes(self, indices: Iterable[int] | None = None) -> Iterator[RecordedEpisode]:
        """Yield episodes in the order of ``indices`` (None: all), one in memory at a time.

        Raises `ConfigError` for an episode whose arrays do not match.
        """
        wanted = range(self.total_episodes) if indices is None else [int(i) for i in indices]
        index = -1
        try:
            with self._checks() as checks:
                reader = iter(self.storage.get_episodes(wanted))  # opens its file once
                for index in wanted:
                    checks.check(index)
                    yield self._checked(next(reader), index)
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged file makes h5py and Minari raise
            raise self._damaged(f"episode {index} cannot be read ({error})") from error

    def _checks(self) -> EpisodeChecks:
        spaces = (self.observation_space, self.action_space)
        file = self.path / "data" / "main_data.hdf5"
        return EpisodeChecks(file, *spaces, jpeg=self.storage.jpeg_encoding)

    def _checked(self, episode: dict[str, Any], index: int) -> RecordedEpisode:
        names = ("actions", "rewards", "terminations", "truncations")
        arrays = [np.asarray(episode[name]) for name in names]
        for name, array in zip(names, arrays, strict=True):
            if array.dtype.kind not in "biuf" or (array.ndim != 1 and name != "actions"):
                raise self._damaged(
                    f"episode {index} has {name} of dtype {array.dtype} and shape {array.shape}"
                )
        count = len(arrays[1])
        observed = {len(leaf) for leaf in _leaves(episode["observations"])}
        if any(len(array) != count for array in arrays) or observed != {count + 1}:
            lengths = [f"{len(array)} {name}" for name, array in zip(names, arrays, strict=True)]
            found = " and ".join(map(str, sorted(observed)))
            raise self._damaged(
                f"episode {index} has {found} observations, {', '.join(lengths)}; T transitions"
                " have T + 1 observations"
            )
        _, rewards, terminations, truncations = arrays
        ended = terminations.astype(bool) | truncations.astype(bool)
        if ended[:-1].any():
            at = int(np.flatnonzero(ended)[0])
            raise self._damaged(f"episode {index} ends at step {at} and continues after it")
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(rewards.astype(np.float32)).all()
        if not is_finite:
            raise self._damaged(f"episode {index} has a reward that is not finite in float32")
        return RecordedEpisode(index, episode["observations"], *arrays)

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"dataset {self.path}: {why}")

    def digest(self) -> str:
        """Return a SHA-256 of the data files and of what the metadata says of their content."""
        content = {name: self.metadata[name] for name in _FIELDS}
        content["jpeg_encoding"] = self.metadata.get("jpeg_encoding", True)
        whole = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        folder = self.path / "data"
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            if file == folder / "metadata.json":
                continue
            whole.update(file.relative_to(folder).as_posix().encode())
            with file.open("rb") as stream:
                while block := stream.read(_HASHED_AT_ONCE):
                    whole.update(block)
        return whole.hexdigest()


def open_dataset(name: str | Path) -> Dataset:
    """Return the dataset of a Minari id, or of a folder.

    Raises `ConfigError` where there is none, and for one that cannot be read.
    """
    require_minari()
    folder = find_dataset(name)
    metadata = read_metadata(folder)
    if missing := [field for field in _FIELDS if field not in metadata]:
        # Minari would make the environment that the file names to find its spaces.
        raise ConfigError(f"dataset {folder}: its metadata.json has no {' or '.join(missing)}")
    if metadata["data_format"] != "hdf5":
        raise ConfigError(
            f"dataset {folder} has the format {metadata['data_format']!r}; only hdf5 is read"
        )
    from minari.dataset.minari_storage import MinariStorage

    try:
        storage = MinariStorage.read(folder / "data")
        dataset = Dataset(folder, metadata, storage)
        is_empty = min(dataset.total_steps, dataset.total_episodes) < 1
    except Exception as error:  # whatever unexpected metadata makes Minari raise
        raise ConfigError(f"dataset {folder} cannot be read: {error}") from error
    if is_empty:
        raise ConfigError(f"dataset {folder} contains no transitions")
    return dataset


def require_minari() -> None:
    """Raise `ConfigError` if Minari is not installed."""
    if importlib.util.find_spec("minari") is None or importlib.util.find_spec("h5py") is None:
        raise ConfigError(
            "datasets need the extra 'offline'; in the clone: pip install '.[offline]'"
        )


def find_dataset(name: str | Path) -> Path:
    """Return the folder of a dataset, given as a path or as a Minari id."""
    given = Path(name).expanduser()
    for folder in (given, given.parent) if given.name == "data" else (given,):
        if (folder / "data" / "metadata.json").is_file():
            return folder
    root = datasets_root()
    if is_dataset_id(str(name)) and (root / str(name) / "data" / "metadata.json").is_file():
        return root / str(name)
    raise no_dataset(str(name), "it is neither a folder with data/metadata.json nor")


def no_dataset(name: str, reason: str = "it is not") -> ConfigError:
    """Return the error for a name that no dataset has, with what was probably meant."""
    known = local_ids()
    hint = did_you_mean(name, known) if known else ""
    return ConfigError(
        f"no dataset {name!r}: {reason} the id of a dataset under {datasets_root()}"
        f" ({_ROOT_VARIABLE}{_unset()}).{hint or ' rl-training dataset list lists what is there'}"
    )


def _unset() -> str:
    return "" if os.environ.get(_ROOT_VARIABLE) else ", which is not set"


def is_dataset_id(name: str) -> bool:
    """Return whether a name has the form of a Minari id: 'namespace/name-v0'."""
    return re.fullmatch(r"(?:[\w-]+/)*[\w-]+-v\d+", name) is not None


def datasets_root() -> Path:
    """Return the folder in which Minari keeps datasets."""
    require_minari()
    from minari.storage.datasets_root_dir import get_dataset_path

    return Path(get_dataset_path()).resolve()


def local_ids() -> list[str]:
    """Return the ids of all datasets under the root."""
    root = datasets_root()
    found = (file.parent.parent for file in root.glob("**/data/metadata.json"))
    names = (folder.relative_to(root).as_posix() for folder in found)
    return sorted(name for name in names if is_dataset_id(name))


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of the dataset in a folder."""
    path = folder / "data" / "metadata.json"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"dataset {folder}: metadata.json cannot be read ({error})") from error
    if not isinstance(metadata, dict):
        raise ConfigError(f"dataset {folder}: metadata.json does not hold a mapping")
    return metadata


def _class_of(entry_point: Any) -> str:
    """Return the class of an entry point, whose module differs between versions of Gymnasium."""
    path = getattr(entry_point, "entry_point", entry_point)
    return path.rpartition(":")[2] if isinstance(path, str) else ""


def _leaves(tree: Any) -> Iterator[Array]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple):
        for entry in tree:
            yield from _leaves(entry)
    else:
        yield np.asarray(tree)


def _arrays_of(space: Any) -> Iterator[Any]:
    entries = getattr(space, "spaces", None)
    if entries is None:
        yield space
        return
    for entry in entries.values() if isinstance(entries, dict) else entries:
        yield from _arrays_of(entry)
