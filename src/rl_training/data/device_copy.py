"""A replay's observations and actions again, on an accelerator, brought up to date lazily."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.tree import tree_leaves, tree_map
from rl_training.types import Array


class DeviceCopy:
    """Follows the arrays of a ring: (rows, environments, ...), and of its pool of final ones.

    What is drawn, and every scalar, is settled on the host: batches are the same wherever they
    are gathered. Rows are uploaded when a batch is wanted, all that were added since in one go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._obs: Any = None
        self._actions: Any = None
        self._finals: Any = None
        self._stale_rows: int | None = None
        self._stale_finals: list[int] = []

    def note_row(self) -> None:
        """A row was added to the ring."""
        if self._stale_rows is not None:
            self._stale_rows += 1

    def note_final(self, row: int) -> None:
        """A row of the pool was written."""
        if self._stale_rows is not None:
            self._stale_finals.append(row)

    def forget(self) -> None:
        """Everything changed."""
        self._stale_rows = None
        self._stale_finals.clear()

    def sync(self, obs: Any, actions: Array, finals: Any, head: int) -> None:
        """Upload what changed; ``head`` is the row that holds the newest observation alone."""
        ring = len(actions)
        if self._stale_rows is None or self._stale_rows >= ring:
            self._obs, self._actions = self._uploaded(obs), self._uploaded(actions)
            self._finals = self._uploaded(finals)
        else:
            for rows in _slices(head - self._stale_rows, self._stale_rows + 1, ring):
                _refresh(self._obs, obs, rows)
                _refresh(self._actions, actions, rows)
            if len(tree_leaves(finals)[0]) != len(tree_leaves(self._finals)[0]):
                self._finals = self._uploaded(finals)
            else:
                for row in self._stale_finals:
                    _refresh(self._finals, finals, slice(row, row + 1))
        self._stale_rows = 0
        self._stale_finals.clear()

    def _uploaded(self, arrays: Any) -> Any:
        return tree_map(lambda array: torch.from_numpy(array).to(self._device, copy=True), arrays)

    def take(self, cells: Array, next_cells: Array, finals: Array) -> dict[str, Any]:
        """Gather transitions; the successor is a final one where ``finals`` names its row."""
        indices = torch.from_numpy(np.stack((cells, next_cells, finals)))
        here, following, rows = indices.to(self._device, non_blocking=True)
        ended = rows >= 0
        rows = rows.clamp(min=0)

        def gather(ring: Tensor) -> Tensor:
            return ring.flatten(0, 1).index_select(0, here)

        def successors(ring: Tensor, pool: Tensor) -> Tensor:
            taken = ring.flatten(0, 1).index_select(0, following)
            mask = ended.view(-1, *(1,) * (taken.ndim - 1))
            return torch.where(mask, pool.index_select(0, rows), taken)

        return {
            "obs": tree_map(gather, self._obs),
            "actions": gather(self._actions),
            "next_obs": tree_map(successors, self._obs, self._finals),
        }


def _slices(start: int, count: int, ring: int) -> Iterator[slice]:
    """``count`` rows from ``start`` on, round the end of the ring."""
    start %= ring
    yield slice(start, min(start + count, ring))
    if start + count > ring:
        yield slice(0, start + count - ring)


def _refresh(copies: Any, arrays: Any, rows: slice) -> None:
    def refresh(copy: Tensor, array: Array) -> None:
        copy[rows].copy_(torch.from_numpy(array[rows]), non_blocking=True)

    tree_map(refresh, copies, arrays)
