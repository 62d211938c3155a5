"""Random numbers of an update, as an input of it: one vector of normal numbers, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class UpdateNoise:
    """Divides the normal numbers that an update is given (``batch["noise"]``) into named arrays."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._sizes = [math.prod(shape) for shape in shapes.values()]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of all of them together; None where an update takes none."""
        return (sum(self._sizes),) if self._sizes else None

    def of(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the arrays."""
        if not self._sizes:
            return {}
        parts = batch["noise"].split(self._sizes)
        pairs = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in pairs}


def uniform_of(normal: Tensor) -> Tensor:
    """Return numbers that are uniform in [0, 1] if these are standard normal."""
    return 0.5 + 0.5 * torch.erf(normal / math.sqrt(2))
