"""Comparison of an exported policy with `predict`, row by row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_training.errors import ParityError
from rl_training.export.module import PolicyModule, copied_to_cpu
from rl_training.export.observations import Observations
from rl_training.export.signature import NEXT_STATE, Noise, action_parts
from rl_training.runtime.actors import BLOCK, NoiseBlock
from rl_training.runtime.policy import TrainedPolicy
from rl_training.seeding import torch_stream
from rl_training.types import ActionSpec, Array

BATCH_SIZES = (1, 7, 64)
TOLERANCE = 1e-5
"""Largest accepted difference, relative to the range of an action."""
_MOST_ROUNDING = 1e-3
"""A larger difference is no matter of rounding."""
_STATE_TOLERANCES = 10
"""The memory may differ by so many tolerances: its rounding matters only where actions differ."""

Run = Callable[[dict[str, Array]], dict[str, Array]]
"""Runs an exported policy: inputs by name to outputs by name."""


@dataclasses.dataclass
class Parity:
    """What the comparison found; the differences are relative ones."""

    origin: str
    observations: int
    episode_starts: int
    tolerance: float
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    largest_difference: float = 0.0
    """Of Box actions, relative to their range; 0 for others."""
    ties: int = 0
    """Discrete choices that differ, between scores that are equal within the tolerance."""
    largest_state_difference: float = 0.0

    def in_words(self) -> str:
        """Return the result in one line."""
        sizes = ", ".join(map(str, self.batch_sizes))
        return (
            f"agrees with predict on {self.observations} observations in batches of {sizes}:"
            f" largest difference {max(self.largest_difference, self.largest_state_difference):.2g}"
            f" (tolerance {self.tolerance:g}), {self.ties} ties; {self.origin}"
        )

    def described(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        return dataclasses.asdict(self)


def compare(
    policy: TrainedPolicy,
    module: PolicyModule,
    run: Run,
    seen: Observations,
    *,
    tolerance: float = TOLERANCE,
    name: str = "the export",
) -> Parity:
    """Compare ``run`` with ``policy.predict`` on all observations, in batches of several sizes.

    ``module`` is the policy as a torch module; it is asked for the scores of discrete choices that
    differ. Raises `ParityError` where a difference is larger than the tolerance.
    """
    # A copy: sampling advances a random generator.
    reference = _Reference(copied_to_cpu(policy), module)
    found = Parity(seen.origin, len(seen), int(seen.starts.sum()), tolerance)
    has_memory = hasattr(module.model, "state_size")
    states = np.zeros((len(seen), module.model.state_size if has_memory else 0), np.float32)
    for size in BATCH_SIZES:
        for first in range(0, len(seen), size):
            rows = slice(first, min(first + size, len(seen)))
            state = states[rows] if has_memory else None
            starts = seen.starts[rows] if has_memory else None
            parts = seen.rows(rows)
            noise, expected = reference.predict(parts, state, starts)
            inputs = module.signature.given(parts, state, starts, noise)
            where = _Place(name, rows.stop - rows.start, first)
            _check(found, module, policy.action_spec, inputs, expected, run(inputs), where)
            if has_memory and size == 1 and rows.stop < len(seen):
                states[rows.stop] = expected[NEXT_STATE][0]
    return found


class _Place(NamedTuple):
    """A batch of the comparison, for errors."""

    name: str
    size: int
    first: int
    """Number of its first observation."""

    def of(self, row: int) -> str:
        """Return the place of a row in words."""
        return f"{self.name}, batch size {self.size}, observation {self.first + row}"


class _Reference:
    """Calls `predict`, and draws the same random numbers as it does."""

    def __init__(self, policy: TrainedPolicy, module: PolicyModule) -> None:
        self._policy = policy
        self._module = module
        self._generator = torch_stream(policy.config.seed, "prediction")
        self._blocks = {
            noise.name: NoiseBlock(BLOCK, self._generator, functools.partial(self._draw, noise))
            for noise in module.noises
            if noise.epsilon is not None
        }

    @staticmethod
    def _draw(noise: Noise, shape: tuple[int, ...], generator: torch.Generator) -> Array:
        draw = torch.rand if noise.source == "uniform" else torch.randn
        drawn: Array = draw((*shape, *noise.shape), generator=generator).numpy()
        return drawn

    def predict(
        self, parts: dict[str, Array], state: Array | None, starts: Array | None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the random numbers of the next call, and what `predict` returns."""
        rows = len(next(iter(parts.values())))
        noise = {
            one.name: self._blocks[one.name].take(rows)
            if one.name in self._blocks
            else self._draw(one, (rows,), self._generator)
            for one in self._module.noises
        }
        obs = self._policy.acting_spec.joined(parts)
        action, after = self._policy.predict(obs, state, starts, deterministic=not noise)
        return noise, self._module.signature.returned(action, after)


def _check(
    found: Parity,
    module: PolicyModule,
    spec: ActionSpec,
    inputs: dict[str, Array],
    expected: dict[str, Array],
    outputs: dict[str, Array],
    where: _Place,
) -> None:
    for port in module.signature.outputs:
        want, got = expected[port.name], outputs[port.name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ParityError(
                f"{where.of(0)}: {port.name} is {got.dtype} of shape {got.shape}, but that of"
                f" predict is {want.dtype} of shape {want.shape}"
            )
    if NEXT_STATE in expected:
        want, got = expected[NEXT_STATE], outputs[NEXT_STATE]
        difference = np.abs(got - want) / np.maximum(1.0, np.abs(want))
        accepted = _STATE_TOLERANCES * found.tolerance
        _require(difference, difference <= accepted, accepted, NEXT_STATE, where)
        largest = max(found.largest_state_difference, float(difference.max()))
        found.largest_state_difference = largest
    for number, (_, part) in enumerate(action_parts(spec)):
        name = module.signature.outputs[number].name
        want, got = expected[name], outputs[name]
        if part.kind == "box":
            difference = _relative_difference(part, want, got)
            # One unit in the last place may be more than that: [1000, 1001] in float32.
            is_last_place = np.abs(got - want) <= np.spacing(np.abs(want))
            accepted = (difference <= found.tolerance) | is_last_place
            _require(difference, accepted, found.tolerance, name, where)
            found.largest_difference = max(found.largest_difference, float(difference.max()))
        elif not np.array_equal(want, got):
            scores = _scores(module, inputs)[number]
            found.ties += _ties(scores, part, want, got, found.tolerance, where, name)


def _relative_difference(spec: ActionSpec, want: Array, got: Array) -> Array:
    low, high, _, half = spec.affine
    bounded = np.isfinite(low) & np.isfinite(high)
    width = np.where(bounded, 2 * half, np.maximum(1.0, np.abs(want.astype(np.float64))))
    absolute = np.abs(got.astype(np.float64) - want.astype(np.float64))
    # Equal bounds leave one action: any other is wrong.
    relative: Array = np.divide(
        absolute, width, out=np.where(absolute > 0, np.inf, 0.0), where=width > 0
    )
    return relative


def _require(
    difference: Array, accepted: Array, tolerance: float, name: str, where: _Place
) -> None:
    if accepted.all():
        return
    row, *component = (int(i) for i in np.argwhere(~accepted)[0])
    found = float(difference[row, *component])
    hint = "; float32 rounding may need a larger one" if found < _MOST_ROUNDING else ""
    raise ParityError(
        f"{where.of(row)}: {name}{component or ''} differs from that of predict by {found:.2g} of"
        f" its range, and the tolerance is {tolerance:g}{hint}"
    )


@torch.no_grad()
def _scores(module: PolicyModule, inputs: dict[str, Array]) -> list[Array]:
    """Return the scores of each part of the actions; none, of a Box."""
    tensors = [torch.from_numpy(inputs[port.name]) for port in module.signature.inputs]
    return [np.zeros(0) if one is None else one.numpy() for one in module.scores(*tensors)]


def _ties(
    scores: Array,
    spec: ActionSpec,
    want: Array,
    got: Array,
    tolerance: float,
    where: _Place,
    name: str,
) -> int:
    """Return how many choices differ; raise where one is no tie of the best scores."""
    scores = scores.reshape(len(want), -1)
    nvec = spec.nvec or (1,) * spec.size
    flat_want, flat_got = want.reshape(len(want), -1), got.reshape(len(got), -1)
    count = 0
    for row, column in np.argwhere(flat_want != flat_got):
        part = np.split(scores[row], np.cumsum(nvec)[:-1])[column]
        start = spec.start[column] if spec.start else 0
        choices = [int(flat[row, column]) - start for flat in (flat_want, flat_got)]
        gap, scale = np.inf, 1.0
        if spec.kind == "multi_binary":
            gap = abs(float(part[0]))
        elif 0 <= choices[1] < len(part):
            gap = abs(float(part[choices[0]]) - float(part[choices[1]]))
            scale = max(1.0, abs(float(part[choices[0]])))
        if not gap <= tolerance * scale:
            raise ParityError(
                f"{where.of(row)}: {name} is {got[row]}, but that of predict is {want[row]};"
                f" their scores differ by {gap:.2g}, and the tolerance is {tolerance * scale:.2g}"
            )
        count += 1
    return count
