"""NaNs and infinities that environments give, named by where they came from."""

from __future__ import annotations

import numpy as np

from rl_training.errors import NonFiniteError
from rl_training.types import Array


def refuse_non_finite(named: list[tuple[str, Array]], first_row: int, first_step: int) -> None:
    """Raise if any of the arrays (rows, environments, ...) holds one."""
    found: list[tuple[int, int, str]] = []
    for name, values in named:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row, env = np.argwhere(~np.isfinite(values))[0, :2]
            found.append((int(row), int(env), name))
    if found:
        # The earliest, but an action only where nothing else is: it is the policy's answer.
        row, env, name = min(found, key=lambda one: (one[2] == "action", one[0]))
        raise NonFiniteError(
            f"{name} is not finite in environment {env}, {first_row + row} vector steps"
            f" after global step {first_step}"
        )
