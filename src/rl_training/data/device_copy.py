"""A copy of a replay's observations and actions on an accelerator, updated lazily."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.data.obs_store import Gather, ObsStore
from rl_training.types import Array

_PLACES = itertools.count(1)


def new_place() -> int:
    """Return a number for memory that graphs gather from, which no other memory has."""
    return next(_PLACES)


class DeviceCopy:
    """Device copies of a ring's `ObsStore`s and actions: (rows, environments, ...).

    Indices and scalars are computed on the host, so a batch is the same wherever it is gathered.
    When a batch is sampled, all rows added since the last one are uploaded together. Memory is not
    pinned: a non-blocking copy from pageable memory has read it when the call returns, so the host
    may overwrite it immediately.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = new_place()
        """Another number whenever the copies move to other memory."""
        self._images: Any = None
        self._pools: Any = None
        self._actions: Any = None
        self._stale_rows: int | None = None
        self._stale_finals: list[int] = []

    def note_row(self) -> None:
        """Record that a row was added to the ring."""
        if self._stale_rows is not None:
            self._stale_rows += 1

    def note_final(self, row: int) -> None:
        """Record that a row of the pool was written."""
        if self._stale_rows is not None:
            self._stale_finals.append(row)

    def forget(self) -> None:
        """Mark everything as changed: the next `sync` uploads all rows."""
        self._stale_rows = None
        self._stale_finals.clear()

    def sync(self, stores: Any, actions: Array, head: int) -> None:
        """Upload the changed rows; row ``head`` holds the current observations and no action."""
        ring, width = actions.shape[:2]
        pools = tree_map(lambda store: store.pool, stores)
        if self._stale_rows is None or self._stale_rows >= ring:
            self.place = new_place()
            self._images = tree_map(lambda store: self._uploaded(store.flat), stores)
            self._pools = tree_map(self._uploaded, pools)
            self._actions = self._uploaded(actions)
        else:
            for rows in _slices(head - self._stale_rows, self._stale_rows + 1, ring):
                cells = slice(rows.start * width, rows.stop * width)
                tree_map(lambda copy, s: _refresh(copy, s.flat, cells), self._images, stores)  # noqa: B023
                _refresh(self._actions, actions, rows)
            if len(tree_leaves(pools)[0]) != len(tree_leaves(self._pools)[0]):
                self.place = new_place()
                self._pools = tree_map(self._uploaded, pools)
            else:
                for row in self._stale_finals:
                    one = slice(row, row + 1)
                    tree_map(lambda copy, pool: _refresh(copy, pool, one), self._pools, pools)  # noqa: B023
        self._stale_rows = 0
        self._stale_finals.clear()

    def _uploaded(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device, copy=True)

    def take(
        self, stores: Any, cells: Array, following: Array, last: Array, finals: Array
    ) -> dict[str, Any]:
        """Return a batch; ``next_obs`` is row ``finals[i]`` of the pool where that is not -1."""
        plans: Any = tree_map(lambda store: store.plan(cells, following, last, finals), stores)
        obs: Any = tree_map(self._gathered, stores, plans, self._images)
        next_obs: Any = tree_map(self._successors, stores, plans, self._images, self._pools)
        there = torch.from_numpy(cells).to(self._device, non_blocking=True)
        return {
            "obs": obs,
            "actions": self._actions.flatten(0, 1).index_select(0, there),
            "next_obs": next_obs,
        }

    def gather(self, recipe: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what `take` does, of observations that are not stacked.

        Indices are tensors on the device, and shapes are static: it may be part of a CUDA graph.
        """
        cells, finals = recipe["cells"], recipe["finals"]

        def successor(images: Tensor, pool: Tensor) -> Tensor:
            ended = (finals >= 0).view(-1, *(1,) * (images.ndim - 1))
            final = pool.index_select(0, finals.clamp(min=0))
            return torch.where(ended, final, images.index_select(0, recipe["following"]))

        return {
            "obs": tree_map(lambda images: images.index_select(0, cells), self._images),
            "actions": self._actions.flatten(0, 1).index_select(0, cells),
            "next_obs": tree_map(successor, self._images, self._pools),
        }

    def _gathered(self, store: ObsStore, plan: Gather, images: Tensor) -> Tensor:
        taken = self._stacked(store, plan.here, images)
        return self._patched(taken, plan, of_successors=False)

    def _successors(self, store: ObsStore, plan: Gather, images: Tensor, pool: Tensor) -> Tensor:
        taken = self._stacked(store, plan.following, images)
        rows = torch.from_numpy(plan.finals).to(self._device, non_blocking=True)
        ended = (rows >= 0).view(-1, *(1,) * (taken.ndim - 1))
        final = pool.index_select(0, rows.clamp(min=0))
        if store.stack == 1:
            return torch.where(ended, final, taken)
        newest = taken[:, -final.shape[1] :]
        newest.copy_(torch.where(ended, final, newest))
        return self._patched(taken, plan, of_successors=True)

    def _stacked(self, store: ObsStore, index: Array, images: Tensor) -> Tensor:
        where = torch.from_numpy(np.ascontiguousarray(index).reshape(-1))
        taken = images.index_select(0, where.to(self._device, non_blocking=True))
        return taken.view(len(index), *store.shape)

    def _patched(self, taken: Tensor, plan: Gather, *, of_successors: bool) -> Tensor:
        for is_next, row, whole in plan.patches:
            if is_next == of_successors:
                taken[row] = torch.from_numpy(whole).to(self._device)
        return taken


def _slices(start: int, count: int, ring: int) -> Iterator[slice]:
    """Yield slices of ``count`` rows from ``start`` on, wrapping round the end of the ring."""
    start %= ring
    yield slice(start, min(start + count, ring))
    if start + count > ring:
        yield slice(0, start + count - ring)


def _refresh(copy: Tensor, array: Array, rows: slice) -> None:
    copy[rows].copy_(torch.from_numpy(array[rows]), non_blocking=True)
