"""Types shared by all layers. They need only NumPy, so that environment workers load no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from rl_training.errors import Paused

Array: TypeAlias = npt.NDArray[Any]
Obs: TypeAlias = Array | dict[str, Array]

ACTION_MASK = "action_mask"
"""Key of a Dict observation that marks the legal actions; encoders do not see it."""

TEAM_STATE, TEAM_ALIVE = "team_state", "team_alive"
"""Keys of what all rows of a team share: its state, and which of its agents live."""


class RunSettings(Protocol):
    """Settings of a run that an algorithm's hyperparameters are checked against."""

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        ...

    @property
    def shards(self) -> int:
        """Number of logical shards, a divisor of the number of environments."""
        ...

    @property
    def normalize_reward(self) -> bool:
        """Whether rewards are scaled by running statistics."""
        ...

    @property
    def acceleration(self) -> str:
        """How gradient steps are computed."""
        ...

    @property
    def dataset(self) -> str | None:
        """The dataset that is learnt from, if any."""
        ...

    @property
    def is_offline(self) -> bool:
        """Whether the run learns from the dataset alone."""
        ...


def envs_of_shard(run: RunSettings) -> tuple[int, str]:
    """Return how many environments a shard has, and how that is computed, for messages."""
    return run.num_envs // run.shards, "num_envs / shards" if run.shards > 1 else "num_envs"


StopRequest: TypeAlias = Callable[[], bool]
"""Called between steps and between updates: True requests a stop."""


def never() -> bool:
    """Return False: never request a stop."""
    return False


Item = TypeVar("Item")


def until(stop: StopRequest, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; raise `Paused` before the next one if a stop is requested."""
    for item in items:
        if stop():
            raise Paused
        yield item


class Progress(NamedTuple):
    """Progress of a run, on which schedules depend."""

    step: int
    total: int

    @property
    def fraction(self) -> float:
        """Completed fraction of the run, 0 to 1."""
        return min(1.0, self.step / self.total) if self.total > 0 else 1.0


class Episode(NamedTuple):
    """One finished episode."""

    env: int
    ret: float
    length: int


class VectorStep(NamedTuple):
    """The result of one step of all environments, independent of the autoreset mode."""

    obs: Obs
    """The next observations; after the end of an episode, those of the reset."""
    final_obs: Obs
    """The true next observations; equal to ``obs`` where no episode ended."""
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    """False on a reset-only row: its action was ignored; it is not learnt from or counted."""
    episodes: tuple[Episode, ...]
    waiting: Array | None = None
    """Rows whose agent does not act in the next step, because it is another's turn."""

    @property
    def cut(self) -> Array:
        """Rows where recurrent state must be reset: the episode ended, or the row is reset-only.

        Where agents take turns a row that did not act is none of these: see `held`.
        """
        ended: Array = self.terminated | self.truncated
        return ended | ~self.valid if self.waiting is None else ended

    @property
    def held(self) -> Array | None:
        """Rows that keep the recurrent state from before the step, since it was another's turn."""
        return None if self.waiting is None else ~self.valid


class EnvInfo(NamedTuple):
    """What a learner knows about the source of experience."""

    obs_spec: ObsSpec
    action_spec: ActionSpec
    num_envs: int
    """Number of rows of every step."""
    frame_stack: int = 1
    """Number of stacked images in an observation; 1: not stacked."""
    has_invalid_rows: bool = False
    """Whether rows may be reset-only (``valid`` False)."""
    has_turns: bool = False
    """Whether agents of an environment act one after another (`VectorStep.waiting`)."""
    agents: Mapping[str, tuple[str, ...]] = {}
    """Agents by the group that shares a policy, each a row of every environment; empty: one agent,
    without a name."""
    log_info: tuple[str, ...] = ()
    """Keys of the last info of an episode that are always logged."""

    @property
    def rows_per_env(self) -> int:
        """Rows of one environment."""
        return sum(map(len, self.agents.values())) or 1

    device: str = "cpu"
    """Device on which the experience is produced."""
    on_device: bool = False
    """Whether steps are tensors of that device (``vectorization: device``)."""


class Rows(NamedTuple):
    """Flat rows of raw observations."""

    obs: Any
    valid: Any
    """A tensor: False on a row that is not counted."""


class Remembered(NamedTuple):
    """Observations and the recurrent state before them."""

    obs: Any
    state: Any


class OutsideSpaceError(ValueError):
    """An observation contains a value outside its space."""

    def __init__(self, message: str, row: int | None) -> None:
        super().__init__(message)
        self.row = row
        """Row of the batch that contains it; None for a single observation."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One array of an observation: how it is stored and how the environment returns it.

    Images are stored channel first, values of Discrete and MultiDiscrete spaces as one-hot vectors.
    """

    shape: tuple[int, ...]
    dtype: str
    given: tuple[int, ...] = ()
    """Shape as the environment returns it, if it differs; see `arranged`."""
    nvec: tuple[int, ...] = ()
    """Number of values of each component, if components are stored as one-hot vectors."""
    start: tuple[int, ...] = ()
    """Smallest value of each of these components."""
    path: tuple[str | int, ...] = ()
    """Keys and indices of this array in a nested observation; empty: its name is its key."""

    @property
    def is_image(self) -> bool:
        """Whether this is an image."""
        return len(self.shape) == 3 and self.dtype == "uint8"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def given_shape(self) -> tuple[int, ...]:
        """Shape of one array as the environment returns it."""
        return self.given if self.nvec else self.given or self.shape

    def arranged(self, given: Any) -> Array:
        """Return the environment's array, batched or not, in the shape of storage.

        (height, width) gets a channel axis; a last channel axis becomes the first; a stack of
        images, (images, height, width, channels), becomes one image of all their channels; values
        of Discrete and MultiDiscrete spaces become concatenated one-hot vectors. Raises
        `OutsideSpaceError` for a value outside such a space.
        """
        array: Array = np.asarray(given)
        if self.nvec:
            return self._one_hot(array)
        if not self.given:
            return array
        batch = array.shape[: array.ndim - len(self.given)]
        if self.given[-3:-1] == self.shape[1:]:
            array = np.moveaxis(array, -1, -3)
        return array.reshape(*batch, *self.shape)

    @functools.cached_property
    def _components(self) -> tuple[Array, Array, Array]:
        """Smallest and largest value of each component, and the offset of its one-hot index."""
        counts, lowest = np.asarray(self.nvec, np.int64), np.asarray(self.start, np.int64)
        return lowest, lowest + counts - 1, np.cumsum(counts) - counts - lowest

    def _one_hot(self, array: Array) -> Array:
        if array.dtype.kind not in "biuf":
            raise OutsideSpaceError(f"has dtype {array.dtype}, which is not numeric", None)
        batch = array.shape[: array.ndim - len(self.given)]
        given = array.reshape(*batch, len(self.nvec))
        lowest, highest, offset = self._components
        with np.errstate(invalid="ignore"):
            values = given.astype(np.int64)
        outside = (values != given) | (values < lowest) | (values > highest)
        if outside.any():
            *row, component = (int(i) for i in np.argwhere(outside)[0])
            raise OutsideSpaceError(
                f"contains {given[*row, component]}, but its space has the values"
                f" {lowest[component]} to {highest[component]}",
                row[0] if row else None,
            )
        hot = np.zeros((*batch, *self.shape), self.dtype)
        np.put_along_axis(hot, values + offset, 1, axis=-1)
        return hot

    def returned(self, stored: Any) -> Array:
        """Return a batch of stored arrays in the shape that the environment returned.

        It is the inverse of :meth:`arranged`. One-hot vectors become integers; the dtype of other
        arrays stays that of storage.
        """
        array: Array = np.asarray(stored)
        batch = array.shape[: array.ndim - len(self.shape)]
        if self.nvec:
            ends = np.cumsum(self.nvec)[:-1]
            hot = [part.argmax(-1) for part in np.split(array, ends, axis=-1)]
            values = np.stack(hot, axis=-1) + np.asarray(self.start, np.int64)
            return values.reshape(*batch, *self.given)
        if not self.given:
            return array
        if self.given[-3:-1] == self.shape[1:]:
            array = array.reshape(*batch, *self.given[:-3], self.given[-1], *self.shape[1:])
            return np.moveaxis(array, -3, -1)
        return array.reshape(*batch, *self.given)

    def to_plain(self) -> list[Any]:
        """Return plain values, for a checkpoint."""
        plain: list[Any] = [list(self.shape), self.dtype]
        if self.nvec or self.path:
            return [*plain, *map(list, (self.given, self.nvec, self.start, self.path))]
        return [*plain, list(self.given)] if self.given else plain

    @staticmethod
    def from_plain(plain: Any) -> ArraySpec:
        """Return the spec of :meth:`to_plain` values; raise ValueError for other values."""
        if not isinstance(plain, (list, tuple)) or len(plain) not in (2, 3, 6):
            raise ValueError(f"{plain!r} does not describe an array of an observation")
        fields: list[Any] = [*plain, (), (), (), ()]  # older forms lack the last ones
        shape, dtype, given, nvec, start, path = fields[:6]
        if not isinstance(dtype, str) or dtype not in ("float32", "uint8", "bool"):
            raise ValueError(f"observations are not stored as {dtype!r}")
        spec = ArraySpec(
            _counts(shape), dtype, _counts(given), _counts(nvec), _integers(start), _path(path)
        )
        spec._check_sizes()
        return spec

    def _check_sizes(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        if self.nvec:
            components = math.prod(self.given)
            fits = self.shape == (sum(self.nvec),) and self.dtype == "float32"
            fits = fits and len(self.nvec) == len(self.start) == components and 0 not in self.nvec
        else:
            fits = not self.start and (not self.given or math.prod(self.given) == self.size)
        if not fits:
            raise ValueError(f"the sizes of {self} do not match")


@dataclasses.dataclass(frozen=True)
class ObsSpec:
    """One environment's observation: a single array (key ``""``) or a dict of arrays.

    A nested observation is stored as a flat dict; the names of its arrays are their paths, joined
    by dots.
    """

    leaves: Mapping[str, ArraySpec]

    @property
    def is_dict(self) -> bool:
        """Whether an observation is stored as a dict."""
        return "" not in self.leaves

    @property
    def encoded(self) -> dict[str, ArraySpec]:
        """The arrays that an encoder receives: all but the action mask."""
        return {key: leaf for key, leaf in self.leaves.items() if key != ACTION_MASK}

    @property
    def has_mask(self) -> bool:
        """Whether an observation contains an action mask."""
        return ACTION_MASK in self.leaves

    @property
    def has_images(self) -> bool:
        """Whether an observation contains an image."""
        return any(leaf.is_image for leaf in self.encoded.values())

    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays, as buffers take them."""
        if self.is_dict:
            return {key: leaf.shape for key, leaf in self.leaves.items()}
        return self.leaves[""].shape

    def path(self, name: str) -> tuple[str | int, ...]:
        """Return the keys and indices that lead to an array in the environment's observation."""
        return self.leaves[name].path or ((name,) if name else ())

    def parts(self, obs: Any) -> dict[str, Any]:
        """Return the arrays of an observation by name, as the environment returned them."""
        return {name: functools.reduce(_entry, self.path(name), obs) for name in self.leaves}

    def joined(self, parts: Mapping[str, Any]) -> Any:
        """Return the observation whose :meth:`parts` are given: an array, or nested as its own."""
        if not self.is_dict:
            return parts[""]
        return _nested([(self.path(name), parts[name]) for name in self.leaves])

    def cast(self, obs: Any) -> Obs:
        """Return a copy of ``obs``, batched or not, in the dtypes and shapes of storage.

        Raises `OutsideSpaceError` if a Discrete or MultiDiscrete value is outside its space.
        """
        return self.stored(self.parts(obs)) if self.is_dict else _cast(obs, self.leaves[""], "")

    def stored(self, parts: Mapping[str, Any]) -> Obs:
        """Return the arrays that :meth:`parts` returned in the dtypes and shapes of storage."""
        if not self.is_dict:
            return _cast(parts[""], self.leaves[""], "")
        return {name: _cast(parts[name], leaf, name) for name, leaf in self.leaves.items()}

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {k: leaf.to_plain() for k, leaf in self.leaves.items()}

    @staticmethod
    def from_plain(plain: Any) -> ObsSpec:
        """Return the spec of :meth:`to_plain` values; raise ValueError for other values."""
        if not isinstance(plain, Mapping) or not all(isinstance(name, str) for name in plain):
            raise ValueError("an observation is described by the names of its arrays")
        if (groups := _plain_groups(plain)) is not None:
            return GroupedObsSpec.of({k: ObsSpec.from_plain(one) for k, one in groups.items()})
        spec = ObsSpec({name: ArraySpec.from_plain(leaf) for name, leaf in plain.items()})
        if not spec.encoded or (not spec.is_dict and len(spec.leaves) > 1):
            raise ValueError(f"{list(spec.leaves)} are not the arrays of an observation")
        for name, leaf in spec.leaves.items():
            if leaf.path and leaf_name(leaf.path) != name:
                raise ValueError(f"the array {name!r} of an observation has the path {leaf.path}")
        return spec


def leaf_name(path: Iterable[str | int]) -> str:
    """Return the name of an array of a nested observation."""
    return ".".join(map(str, path))


def _entry(obs: Any, key: str | int) -> Any:
    return obs[key]


def _nested(entries: list[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Return dicts, and tuples where the keys are indices, with values at their paths."""
    if not entries[0][0]:
        return entries[0][1]
    groups: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for (first, *rest), value in entries:
        groups.setdefault(first, []).append((tuple(rest), value))
    made = {key: _nested(group) for key, group in groups.items()}
    # A Dict space may have numbers as keys, too; a Tuple has all from 0 on.
    return tuple(made.values()) if list(made) == list(range(len(made))) else made


def _cast(array: Any, leaf: ArraySpec, name: str) -> Array:
    try:
        arranged = leaf.arranged(array)
    except OutsideSpaceError as error:
        named = f"observation[{name!r}]" if name else "the observation"
        raise OutsideSpaceError(f"{named} {error}", error.row) from None
    return np.array(arranged, dtype=leaf.dtype, order="C")


@dataclasses.dataclass(frozen=True)
class ActionSpec:
    """One environment's action, and the mapping from the policy's action to it.

    The policy counts discrete choices from zero. For a Box with finite bounds it works in [-1, 1];
    its actions are clipped and mapped linearly to the bounds.
    """

    kind: Literal["discrete", "box", "multi_discrete", "multi_binary", "grouped", "hybrid"]
    shape: tuple[int, ...]
    dtype: str
    nvec: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of components of an action."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def described(self) -> str:
        """The kind of space as text; a Box with any infinite bound is unbounded."""
        if self.kind == "box":
            bounded = np.isfinite(self.low).all() and np.isfinite(self.high).all()
            return "bounded Box" if bounded else "unbounded Box"
        names = {"discrete": "Discrete", "multi_discrete": "MultiDiscrete"}
        return names.get(self.kind, "MultiBinary")

    @property
    def policy_dtype(self) -> str:
        """Dtype of an action in the policy and the buffers."""
        return "float32" if self.kind in ("box", "hybrid") else "int64"

    @functools.cached_property
    def affine(self) -> tuple[Array, Array, Array, Array]:
        """Bounds of a Box, and the center and half the range that [-1, 1] is mapped to."""
        low = np.asarray(self.low, np.float64).reshape(self.shape)
        high = np.asarray(self.high, np.float64).reshape(self.shape)
        bounded = np.isfinite(low) & np.isfinite(high)
        center, half = np.zeros_like(low), np.ones_like(low)
        center[bounded] = low[bounded] / 2 + high[bounded] / 2
        half[bounded] = high[bounded] / 2 - low[bounded] / 2
        return low, high, center, half

    @functools.cached_property
    def _offset(self) -> Array | None:
        return np.asarray(self.start).reshape(self.shape) if any(self.start) else None

    def without_choice(self, mask: Array) -> Array:
        """Return the rows of an action mask in which a component has no legal action."""
        parts = np.split(np.asarray(mask, bool), np.cumsum(self.nvec)[:-1], axis=-1)
        stuck: Array = ~np.logical_and.reduce([part.any(-1) for part in parts])
        return stuck

    def to_env(self, action: Array) -> Array:
        """Return a batch of policy actions in the environment's format."""
        if self.kind == "box":
            low, high, center, half = self.affine
            bounded: Array = np.clip(center + half * action, low, high).astype(self.dtype)
            return bounded
        if self._offset is not None:
            action = action + self._offset
        return action.astype(self.dtype, copy=False)

    def joined(self, action: Array) -> Any:
        """Return actions of :meth:`to_env`, batched or not, in the structure of their space."""
        return action

    def from_env(self, action: Any) -> Array:
        """Return a batch of the environment's actions in the policy's format.

        It is the inverse of :meth:`to_env`. Discrete choices are counted from zero. Components of a
        Box with finite bounds are mapped to [-1, 1] and clipped to it; others stay as they are.
        """
        given: Array = np.asarray(action)
        if self.kind == "box":
            low, high, center, half = self.affine
            bounded = np.isfinite(low) & np.isfinite(high)
            scaled = (given - center) / np.where(half > 0, half, 1.0)
            scaled = np.where(bounded, np.clip(scaled, -1.0, 1.0), scaled)
            policy: Array = scaled.astype(np.float32)
            return policy
        counted = given.astype(np.int64)
        return counted if self._offset is None else counted - self._offset.astype(np.int64)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> ActionSpec:
        """Return the spec of :meth:`to_plain` values; raise ValueError for other values."""
        if (groups := _plain_groups(plain)) is not None:
            return GroupedActionSpec.of({k: ActionSpec.from_plain(v) for k, v in groups.items()})
        if set(plain) == {"parts"}:
            return HybridActionSpec.of(_plain_parts(plain["parts"]))
        kind, dtype, shape = plain["kind"], plain["dtype"], _counts(plain["shape"])
        if kind not in ("discrete", "box", "multi_discrete", "multi_binary"):
            raise ValueError(f"unknown kind of actions {kind!r}")
        if not isinstance(dtype, str) or np.dtype(dtype).kind not in "iufb":
            raise ValueError(f"actions are not of {dtype!r}")
        nvec = _counts(plain["nvec"])
        start = _integers(plain["start"])
        low, high = (tuple(float(one) for one in plain[name]) for name in ("low", "high"))
        size = int(np.prod(shape, dtype=np.int64))
        choices = size if kind in ("discrete", "multi_discrete") else 0
        bounds = size if kind == "box" else 0
        sizes = (choices, choices, bounds, bounds)
        if tuple(map(len, (nvec, start, low, high))) != sizes or 0 in nvec:
            raise ValueError(f"the choices or bounds of {kind} actions do not match {shape}")
        return ActionSpec(kind, shape, dtype, nvec, start, low, high)


def _plain_groups(plain: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a grouped spec's `to_plain` holds; None for the spec of a single policy."""
    groups = plain.get("groups")
    if len(plain) != 1 or not isinstance(groups, Mapping):
        return None
    if not groups or not all(isinstance(one, Mapping) for one in groups.values()):
        raise ValueError("the groups of agents have no specs")
    return groups


@dataclasses.dataclass(frozen=True)
class GroupedObsSpec(ObsSpec):
    """Observations of several groups of agents, each with a policy of its own.

    ``leaves`` are those of all groups, named ``GROUP/NAME``.
    """

    groups: Mapping[str, ObsSpec] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(groups: Mapping[str, ObsSpec]) -> GroupedObsSpec:
        """Return the spec of these groups."""
        leaves = {
            f"{group}/{name}": leaf
            for group, spec in groups.items()
            for name, leaf in spec.leaves.items()
        }
        return GroupedObsSpec(leaves, groups)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"groups": {name: spec.to_plain() for name, spec in self.groups.items()}}


@dataclasses.dataclass(frozen=True)
class GroupedActionSpec(ActionSpec):
    """Actions of several groups of agents, each with a policy of its own."""

    groups: Mapping[str, ActionSpec] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(groups: Mapping[str, ActionSpec]) -> GroupedActionSpec:
        """Return the spec of these groups."""
        return GroupedActionSpec("grouped", (), "float64", groups=groups)

    @property
    def described(self) -> str:
        """The kinds of spaces as text."""
        each = (f"{name}: {spec.described}" for name, spec in self.groups.items())
        return ", ".join(each)

    def to_env(self, action: Any) -> Any:
        """Return the environment's actions of each group, for the policy's by group."""
        return {name: spec.to_env(action[name]) for name, spec in self.groups.items()}

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"groups": {name: spec.to_plain() for name, spec in self.groups.items()}}


@dataclasses.dataclass(frozen=True)
class HybridActionSpec(ActionSpec):
    """Actions of several spaces at once: a Dict or a Tuple, also nested.

    In the policy and the buffers they are one row of numbers, discrete choices counted from zero;
    :meth:`to_env` maps each to its space, and :meth:`joined` gives the Dict or Tuple. ``nvec`` are
    the choices of all discrete parts, in whose order an action mask marks the legal ones.
    """

    parts: tuple[tuple[tuple[str | int, ...], ActionSpec], ...] = ()
    """Keys and indices of each part, and its spec."""

    @staticmethod
    def of(parts: Iterable[tuple[tuple[str | int, ...], ActionSpec]]) -> HybridActionSpec:
        """Return the spec of these parts."""
        held = tuple(parts)
        nvec = tuple(count for _, part in held for count in part.nvec)
        size = sum(part.size for _, part in held)
        return HybridActionSpec("hybrid", (size,), "float64", nvec=nvec, parts=held)

    @property
    def described(self) -> str:
        """The kind of space as text."""
        return "hybrid"

    @functools.cached_property
    def columns(self) -> tuple[slice, ...]:
        """The numbers of each part in a row."""
        ends = np.cumsum([part.size for _, part in self.parts]).tolist()
        return tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))

    @functools.cached_property
    def choices(self) -> tuple[tuple[int, int], ...]:
        """The column of each discrete choice in a row, and its smallest value."""
        return tuple(
            (columns.start + i, first)
            for columns, (_, part) in zip(self.columns, self.parts, strict=True)
            for i, first in enumerate(part.start)
        )

    def to_env(self, action: Array) -> Array:
        """Return a batch of policy actions as rows of the environment's numbers."""
        return self._mapped(action, ActionSpec.to_env).astype(np.float64)

    def from_env(self, action: Any) -> Array:
        """Return a batch of rows of the environment's numbers in the policy's format."""
        return self._mapped(np.asarray(action), ActionSpec.from_env).astype(np.float32)

    def _mapped(self, rows: Array, convert: Callable[[ActionSpec, Array], Array]) -> Array:
        batch = rows.shape[:-1]
        found = [
            convert(part, rows[..., columns].reshape((*batch, *part.shape))).reshape((*batch, -1))
            for columns, (_, part) in zip(self.columns, self.parts, strict=True)
        ]
        return np.concatenate(found, -1)

    def joined(self, action: Array) -> Any:
        """Return rows of :meth:`to_env`, or one of them, as the Dict or Tuple of the space."""
        batch = action.shape[:-1]
        return _nested(
            [
                (path, action[..., columns].reshape((*batch, *part.shape)).astype(part.dtype)[()])
                for columns, (path, part) in zip(self.columns, self.parts, strict=True)
            ]
        )

    def row(self, action: Any) -> Array:
        """Return the row of an action of the space; the inverse of :meth:`joined`."""
        found = [functools.reduce(_entry, path, action) for path, _ in self.parts]
        return np.concatenate([np.asarray(one, np.float64).reshape(-1) for one in found])

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"parts": [[list(path), part.to_plain()] for path, part in self.parts]}


def _plain_parts(plain: Any) -> list[tuple[tuple[str | int, ...], ActionSpec]]:
    """Return what a hybrid spec's `to_plain` holds; raise ValueError for other values."""
    if not isinstance(plain, (list, tuple)) or not plain:
        raise ValueError("hybrid actions have no parts")
    parts = []
    for one in plain:
        if not isinstance(one, (list, tuple)) or len(one) != 2 or not isinstance(one[1], Mapping):
            raise ValueError(f"{one!r} is not a part of hybrid actions")
        path, spec = _path(one[0]), ActionSpec.from_plain(one[1])
        if not path or spec.kind in ("grouped", "hybrid"):
            raise ValueError(f"{one!r} is not a part of hybrid actions")
        parts.append((path, spec))
    return parts


def specs_of_groups(
    obs_spec: ObsSpec, action_spec: ActionSpec
) -> dict[str, tuple[ObsSpec, ActionSpec]]:
    """Return the specs of each group of agents; of a single policy, under the name ``""``."""
    if isinstance(obs_spec, GroupedObsSpec) and isinstance(action_spec, GroupedActionSpec):
        return {k: (spec, action_spec.groups[k]) for k, spec in obs_spec.groups.items()}
    return {"": (obs_spec, action_spec)}


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is not a list of counts")
    return tuple(value)


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(
        type(n) is int and -(2**63) <= n < 2**63 for n in value
    ):
        raise ValueError(f"{value!r} is not a list of integers")
    return tuple(value)


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(key) in (str, int) for key in value):
        raise ValueError(f"{value!r} is not a list of keys and indices")
    return tuple(value)
