"""Gymnasium spaces to plain specs; what cannot be learnt from is refused here, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.hybrid_actions import HybridActions, HybridSpace
from rl_training.errors import ConfigError
from rl_training.types import (
    ACTION_MASK,
    ActionSpec,
    ArraySpec,
    HybridActionSpec,
    ObsSpec,
    leaf_name,
)

SMALLEST_IMAGE = 36
"""Height and width, in pixels, from which on images can be given to the convolutional network."""
_Path = tuple[str | int, ...]
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def obs_spec(space: spaces.Space[Any], action: ActionSpec) -> ObsSpec:
    """Describe an observation space, whose arrays may be nested in Dict and Tuple spaces.

    A Dict may contain an action mask. Raises `ConfigError` for what is not supported.
    """
    leaves: dict[str, ArraySpec] = {}
    for path, leaf in observed(space):
        name = leaf_name(path)
        if path == (ACTION_MASK,):
            leaves[name] = _mask_leaf(leaf, action)
            continue
        if ACTION_MASK in path:
            raise _refused(space, f"{name!r}: an action mask must be one array at the top level")
        if name in leaves or (path and not name):
            raise _refused(space, f"it has no unique name for its entry {list(path)}")
        leaves[name] = dataclasses.replace(_array(leaf), path=() if path in ((name,), ()) else path)
    if not any(key != ACTION_MASK for key in leaves):
        raise _refused(space, "it contains nothing to observe")
    return ObsSpec(leaves)


def observed(space: spaces.Space[Any]) -> list[tuple[_Path, spaces.Space[Any]]]:
    """Return the spaces of the arrays in an observation, each with its keys and indices.

    Raises `ConfigError` for spaces that no algorithm can learn from.
    """
    found = list(_leaves(space, ()))
    for path, leaf in found:
        if not isinstance(leaf, _ARRAYS):
            raise _not_an_array(space, path, leaf)
        if not all(isinstance(key, (str, int)) for key in path):
            raise _refused(space, f"a key of {list(path)} is neither text nor a number")
    return found


def _leaves(space: spaces.Space[Any], path: _Path) -> Iterator[tuple[_Path, spaces.Space[Any]]]:
    entries = _entries(space)
    if not entries:  # an array, or what cannot be learnt from, such as an empty Dict
        yield path, space
    for key, entry in entries.items():
        yield from _leaves(entry, (*path, key))


def _entries(space: spaces.Space[Any]) -> dict[str | int, spaces.Space[Any]]:
    if isinstance(space, spaces.Tuple):
        return dict(enumerate(space.spaces))
    return {key: space[key] for key in space} if isinstance(space, spaces.Dict) else {}


def _refused(space: spaces.Space[Any], why: str, hint: str = "") -> ConfigError:
    return ConfigError(f"observation space {space} is not supported ({why}){hint}")


def _not_an_array(space: spaces.Space[Any], path: _Path, leaf: spaces.Space[Any]) -> ConfigError:
    """The refusal of a text, a graph or another space whose values are not arrays."""
    if isinstance(leaf, (spaces.Dict, spaces.Tuple)):
        return _refused(space, f"{_named(path)} contains nothing to observe")
    kept = [
        key
        for key, entry in _entries(space).items()
        if all(isinstance(one, _ARRAYS) for _, one in _leaves(entry, ()))
    ]
    why = f"{_named(path)} is {type(leaf).__name__}, which is not an array of numbers"
    if not kept or kept == [ACTION_MASK]:
        return _refused(space, why, ": convert it with a wrapper (gymnasium.ObservationWrapper)")
    wrapper = f"{{path: 'gymnasium.wrappers:FilterObservation', kwargs: {{filter_keys: {kept}}}}}"
    kept_spaces = [entry for key, entry in _entries(space).items() if key in kept]
    if any(_is_small_image(one) for entry in kept_spaces for _, one in _leaves(entry, ())):
        wrapper += ", 'gymnasium.wrappers:FlattenObservation'"  # convolutions need larger images
    return _refused(space, why, f". To leave it out, set wrappers: [{wrapper}]")


def _is_small_image(space: spaces.Space[Any]) -> bool:
    leaf = _array(space)
    return leaf.is_image and min(leaf.shape[1:]) < SMALLEST_IMAGE


def _named(path: _Path) -> str:
    return f"its entry {leaf_name(path)!r}" if path else "it"


def _array(space: spaces.Space[Any]) -> ArraySpec:
    """How one array of an observation is stored."""
    if isinstance(space, spaces.Discrete):
        return ArraySpec((int(space.n),), "float32", (), (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = (tuple(int(n) for n in v.reshape(-1)) for v in (space.nvec, space.start))
        return ArraySpec((sum(nvec),), "float32", tuple(space.shape), nvec, start)
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(tuple(space.shape), "float32")
    return _box_leaf(cast("spaces.Box", space))


def _box_leaf(space: spaces.Box) -> ArraySpec:
    """Pixels stay uint8 until the network; most other numbers are stored as float32."""
    shape = tuple(space.shape)
    if space.dtype != np.uint8:
        return ArraySpec(shape, "float32")
    if len(shape) < 2:
        return ArraySpec(shape, "uint8")
    if len(shape) > 4 or not ((space.low == 0).all() and (space.high == 255).all()):
        return ArraySpec(shape, "float32")  # a board, say: numbers that are no brightness
    return _image_leaf(shape)


def _image_leaf(shape: tuple[int, ...]) -> ArraySpec:
    """(height, width), with channels first or last (the smallest is), or a stack of those."""
    if len(shape) == 2:
        return ArraySpec((1, *shape), "uint8", given=shape)
    *stack, first, middle, last = shape
    channels_last = last < min(first, middle)
    channels, *size = (last, first, middle) if channels_last else (first, middle, last)
    stored = (int(np.prod(stack, dtype=np.int64)) * channels, *size)
    return ArraySpec(stored, "uint8", given=() if stored == shape else shape)


def _mask_leaf(space: spaces.Space[Any], action: ActionSpec) -> ArraySpec:
    if not action.nvec:
        raise ConfigError(
            f"'{ACTION_MASK}' goes with Discrete and MultiDiscrete actions, not {action.kind}"
        )
    wanted = (sum(action.nvec),)
    if tuple(space.shape or ()) != wanted:
        raise ConfigError(f"'{ACTION_MASK}' must have shape {wanted}; it has {space.shape}")
    return ArraySpec(wanted, "bool")


def action_spec(space: spaces.Space[Any]) -> ActionSpec:
    """Describe an action space: Discrete, Box, MultiDiscrete, MultiBinary, or several of them.

    Dict and Tuple spaces are those of environments that `with_rows_of_actions` returned.
    """
    if isinstance(space, HybridSpace):
        return space.spec
    dtype = str(space.dtype)
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", (), dtype, nvec=(int(space.n),), start=(int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        return ActionSpec(
            "multi_discrete",
            tuple(space.shape),
            dtype,
            nvec=tuple(int(n) for n in space.nvec.reshape(-1)),
            start=tuple(int(n) for n in space.start.reshape(-1)),
        )
    if isinstance(space, spaces.MultiBinary):
        return ActionSpec("multi_binary", tuple(space.shape), dtype)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return ActionSpec(
            "box",
            tuple(space.shape),
            dtype,
            low=tuple(float(x) for x in space.low.reshape(-1)),
            high=tuple(float(x) for x in space.high.reshape(-1)),
        )
    raise ConfigError(
        f"action space {space} is not supported: Discrete, Box (of floats), MultiDiscrete and "
        "MultiBinary are, and a Dict or Tuple of them in environments of one agent"
    )


def with_rows_of_actions(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return the environment with rows of numbers as actions, where they are a Dict or Tuple."""
    space = env.action_space
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return env
    leaves = list(_leaves(space, ()))
    for path, leaf in leaves:
        named = f"its entry {leaf_name(path)!r}"
        if isinstance(leaf, (spaces.Dict, spaces.Tuple)):
            raise ConfigError(f"action space {space} is not supported ({named} is empty)")
        if not all(isinstance(key, (str, int)) for key in path):
            raise ConfigError(f"action space {space} is not supported (a key is no text or number)")
    return HybridActions(env, HybridActionSpec.of((path, action_spec(one)) for path, one in leaves))
