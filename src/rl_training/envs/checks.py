"""What an environment must return, and errors that name the environment where it does not."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import EnvironmentFailure
from rl_training.types import Array

_SHOWN = 80
"""Most characters of a value that are quoted in a message."""
_ARRAY_SPACES = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete, spaces.Discrete)
_STEP_RESULT = "(observation, reward, terminated, truncated, info)"
_RESET_RESULT = "(observation, info)"
_OLD_STEP = " (old Gym interface: replace done by terminated and truncated)"
_OLD_RESET = " (old Gym interface: reset returned the observation alone)"
_GYMNASIUM = Path(str(gym.__file__)).parent
_NOT_THE_USERS = tuple(
    str(path)
    for path in (
        Path(__file__).parent,
        *(_GYMNASIUM / part for part in ("core.py", "wrappers", "vector")),
        _GYMNASIUM / "envs" / "registration.py",
    )
)
"""Code whose frames do not help the author of an environment."""


class WrongResult(Exception):  # noqa: N818 - never leaves this package: it becomes a failure
    """What an environment returned is not what its interface or its spaces promise."""


class ArrayForm(NamedTuple):
    """Shape and dtype of one array that an environment returns."""

    name: str
    """What it is called in messages."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def fitted(self, value: Any) -> Any:
        """Return ``value``, converted to the dtype where a vector would refuse it as it is.

        Raises `WrongResult` unless it fits.
        """
        if type(value) is np.ndarray and value.shape == self.shape and value.dtype is self.dtype:
            return value
        try:
            array: Array = np.asarray(value)
        except Exception:  # noqa: BLE001 - a ragged list, or an object that cannot be converted
            raise WrongResult(f"{self._expected()}; got {described(value)}") from None
        if array.shape != self.shape or array.dtype.kind not in "biuf":
            raise WrongResult(f"{self._expected()}; got {described(value)}")
        if array.dtype.kind == "f" and self.dtype.kind != "f":
            # NumPy would cut fractions off silently.
            with np.errstate(invalid="ignore"):
                changed = array != array.astype(self.dtype)
            if changed.any():
                raise WrongResult(
                    f"{self._expected()}; got {described(value)}, and {array[changed].flat[0]}"
                    f" cannot be stored as {self.dtype}"
                )
        can_be_stored = np.can_cast(array.dtype, self.dtype, "same_kind")
        return value if can_be_stored else array.astype(self.dtype)

    def _expected(self) -> str:
        return f"{self.name} must be an array of shape {self.shape}, dtype {self.dtype}"


class ObsForm:
    """What the observations of one space look like, nested ones too."""

    def __init__(
        self,
        space: spaces.Space[Any],
        name: str = "the observation",
        names: Mapping[Any, str] | None = None,
    ) -> None:
        """``names`` replaces the names of entries of a Dict in messages."""
        self.float_shape: tuple[int, ...] | None = None
        """Shape of an observation that is one array of floats."""
        self.float_dtype: np.dtype[Any] | None = None
        """Its dtype: an array of this shape and dtype needs no further check."""
        self._name = name
        self._single: ArrayForm | None = None
        self._entries: dict[Any, ObsForm] = {}
        self._is_tuple = isinstance(space, spaces.Tuple)
        if isinstance(space, _ARRAY_SPACES):
            self._single = _form_of(name, space)
            if self._single.dtype.kind == "f":
                self.float_shape, self.float_dtype = self._single.shape, self._single.dtype
        elif isinstance(space, (spaces.Dict, spaces.Tuple)):
            inner = name.removeprefix("the ")
            entries = space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            self._entries = {
                key: ObsForm(entry, (names or {}).get(key, f"{inner}[{key!r}]"))
                for key, entry in entries
            }

    def fitted(self, obs: Any) -> Any:
        """Return ``obs`` in dtypes that a vector can store; raise `WrongResult` unless it fits."""
        if self._single is not None:
            return self._single.fitted(obs)
        if self._is_tuple:
            return self._fitted_tuple(obs)
        return self._fitted_dict(obs) if self._entries else obs

    def _fitted_tuple(self, obs: Any) -> Any:
        if not isinstance(obs, (tuple, list)) or len(obs) != len(self._entries):
            wanted = f"a tuple of {len(self._entries)}"
            raise WrongResult(f"{self._name} must be {wanted}; got {described(obs)}")
        return tuple(form.fitted(obs[i]) for i, form in self._entries.items())

    def _fitted_dict(self, obs: Any) -> Any:
        if not isinstance(obs, Mapping):
            wanted = f"a dict with the keys {', '.join(map(repr, self._entries))}"
            raise WrongResult(f"{self._name} must be {wanted}; got {described(obs)}")
        for key in self._entries:
            if key not in obs:
                present = ", ".join(map(repr, obs)) or "none"
                raise WrongResult(f"{self._name} has no key {key!r}; its keys: {present}")
        return {key: form.fitted(obs[key]) for key, form in self._entries.items()}


def _form_of(name: str, space: spaces.Space[Any]) -> ArrayForm:
    return ArrayForm(name, tuple(space.shape or ()), np.dtype(space.dtype))


def number(reward: Any) -> Any:
    """A reward that is a single number, or `WrongResult`."""
    if isinstance(reward, (float, int, np.floating, np.integer)):
        return reward
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise WrongResult(f"the reward must be a number; got {described(reward)}")
    return array.reshape(())[()]


def flags(terminated: Any, truncated: Any) -> tuple[bool, bool]:
    """``terminated`` and ``truncated`` as bools, or `WrongResult`."""
    if type(terminated) is bool and type(truncated) is bool:
        return terminated, truncated
    return _flag("terminated", terminated), _flag("truncated", truncated)


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise WrongResult(f"{name} must be True or False; got {described(value)}")
    return bool(array.reshape(())[()])


def check_info(info: Any) -> None:
    """Raise `WrongResult` unless ``info`` is a dict."""
    if not isinstance(info, dict):
        raise WrongResult(f"info must be a dict; got {described(info)}")


def unpacked_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """Observation and info of a reset, or `WrongResult`."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        old = "" if isinstance(result, tuple) or result is None else _OLD_RESET
        raise WrongResult(f"reset must return {_RESET_RESULT}; got {_counted(result)}{old}")
    obs, info = result
    check_info(info)
    return obs, info


def check_step_result(result: Any) -> None:
    """Raise `WrongResult` unless a step's result can be unpacked into five values."""
    if not isinstance(result, (tuple, list)) or len(result) != 5:
        is_old = isinstance(result, tuple) and len(result) == 4
        raise WrongResult(
            f"step must return 5 values, {_STEP_RESULT}; got {_counted(result)}"
            f"{_OLD_STEP if is_old else ''}"
        )


def _counted(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        kinds = ", ".join(type(value).__name__ for value in result[:8])
        return f"{len(result)} values ({kinds})"
    return described(result)


def described(value: Any) -> str:
    """A value in few words, for a message."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}, dtype {value.dtype}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - the value is somebody else's
        text = "(its repr raises)"
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}..."
    return f"{text} ({type(value).__name__})"


def failure(
    index: int, doing: str, error: BaseException, note: str = "", name: str = ""
) -> EnvironmentFailure:
    """Return the error of environment ``index``, which failed while ``doing`` something.

    The message ends with those lines of the traceback that are the environment's own, if any.
    """
    which = f"environment {index} ({name})" if name else f"environment {index}"
    if isinstance(error, WrongResult):
        return EnvironmentFailure(f"{which} {doing}: {error}{note}")
    trace = _own_traceback(error)
    return EnvironmentFailure(
        f"{which} {doing}: {summary(error)}{note}" + (f"\n{trace}" if trace else "")
    )


def name_of(env: Any) -> str:
    """Return the id of an environment, or the name of its class where it was not registered."""
    base = getattr(env, "unwrapped", env)
    spec = getattr(base, "spec", None)
    return str(spec.id) if spec is not None else type(base).__name__


def name_of_function(make: Any) -> str:
    """Return what the environments of an ``env_fn`` are called before one was made."""
    function = getattr(make, "func", make)  # of a functools.partial
    name = str(getattr(function, "__qualname__", type(function).__name__)).rpartition(".")[2]
    return name if name.isidentifier() else "env_fn"


def summary(error: BaseException) -> str:
    """An exception in one line, with the place that raised it where it has no message."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)})"
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception of somebody else's
        text = ""
    name = type(error).__name__
    if text:
        return f"{name}: {text}"
    where = users_place(error) or _place(traceback.extract_tb(error.__traceback__))
    return f"{name} {where}".rstrip()


def users_place(error: BaseException) -> str:
    """Return the place in the environment's own code that raised; empty if it is elsewhere."""
    frames = _users(traceback.extract_tb(error.__traceback__))
    return _place([frame for frame in frames if not frame.filename.startswith(str(_GYMNASIUM))])


def _place(frames: list[traceback.FrameSummary]) -> str:
    if not frames:
        return ""
    last = frames[-1]
    return f"in {last.filename}, line {last.lineno}: {last.line or last.name}"


def _users(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that belong neither to Gymnasium's wrappers nor to this package."""
    return [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]


def _own_traceback(error: BaseException) -> str:
    """The traceback of an exception with the environment's own frames alone; empty without any."""
    described_error = traceback.TracebackException.from_exception(error)
    if not _users(described_error.stack):
        return ""
    parts: list[traceback.TracebackException | None] = [described_error]
    while parts:
        part = parts.pop()
        if part is not None:
            part.stack = traceback.StackSummary.from_list(_users(part.stack) or part.stack)
            parts += [part.__cause__, part.__context__]
    return "".join(described_error.format()).rstrip()


def misunderstanding(error: BaseException, doing: str) -> WrongResult | None:
    """Return what is wrong with an environment of the old interface, where ``error`` shows it.

    A wrapper that unpacks a result raises a ValueError; ``reset(self)`` takes no seed.
    """
    text = str(error)
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        if doing == "reset" and ("'seed'" in text or "'options'" in text):
            return WrongResult(
                "reset must accept seed and options, as in def reset(self, *, seed=None,"
                f" options=None); got TypeError: {text}"
            )
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, ValueError) or "to unpack" not in text or _users(frames[-1:]):
        return None
    wanted = f"5 values, {_STEP_RESULT}" if doing == "step" else _RESET_RESULT
    return WrongResult(f"{doing} must return {wanted}; got another number of values ({text})")


def step_note(action: Any) -> str:
    """Return what else may explain that a step failed: an action that is not finite."""
    array = np.asarray(action)
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return ""
    return f" (its action was {described(action.tolist())}: training has diverged)"
