"""Error messages for NaNs and infinities: which value, from which environment and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_training.errors import NonFiniteError
from rl_training.types import Array

OBSERVATION, ACTION, REWARD, FINAL = range(4)
"""Parts of one step, in causal order: each can make the later ones non-finite."""


class Field(NamedTuple):
    """One kind of value in the rows that are checked."""

    part: int
    name: str
    values: Array
    """(rows, environments, ...); observations have one more row, from after the last step."""

    def is_finite(self) -> bool:
        """Return whether it contains neither a NaN nor an infinity."""
        return self.values.dtype.kind != "f" or bool(np.isfinite(self.values).all())


class Episodes(NamedTuple):
    """Where episodes end in a sequence of rows, each a step of every environment."""

    ended: Array
    """(rows, environments): whether the episode ended with this step."""
    valid: Array
    """(rows, environments): False on a reset-only row."""
    lengths_before: Array | None
    """Steps of each environment's episode before the first row; None if unknown."""
    lengths_after: Array | None
    """Steps of each environment's episode after the last row; None if unknown."""
    has_reset_rows: bool = False
    """Whether a reset-only row follows the end of each episode."""

    def is_final(self, row: int, env: int) -> bool:
        """Return whether the observation at ``row`` is the last one of an episode."""
        if row < len(self.valid):
            return not self.valid[row, env]
        return self.has_reset_rows and bool(self.ended[-1, env])

    def steps_before(self, row: int, env: int) -> tuple[int, bool]:
        """Return the steps of the episode before ``row``, and False if there may be more."""
        ended, valid = self.ended[:, env], self.valid[:, env]
        next_valid = np.append(valid[1:], not self.has_reset_rows)
        begins = ~valid | (ended & next_valid)  # a new episode begins in the next row
        starts = np.flatnonzero(begins[:row])
        if starts.size:
            return int(valid[starts[-1] + 1 : row].sum()), True
        before = int(valid[:row].sum())
        if self.lengths_before is not None:
            return before + int(self.lengths_before[env]), True
        same_at_the_end = valid[row:].all() and not ended[row:].any()
        if self.lengths_after is not None and same_at_the_end:
            return int(self.lengths_after[env]) - len(valid[row:]), True
        return before, False


class _Found(NamedTuple):
    row: int
    part: int
    env: int
    field: Field


def _first(fields: Sequence[Field], *, rows_are_missing: bool) -> _Found:
    """Return the earliest non-finite value: the cause of the others.

    If earlier rows are missing, a non-finite action may have been caused by one of them, so it is
    returned only if nothing else is found.
    """
    found = []
    for field in fields:
        if not field.is_finite():
            rows, envs = field.values.shape[:2]
            bad = np.logical_not(np.isfinite(field.values).reshape(rows, envs, -1).all(-1))
            row = int(bad.any(1).argmax())
            found.append(_Found(row, field.part, int(bad[row].argmax()), field))
    return min(found, key=lambda one: (rows_are_missing and one.part == ACTION, one[:3]))


def non_finite_error(
    fields: Sequence[Field],
    episodes: Episodes,
    *,
    first_row: int,
    first_step: int,
    first_env: int = 0,
    agents: Sequence[str] = (),
) -> NonFiniteError:
    """Return the error for fields of which at least one is not finite.

    The fields cover the last rows of ``episodes``; their first row is ``first_row`` vector steps
    after global step ``first_step``. ``first_env`` is the index in the run of the first
    environment. Of several agents, each environment has a row for each of ``agents``.
    """
    row, part, env, field = _first(fields, rows_are_missing=first_row > 0)
    at = row + len(episodes.valid) - _num_rows(fields)
    steps, known = episodes.steps_before(at, env)
    name = field.name
    if part == OBSERVATION and episodes.is_final(at, env):
        name = f"final {name}"
    if part != OBSERVATION:
        when = f"in step {steps + 1}"
    else:
        when = f"after step {steps}" if steps else "at the start"
    if not known:
        when = f"{when} or later"
    values = field.values[row, env].reshape(-1)
    value = float(values[~np.isfinite(values)][0])
    shown = f"{value} (infinite, or too large for float32)" if np.isinf(value) else f"{value}"
    place = f"{when} of its episode: {shown}, at global step {first_step}"
    if first_row + row:
        place += f" plus {first_row + row} steps of every environment"
    index = f"{first_env + env}"
    if agents:
        index = f"{first_env + env // len(agents)}, agent {agents[env % len(agents)]},"
    if part != ACTION:
        return NonFiniteError(f"environment {index} returned a non-finite {name} {place}")
    missing = ", or an earlier value that is no longer stored was not finite" if first_row else ""
    return NonFiniteError(
        f"the policy chose a non-finite action for environment {index} {place}. Its observation is"
        f" finite, so the weights contain NaN or infinity: training diverged{missing}. Try a lower"
        " learning rate, or normalised observations and rewards. Checkpoints are from before it"
    )


def _num_rows(fields: Sequence[Field]) -> int:
    return next(len(field.values) for field in fields if field.part == REWARD)


def named_leaves(keys: Sequence[str]) -> list[str]:
    """Return names for the arrays of an observation; a single array has the key ``""``."""
    return [f"observation[{key!r}]" if key else "observation" for key in keys]
