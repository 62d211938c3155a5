"""Inputs and outputs of an exported policy: names, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_training.errors import ConfigError
from rl_training.types import (
    ActionSpec,
    Array,
    ArraySpec,
    HybridActionSpec,
    ObsSpec,
    leaf_name,
)

OBSERVATION, STATE, EPISODE_START, NOISE = "observation", "state", "episode_start", "noise"
ACTION, NEXT_STATE = "action", "next_state"
BATCH = "batch"


@dataclasses.dataclass(frozen=True)
class Port:
    """One input or output; its first dimension, that of the batch, is left out of ``shape``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    about: str
    leaf: str | None = None
    """Name in the `ObsSpec`, of an array of the observation."""
    path: tuple[str | int, ...] = ()
    """Keys and indices that lead to it in the environment's observation or action."""
    distribution: str | None = None
    """Distribution of random numbers, of an input that takes them."""

    def described(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        plain = {"name": self.name, "dtype": self.dtype, "shape": [BATCH, *self.shape]}
        path = {"path": list(self.path)} if self.leaf is not None or self.path else {}
        drawn = {"distribution": self.distribution} if self.distribution is not None else {}
        return {**plain, **path, **drawn, "about": self.about}


@dataclasses.dataclass(frozen=True)
class Noise:
    """Random numbers from which actions are sampled; they are an input of the file."""

    source: str
    """"uniform" in [0, 1), or "normal": standard normal."""
    shape: tuple[int, ...]
    """Shape for one observation."""
    epsilon: float | None = None
    """Probability of a random action, of an epsilon-greedy policy."""
    name: str = NOISE
    """Name of the input."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """What an exported policy takes and returns."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def given(
        self,
        parts: Mapping[str, Array],
        state: Array | None = None,
        episode_start: Array | None = None,
        noise: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Return the inputs for a batch, from its arrays as the environment returned them."""
        others = {STATE: state, EPISODE_START: episode_start, **(noise or {})}
        arrays = {
            port.name: others[port.name] if port.leaf is None else parts[port.leaf]
            for port in self.inputs
        }
        return {
            port.name: np.ascontiguousarray(arrays[port.name], dtype=port.dtype)
            for port in self.inputs
        }

    def returned(self, action: Any, state: Array | None) -> dict[str, Array]:
        """Return the outputs for what `predict` returns."""
        named = {port.name: port.path for port in self.outputs if port.name != NEXT_STATE}
        found: dict[str, Any] = {
            name: functools.reduce(_entry, path, action) for name, path in named.items()
        }
        return found if state is None else {**found, NEXT_STATE: state}


def _entry(action: Any, key: str | int) -> Any:
    return action[key]


def action_parts(spec: ActionSpec) -> tuple[tuple[tuple[str | int, ...], ActionSpec], ...]:
    """Return keys and spec of each array of an action; a plain action is one, without keys."""
    return spec.parts if isinstance(spec, HybridActionSpec) else (((), spec),)


def part_name(kind: str, path: tuple[str | int, ...]) -> str:
    """Return the name of what belongs to one array of an action."""
    return f"{kind}.{leaf_name(path)}" if path else kind


def make_signature(
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    state_size: int | None,
    noises: tuple[Noise, ...],
) -> Signature:
    """Return the signature of a policy; ``state_size`` None: it has no memory."""
    inputs = [_observation(name, leaf, obs_spec) for name, leaf in obs_spec.leaves.items()]
    action = "the action, in the environment's format"
    outputs = [
        Port(part_name(ACTION, path), spec.dtype, spec.shape, action, path=path)
        for path, spec in action_parts(action_spec)
    ]
    if len({port.name for port in outputs}) < len(outputs):
        raise ConfigError(
            "the keys of the action space give two outputs the same name:"
            f" {', '.join(port.name for port in outputs)}"
        )
    if state_size is not None:
        before = "the last next_state of this row; zeros before the first step"
        start = "true where this observation is the first of an episode: the state is then reset"
        after = "the state to pass with the next observation of this row"
        inputs += [
            Port(STATE, "float32", (state_size,), before),
            Port(EPISODE_START, "bool", (), start),
        ]
        outputs.append(Port(NEXT_STATE, "float32", (state_size,), after))
    for noise in noises:
        kind = {"uniform": "uniform in [0, 1)", "normal": "standard normal"}[noise.source]
        drawn = f"independent random numbers, {kind}, drawn anew for every call"
        inputs.append(Port(noise.name, "float32", noise.shape, drawn, distribution=noise.source))
    return Signature(tuple(inputs), tuple(outputs))


def _observation(name: str, leaf: ArraySpec, spec: ObsSpec) -> Port:
    port_name = f"{OBSERVATION}.{name}" if name else OBSERVATION
    dtype = "int64" if leaf.nvec else leaf.dtype
    about = "as the environment returns it"
    if leaf.nvec:
        lowest = leaf.start
        highest = [low + count - 1 for low, count in zip(lowest, leaf.nvec, strict=True)]
        about += f", within {list(lowest)} to {highest}"
    elif leaf.is_image:
        about += ": bytes, scaled inside the file"
    elif leaf.dtype == "bool":
        about += ": true for each action that is allowed, at least one of each component"
    return Port(port_name, dtype, leaf.given_shape, about, name, spec.path(name))
