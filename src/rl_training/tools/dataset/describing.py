"""What a dataset contains: figures for ``rl-training dataset list`` and ``info``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.datasets.reading import PROVENANCE, Dataset, read_metadata
from rl_training.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Listed:
    """What the metadata of a dataset states, without reading its episodes."""

    id: str
    env: str | None
    episodes: int | None
    transitions: int | None
    bytes: int
    """Size of its files."""
    mean_return: float | None
    """Mean return of whole episodes, as in `Info`; None if this package did not write it."""
    error: str | None = None
    """Why it cannot be read."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and range of some numbers."""

    mean: float
    std: float
    min: float
    max: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Return those of the values, of which there is at least one."""
        found = np.asarray(values, np.float64)
        return Spread(*(float(figure) for figure in _figures(found)))


def _figures(found: Any) -> tuple[Any, ...]:
    return found.mean(), found.std(), found.min(), found.max()


@dataclasses.dataclass(frozen=True)
class Info:
    """What a dataset contains, computed from all of its episodes."""

    id: str
    path: str
    env: str | None
    observation_space: str
    action_space: str
    episodes: int
    whole: int
    """Episodes that were recorded from their start to their end, as far as is known."""
    transitions: int
    bytes: int
    """Size of its files."""
    jpeg: bool
    """Whether images were compressed as JPEG, which changes their pixels."""
    lengths: Spread
    returns: Spread | None
    """Returns of whole episodes; None if there are none."""
    terminated: int
    """Episodes that ended in a terminal state."""
    truncated: int
    """Episodes that were cut off: their last observation is one to bootstrap from."""
    unfinished: int
    """Episodes whose last transition is marked as neither."""
    replay_bytes: int | None
    """Bytes of one transition in the replay; None: its spaces cannot be learnt from."""
    replay_error: str | None
    """Why its spaces cannot be learnt from."""
    provenance: dict[str, Any] | None
    """Where it comes from, if this package wrote it."""


def listed(root: Path, name: str) -> Listed:
    """Return what the metadata of a dataset under the root states; all of it is untrusted."""
    folder = root / name
    size = _size(folder)
    try:
        metadata = read_metadata(folder)
    except ConfigError as error:
        return Listed(name, None, None, None, size, None, str(error))
    returns = _mapping(_mapping(metadata.get(PROVENANCE)).get("returns"))
    mean = returns.get("mean")
    return Listed(
        name,
        Dataset(folder, metadata, None).env_id,  # no episode is read
        _whole(metadata.get("total_episodes")),
        _whole(metadata.get("total_steps")),
        size,
        _number(mean),
    )


def described(dataset: Dataset, on_step: Callable[[int], None]) -> Info:
    """Return what a dataset contains; raise `ConfigError` for an episode that is damaged.

    ``on_step`` is called after each episode with the number of transitions so far.
    """
    lengths: list[float] = []
    returns: list[float] = []
    parts = set(dataset.cut_episodes)
    ends = {"terminated": 0, "truncated": 0, "unfinished": 0}
    done = 0
    for episode in dataset.episodes():
        if not len(episode):
            continue
        lengths.append(len(episode))
        if episode.index not in parts:
            returns.append(episode.ret)
        is_truncated = bool(episode.truncations[-1])
        cut = "truncated" if is_truncated else "unfinished"
        ends["terminated" if episode.terminations[-1] else cut] += 1
        done += len(episode)
        on_step(done)
    if not lengths:
        raise ConfigError(f"dataset {dataset.path} contains no transitions")
    each, why_not = _replay_bytes(dataset)
    return Info(
        id=dataset.id,
        path=str(dataset.path),
        env=dataset.env_id,
        observation_space=str(dataset.observation_space),
        action_space=str(dataset.action_space),
        episodes=len(lengths),
        whole=len(returns),
        transitions=done,
        bytes=_size(dataset.path),
        jpeg=dataset.lossy_images,
        lengths=Spread.of(lengths),
        returns=Spread.of(returns) if returns else None,
        **ends,
        replay_bytes=each,
        replay_error=why_not,
        provenance=_mapping(dataset.metadata.get(PROVENANCE)) or None,
    )


def _replay_bytes(dataset: Dataset) -> tuple[int | None, str | None]:
    """Return the bytes of a transition in the replay, or why it cannot be stored there."""
    from rl_training.data.replay_buffer import ReplayBuffer
    from rl_training.envs.spaces import action_spec, obs_spec

    try:
        actions = action_spec(dataset.action_space)
        observations = obs_spec(dataset.observation_space, actions)
    except ConfigError as error:
        return None, str(error)
    return ReplayBuffer.bytes_per_transition(observations, actions), None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
