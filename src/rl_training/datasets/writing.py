"""Writing datasets that Minari reads, an episode at a time.

A dataset appears under its name only when it is complete: it is written to a hidden folder beside
it, which is renamed at the end. Images are stored as they are, without JPEG.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_training.datasets.reading import (
    PROVENANCE,
    RecordedEpisode,
    datasets_root,
    is_dataset_id,
    no_dataset,
    require_minari,
)
from rl_training.errors import ConfigError, NonFiniteError
from rl_training.runs import is_storage_error, storage_errors, sync_folder, write_json
from rl_training.types import Array, leaf_name

if TYPE_CHECKING:
    from gymnasium import spaces
    from gymnasium.envs.registration import EnvSpec
    from minari.data_collector import EpisodeBuffer


class Destination(NamedTuple):
    """Where a dataset will be."""

    id: str
    """Its Minari id."""
    folder: Path
    namespace: str | None = None
    """The Minari namespace that contains it; None: a dataset without one, or a folder elsewhere."""


class Recorded(NamedTuple):
    """What was recorded: the metadata of a dataset besides its episodes."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    algorithm: str
    """The algorithm of the policy that acted."""
    env_spec: EnvSpec | None = None
    """What Minari makes the environment from; None: unknown."""


def find_destination(name: str | Path) -> Destination:
    """Return where a dataset is written, given a Minari id or a folder.

    Text is an id ('namespace/name-v0', under MINARI_DATASETS_PATH) unless it begins like a path:
    with '/', '.' or '~'. Raises `ConfigError` for other text, and where something exists already.
    """
    require_minari()
    if isinstance(name, str) and not (name[:1] in (".", "~") or Path(name).is_absolute()):
        found = _destination_of_id(name)
    else:
        folder = Path(name).expanduser().resolve()
        plain = re.sub(r"[^\w-]+", "-", folder.name).strip("-") or "dataset"
        found = Destination(plain if is_dataset_id(plain) else f"{plain}-v0", folder)
    _require_absent(found)
    return found


def _destination_of_id(name: str) -> Destination:
    from minari.dataset.minari_dataset import parse_dataset_id

    wrong = f"{name!r} is not the id of a dataset, such as 'pendulum/medium-v0'"
    if not is_dataset_id(name):
        raise ConfigError(f"{wrong}. For a folder, write a path that begins with './' or '/'")
    try:
        namespace, _, _ = parse_dataset_id(name)
    except ValueError:
        raise ConfigError(f"{wrong}: Minari's namespaces have two letters or more") from None
    root = datasets_root()
    found = Destination(name, root / name, namespace)
    for parent in found.folder.parents:
        if parent == root:
            break
        if (parent / "data").exists():
            raise ConfigError(f"{name!r} would be inside the dataset {parent}: choose another id")
    return found


def _require_absent(place: Destination) -> None:
    if place.folder.exists() or place.folder.is_symlink():
        raise ConfigError(
            f"{place.folder} exists already, and a dataset is never overwritten: choose another"
            " name or version, or delete it first"
        )


def write_dataset(
    place: Destination,
    episodes: Iterable[RecordedEpisode],
    recorded: Recorded,
    provenance: Callable[[], Mapping[str, Any]],
) -> Path:
    """Write a dataset and return its folder; nothing remains of one that was not completed.

    ``episodes`` are written as they come, one in memory at a time; their ``index`` is not used.
    ``provenance`` is called after the last of them and returns plain values for the metadata, under
    the key `PROVENANCE`. The same episodes and values give the same bytes.

    Raises:
        ConfigError: something exists at the place, another process is writing there, a space cannot
            be stored, or there are no episodes.
        NonFiniteError: a reward or observation is NaN or infinite.
        StorageError: the disk is full or forbids it.
    """
    require_minari()
    _check_storable(recorded.observation_space, "observation")
    _check_storable(recorded.action_space, "action")
    with storage_errors(), _hidden_folder(place) as hidden:
        _write(hidden / "data", place.id, episodes, recorded, provenance)
        _sync_files(hidden / "data")
        _make_namespace(place.namespace)
        _publish(hidden, place)
    return place.folder


def _write(
    data: Path,
    dataset_id: str,
    episodes: Iterable[RecordedEpisode],
    recorded: Recorded,
    provenance: Callable[[], Mapping[str, Any]],
) -> None:
    from minari.dataset.minari_storage import MinariStorage

    data.mkdir()
    storage = MinariStorage.new(
        data,
        observation_space=recorded.observation_space,
        action_space=recorded.action_space,
        env_spec=_serialisable(recorded.env_spec),
        data_format="hdf5",
        jpeg_encoding=False,
    )
    storage.update_metadata(
        {
            "dataset_id": dataset_id,
            "algorithm_name": recorded.algorithm,
            "minari_version": importlib.metadata.version("minari"),
        }
    )
    storage.update_episodes(_buffer(episode, i) for i, episode in enumerate(episodes))
    if not storage.total_episodes:
        raise ConfigError(f"there are no transitions to write to {dataset_id}")
    storage.update_metadata({PROVENANCE: dict(provenance())})


def _serialisable(spec: EnvSpec | None) -> EnvSpec | None:
    """Return an environment's spec if it can be written as JSON."""
    if spec is not None:
        with contextlib.suppress(TypeError, ValueError):
            spec.to_json()
            return spec
    return None


def _buffer(episode: RecordedEpisode, index: int) -> EpisodeBuffer:
    from minari.data_collector import EpisodeBuffer

    if not np.isfinite(episode.rewards).all():
        raise NonFiniteError(f"episode {index} of the dataset has a reward that is not finite")
    for path, leaf in _leaves(episode.observations):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            step = int(np.argwhere(~np.isfinite(leaf))[0][0])
            named = f"observation[{leaf_name(path)!r}]" if path else "the observation"
            raise NonFiniteError(
                f"episode {index} of the dataset: {named} is not finite after {step} steps"
            )
    return EpisodeBuffer(
        observations=episode.observations,
        actions=episode.actions,
        rewards=episode.rewards,
        terminations=episode.terminations,
        truncations=episode.truncations,
        infos={},
    )


def _leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Array]]:
    if isinstance(tree, (dict, tuple)):
        for key, entry in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(entry, (*path, key))
    else:
        yield path, tree


# -- observations ----------------------------------------------------------------------------------


def stacked(space: spaces.Space[Any], observations: Sequence[Any]) -> Any:
    """Return observations as arrays with one row each, nested as the space is, in its dtypes."""
    entries = _entries(space)
    if entries is None:
        return np.stack([np.asarray(one, space.dtype) for one in observations])
    parts = {
        key: stacked(entry, [one[key] for one in observations]) for key, entry in entries.items()
    }
    return _joined(space, parts)


def nested(
    space: spaces.Space[Any], arrays: Mapping[str, Array], path: tuple[str | int, ...] = ()
) -> Any:
    """Return arrays by name (see `ObsSpec`) nested as the space is, in its dtypes."""
    entries = _entries(space)
    if entries is None:
        return arrays[leaf_name(path)].astype(space.dtype, copy=False)
    parts = {key: nested(entry, arrays, (*path, key)) for key, entry in entries.items()}
    return _joined(space, parts)


def _entries(space: Any) -> dict[Any, Any] | None:
    """Return the spaces in a Dict or Tuple by key or index; None for an array."""
    entries = getattr(space, "spaces", None)
    if entries is None:
        return None
    return dict(entries) if isinstance(entries, Mapping) else dict(enumerate(entries))


def _joined(space: Any, parts: dict[Any, Any]) -> Any:
    return parts if isinstance(space.spaces, Mapping) else tuple(parts.values())


def _check_storable(space: spaces.Space[Any], name: str) -> None:
    """Raise `ConfigError` unless Minari reads the space as it was written."""
    from minari.serialization import deserialize_space, serialize_space

    for key in _keys(space):
        if not isinstance(key, str) or not key.strip(".") or "/" in key:
            raise ConfigError(
                f"Minari cannot store the {name} space: its key {key!r} is not text without '/'"
            )
    try:
        restored = deserialize_space(serialize_space(space))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"Minari cannot store the {name} space {space}: {error}") from None
    if restored != space:
        raise ConfigError(f"Minari cannot store the {name} space {space}: it becomes {restored}")


def _keys(space: Any) -> Iterator[Any]:
    """Yield all keys of nested Dict spaces."""
    for key, entry in (_entries(space) or {}).items():
        if isinstance(space.spaces, Mapping):
            yield key
        yield from _keys(entry)


# -- folders ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hidden_folder(place: Destination) -> Iterator[Path]:
    """Yield an empty hidden folder beside the destination; on an error, delete it.

    Its name depends on the destination alone, and a lock excludes other processes: so the next
    write to the same destination deletes what a killed process left there.
    """
    _require_absent(place)
    hidden = place.folder.with_name(f".{place.folder.name}.tmp")
    created = [parent for parent in place.folder.parents if not parent.exists()]
    try:
        place.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(hidden)
    except OSError as error:
        if is_storage_error(error):
            raise
        raise ConfigError(f"cannot create {hidden.parent}: {error.strerror}") from None
    try:
        yield hidden
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        for parent in created:  # the innermost first
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    finally:
        if lock is not None:
            os.close(lock)


def find_deletable(dataset_id: str) -> Path:
    """Return the folder of a dataset under MINARI_DATASETS_PATH that contains it and nothing else.

    Raises `ConfigError` for anything else, and where links lead to it or are in it.
    """
    root = datasets_root()
    if not is_dataset_id(dataset_id):
        raise ConfigError(
            f"only datasets under {root} are deleted, by their id, such as 'pendulum/medium-v0';"
            f" got {dataset_id!r}"
        )
    folder = root / dataset_id
    parts = [part for part in reversed([folder, *folder.parents]) if part.is_relative_to(root)]
    inside = itertools.chain(parts[1:], folder.rglob("*"))
    if link := next(filter(Path.is_symlink, inside), None):
        raise ConfigError(f"{dataset_id!r} is not deleted: {link} is a symbolic link")
    if not (folder / "data" / "metadata.json").is_file():
        raise no_dataset(dataset_id)
    if others := sorted(entry.name for entry in folder.iterdir() if entry.name != "data"):
        raise ConfigError(
            f"{dataset_id!r} is not deleted: {folder} contains more than a dataset"
            f" ({', '.join(others)}). Move that elsewhere first"
        )
    return folder


def delete_dataset(folder: Path) -> None:
    """Delete the folder of a dataset; of one that could not be deleted whole, nothing is found.

    Raises `ConfigError` where the disk forbids it.
    """
    hidden = folder.with_name(f".{folder.name}.tmp")  # emptied by the next write, if this is killed
    try:
        lock = _locked(hidden)
        try:
            folder.rename(hidden / folder.name)
            shutil.rmtree(hidden)
        finally:
            if lock is not None:
                os.close(lock)
    except OSError as error:
        with contextlib.suppress(OSError):
            hidden.rmdir()
        left = "" if folder.exists() else f"; what is left of it is in {hidden}"
        raise ConfigError(f"cannot delete {folder}: {error.strerror}{left}") from None
    sync_folder(folder.parent)


def _locked(folder: Path) -> int | None:
    """Make a folder, lock and empty it; return the file descriptor that holds the lock."""
    if os.name != "posix":
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return None
    import fcntl

    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another process has just renamed or deleted it
            continue
        try:
            _lock(descriptor, folder, fcntl)
            if _is_at(folder, descriptor):
                for entry in folder.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, fcntl: Any) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(f"another process is writing to {folder}") from None
        # Otherwise a file system without locks.


def _is_at(folder: Path, descriptor: int) -> bool:
    """Return whether the open folder still has this name."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_files(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


def _publish(hidden: Path, place: Destination) -> None:
    """Rename the complete dataset to its name."""
    _require_absent(place)
    try:
        hidden.rename(place.folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            _require_absent(place)
        raise
    sync_folder(place.folder.parent)


def _make_namespace(namespace: str | None) -> None:
    """Make a namespace and those around it, as Minari does, where they are missing."""
    if namespace is None:
        return
    from minari.namespace import NAMESPACE_METADATA_FILENAME, namespace_hierarchy

    for name in namespace_hierarchy(namespace):
        file = datasets_root() / name / NAMESPACE_METADATA_FILENAME
        if not file.exists():
            write_json(file, {})
