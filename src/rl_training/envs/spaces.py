"""Gymnasium spaces to plain specs; what cannot be learnt from is refused here, by name."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from rl_training.errors import ConfigError
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, ObsSpec


def obs_spec(space: spaces.Space[object], action: ActionSpec) -> ObsSpec:
    """Describe an observation space: Box, or Dict of Box (with an optional action mask)."""
    if isinstance(space, spaces.Box):
        return ObsSpec({"": _box_leaf(space)})
    if isinstance(space, spaces.Dict):
        leaves = {}
        for key, leaf in space.spaces.items():
            if key == ACTION_MASK:
                leaves[key] = _mask_leaf(leaf, action)
            elif isinstance(leaf, spaces.Box):
                leaves[key] = _box_leaf(leaf)
            else:
                raise _refused(space, f"its entry {key!r} is {leaf}")
        if not any(key != ACTION_MASK for key in leaves):
            raise _refused(space, "it holds nothing to observe")
        return ObsSpec(leaves)
    raise _refused(space, "")


def _refused(space: spaces.Space[object], why: str) -> ConfigError:
    reason = f" ({why})" if why else ""
    return ConfigError(
        f"observation space {space} is not supported{reason}: Box and Dict of Box are. "
        "A wrapper can convert it, for instance "
        "wrappers: ['gymnasium.wrappers:FlattenObservation']"
    )


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


def _mask_leaf(space: spaces.Space[object], action: ActionSpec) -> ArraySpec:
    if action.kind not in ("discrete", "multi_discrete"):
        raise ConfigError(
            f"'{ACTION_MASK}' goes with Discrete and MultiDiscrete actions, not {action.kind}"
        )
    wanted = (sum(action.nvec),)
    if tuple(space.shape or ()) != wanted:
        raise ConfigError(f"'{ACTION_MASK}' must have shape {wanted}; it has {space.shape}")
    return ArraySpec(wanted, "bool")


def action_spec(space: spaces.Space[object]) -> ActionSpec:
    """Describe an action space: Discrete, Box, MultiDiscrete or MultiBinary."""
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
        "MultiBinary are"
    )
