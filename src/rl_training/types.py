"""The few values every layer shares. Needs NumPy alone, so environment workers stay light."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from rl_training.errors import Paused

Array: TypeAlias = npt.NDArray[Any]
Obs: TypeAlias = Array | dict[str, Array]

ACTION_MASK = "action_mask"
"""Key of a Dict observation that marks the legal actions; split off before the encoders."""


class Run(Protocol):
    """What an algorithm's knobs are checked against."""

    @property
    def num_envs(self) -> int:
        """Environments stepped side by side."""
        ...

    @property
    def normalize_reward(self) -> bool:
        """Whether rewards are scaled by running statistics."""
        ...


StopRequest: TypeAlias = Callable[[], bool]
"""Asked between steps and between updates: True means to stop there."""


def never() -> bool:
    """Never request a stop."""
    return False


Item = TypeVar("Item")


def until(stop: StopRequest, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; raise `Paused` before the next one where a stop is requested."""
    for item in items:
        if stop():
            raise Paused
        yield item


class Progress(NamedTuple):
    """How far a run is; schedules are functions of it."""

    step: int
    total: int

    @property
    def fraction(self) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, self.step / self.total) if self.total > 0 else 1.0


class Episode(NamedTuple):
    """One finished episode."""

    env: int
    ret: float
    length: int


class VectorStep(NamedTuple):
    """What one step of all environments gave, whatever the autoreset mode underneath."""

    obs: Obs
    """What the actor sees next, after a reset."""
    final_obs: Obs
    """The true successor of each action; ``obs`` itself where no episode ended."""
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    """False on a reset-only row, whose action was ignored: never learnt from, never counted."""
    episodes: tuple[Episode, ...]

    @property
    def cut(self) -> Array:
        """Where what comes next has nothing to do with what was: an episode ended, or is reset."""
        cut: Array = self.terminated | self.truncated | ~self.valid
        return cut


class EnvInfo(NamedTuple):
    """What a learner may know of where experience comes from."""

    obs_spec: ObsSpec
    action_spec: ActionSpec
    num_envs: int
    """Rows of every step."""
    frame_stack: int = 1
    """Images that an observation stacks; each one repeats all but the oldest of the last."""
    has_invalid_rows: bool = False
    """Whether rows may be reset-only (``valid`` False)."""
    device: str = "cpu"
    """Where the experience is produced."""


class Remembered(NamedTuple):
    """Observations, and what a recurrent network remembered before it saw them."""

    obs: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and storage dtype of one array; images are stored channel first."""

    shape: tuple[int, ...]
    dtype: str
    given: tuple[int, ...] = ()
    """An image's shape as the environment gives it, where that is another; see `arranged`."""

    @property
    def is_image(self) -> bool:
        """Whether this is pixels."""
        return len(self.shape) == 3 and self.dtype == "uint8"

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def given_shape(self) -> tuple[int, ...]:
        """Shape of one array as it comes from the environment."""
        return self.given or self.shape

    def arranged(self, given: Any) -> Array:
        """A view of what the environment gave, batched or not, in the shape of storage.

        (height, width) gets a channel; channels that come last go first; a stack of images,
        (images, height, width, channels), becomes one image of all their channels.
        """
        array: Array = np.asarray(given)
        if not self.given:
            return array
        batch = array.shape[: array.ndim - len(self.given)]
        if self.given[-3:-1] == self.shape[1:]:
            array = np.moveaxis(array, -1, -3)
        return array.reshape(*batch, *self.shape)

    def to_plain(self) -> list[Any]:
        """Plain values, for a checkpoint."""
        plain = [list(self.shape), self.dtype]
        return [*plain, list(self.given)] if self.given else plain

    @staticmethod
    def from_plain(plain: Any) -> ArraySpec:
        """The inverse of :meth:`to_plain`; raises ValueError for anything else."""
        shape, dtype, *given = plain
        if not isinstance(dtype, str) or dtype not in ("float32", "uint8", "bool"):
            raise ValueError(f"observations are not stored as {dtype!r}")
        return ArraySpec(_counts(shape), dtype, *(_counts(one) for one in given))


@dataclasses.dataclass(frozen=True)
class ObsSpec:
    """One environment's observation: a single array (key ``""``) or a dict of arrays."""

    leaves: Mapping[str, ArraySpec]

    @property
    def is_dict(self) -> bool:
        """Whether an observation is a dict."""
        return "" not in self.leaves

    @property
    def encoded(self) -> dict[str, ArraySpec]:
        """The leaves an encoder sees: all but the action mask."""
        return {key: leaf for key, leaf in self.leaves.items() if key != ACTION_MASK}

    @property
    def has_mask(self) -> bool:
        """Whether an observation holds an action mask."""
        return ACTION_MASK in self.leaves

    @property
    def has_images(self) -> bool:
        """Whether an observation holds pixels."""
        return any(leaf.is_image for leaf in self.encoded.values())

    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Shapes, as a buffer wants them."""
        if self.is_dict:
            return {key: leaf.shape for key, leaf in self.leaves.items()}
        return self.leaves[""].shape

    def cast(self, obs: Any) -> Obs:
        """A fresh copy of ``obs`` in the dtypes and shapes of storage."""
        if self.is_dict:
            return {k: _cast(obs[k], leaf) for k, leaf in self.leaves.items()}
        return _cast(obs, self.leaves[""])

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {k: leaf.to_plain() for k, leaf in self.leaves.items()}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> ObsSpec:
        """The inverse of :meth:`to_plain`."""
        return ObsSpec({k: ArraySpec.from_plain(leaf) for k, leaf in plain.items()})


def _cast(array: Any, leaf: ArraySpec) -> Array:
    return np.array(leaf.arranged(array), dtype=leaf.dtype, order="C")


@dataclasses.dataclass(frozen=True)
class ActionSpec:
    """One environment's action, and how the policy's own numbers become it.

    The policy counts discrete choices from zero; for a Box with finite bounds it works in
    [-1, 1] and the affine map to the bounds is applied here, after clipping.
    """

    kind: Literal["discrete", "box", "multi_discrete", "multi_binary"]
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
        """What a user calls this kind of space; a Box that is open anywhere is unbounded."""
        if self.kind == "box":
            bounded = np.isfinite(self.low).all() and np.isfinite(self.high).all()
            return "bounded Box" if bounded else "unbounded Box"
        names = {"discrete": "Discrete", "multi_discrete": "MultiDiscrete"}
        return names.get(self.kind, "MultiBinary")

    @property
    def policy_dtype(self) -> str:
        """Dtype of an action as the policy and the buffers hold it."""
        return "float32" if self.kind == "box" else "int64"

    @functools.cached_property
    def _affine(self) -> tuple[Array, Array, Array, Array]:
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
        """Rows of an action mask that leave a component nothing to choose from."""
        parts = np.split(np.asarray(mask, bool), np.cumsum(self.nvec)[:-1], axis=-1)
        stuck: Array = ~np.logical_and.reduce([part.any(-1) for part in parts])
        return stuck

    def to_env(self, action: Array) -> Array:
        """Turn a batch of policy actions into what the environment takes."""
        if self.kind == "box":
            low, high, center, half = self._affine
            bounded: Array = np.clip(center + half * action, low, high).astype(self.dtype)
            return bounded
        if self._offset is not None:
            action = action + self._offset
        return action.astype(self.dtype, copy=False)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> ActionSpec:
        """The inverse of :meth:`to_plain`; raises ValueError for anything else."""
        kind, dtype, shape = plain["kind"], plain["dtype"], _counts(plain["shape"])
        if kind not in ("discrete", "box", "multi_discrete", "multi_binary"):
            raise ValueError(f"there are no {kind!r} actions")
        if not isinstance(dtype, str) or np.dtype(dtype).kind not in "iufb":
            raise ValueError(f"actions are not of {dtype!r}")
        nvec = _counts(plain["nvec"])
        start = tuple(int(one) for one in plain["start"])
        low, high = (tuple(float(one) for one in plain[name]) for name in ("low", "high"))
        size = int(np.prod(shape, dtype=np.int64))
        choices = size if kind in ("discrete", "multi_discrete") else 0
        bounds = size if kind == "box" else 0
        sizes = (choices, choices, bounds, bounds)
        if tuple(map(len, (nvec, start, low, high))) != sizes or 0 in nvec:
            raise ValueError(f"the choices or bounds of {kind} actions do not fit {shape}")
        return ActionSpec(kind, shape, dtype, nvec, start, low, high)


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is not a list of counts")
    return tuple(value)
