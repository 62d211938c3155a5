"""Storage of one observation array in a replay ring; stacked images are stored once each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rl_training.types import Array, ArraySpec

_FIRST_FINALS = 64
_CONTINUES, _BLACK, _REPEATED, _WHOLE = range(4)
"""Where a stack's older images are: in the row before, all black, copies of the newest image, or
stored as a whole stack."""


class Gather(NamedTuple):
    """Indices of the images of a batch, (batch, stack), oldest image first."""

    here: Array
    following: Array
    finals: Array
    """Row of the pool that replaces the newest image of ``following``; -1: not replaced."""
    patches: list[tuple[bool, int, Array]]
    """Observations to replace: (whether among the successors, row of the batch, observation)."""


class ObsStore:
    """Observations (rows, environments, ...), and a pool of final observations.

    With ``stack`` an observation is that many images along the first axis. Only the newest image is
    stored; the older ones are read from the rows before. Where they are not there (an episode
    begins), a mark encodes what they are, so that reading always returns what was written.
    """

    def __init__(self, leaf: ArraySpec, ring: int, num_envs: int, stack: int = 1) -> None:
        self.stack = stack
        self._num_envs = num_envs
        self._cells = ring * num_envs
        self.shape = leaf.shape
        self._channels = leaf.shape[0] // stack if stack > 1 else 0
        image = (self._channels, *leaf.shape[1:]) if stack > 1 else leaf.shape
        extra = 1 if stack > 1 else 0  # a black image, after all cells
        self.flat = np.zeros((self._cells + extra, *image), leaf.dtype)
        self.rows = self.flat[: self._cells].reshape(ring, num_envs, *image)
        self.pool = np.zeros((_FIRST_FINALS, *image), leaf.dtype)
        self._marks = np.full(extra * (self._cells + extra), _REPEATED, np.uint8)
        self._whole_starts: dict[int, Array] = {}
        self._whole_finals: dict[int, Array] = {}
        self._newest: Array | None = None
        self._newest_row = -1

    @staticmethod
    def bytes_per_cell(leaf: ArraySpec, stack: int = 1) -> int:
        """Return the size of one observation in bytes."""
        size = leaf.size * np.dtype(leaf.dtype).itemsize
        return size if stack == 1 else size // stack + 1

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays it owns."""
        yield from (self.flat, self.pool, self._marks)
        yield from self._whole_starts.values()
        yield from self._whole_finals.values()

    # -- writing -------------------------------------------------------------------------------

    def write(self, t: int, obs: Array) -> None:
        """Store the observations of all environments in row ``t``."""
        if self.stack == 1:
            self.rows[t] = obs
            return
        newest, c = self._newest, self._channels
        if newest is not None and t == self._newest_row and np.array_equal(obs, newest):
            return
        self.rows[t] = obs[:, -c:]
        continues = np.zeros(self._num_envs, bool)
        if newest is not None and t == (self._newest_row + 1) % len(self.rows):
            continues = (obs[:, :-c] == newest[:, c:]).reshape(self._num_envs, -1).all(1)
        first = t * self._num_envs
        self._marks[first : first + self._num_envs] = _CONTINUES
        for cell in range(first, first + self._num_envs) if self._whole_starts else ():
            self._whole_starts.pop(cell, None)
        for env in np.flatnonzero(~continues):
            self._mark_start(first + int(env), obs[env])
        self._newest, self._newest_row = obs.copy(), t

    def write_rows(self, t: int, obs: Array) -> None:
        """Store observations of the only environment in the rows from ``t`` on."""
        if self.stack == 1:
            self.rows[t : t + len(obs), 0] = obs
            return
        for i in range(len(obs)):
            self.write(t + i, obs[i : i + 1])

    def _mark_start(self, cell: int, obs: Array) -> None:
        older, newest = obs[: -self._channels], obs[-self._channels :]
        images = older.reshape(self.stack - 1, *newest.shape)
        if not older.any():
            self._marks[cell] = _BLACK
        elif (images == newest).all():
            self._marks[cell] = _REPEATED
        else:
            self._marks[cell] = _WHOLE
            self._whole_starts[cell] = images.copy()

    def keep_final(self, pool_row: int, cell: int, final: Array) -> None:
        """Store the successor of the observation at ``cell`` in the pool."""
        if self.stack == 1:
            self.pool[pool_row] = final
            return
        c = self._channels
        self.pool[pool_row] = final[-c:]
        self._whole_finals.pop(pool_row, None)
        if not np.array_equal(final[:-c], self.take(np.array([cell]))[0][c:]):
            self._whole_finals[pool_row] = final.copy()

    def grow_pool(self) -> None:
        """Double the number of final observations that can be stored."""
        self.pool = np.concatenate((self.pool, np.zeros_like(self.pool)))

    def set_newest_row(self, t: int) -> None:
        """Make row ``t`` the newest one, after chunks were loaded."""
        if self.stack > 1:
            cells = t * self._num_envs + np.arange(self._num_envs)
            self._newest, self._newest_row = self.take(cells), t

    # -- reading -------------------------------------------------------------------------------

    def take(self, cells: Array) -> Array:
        """Return the observations of ``cells``, equal to what was written."""
        if self.stack == 1:
            taken: Array = self.flat.take(cells, axis=0)
            return taken
        index, patches = self._trace(cells)
        stacked = self._stacked(index)
        for row, whole in patches:
            stacked[row] = whole
        return stacked

    def take_next(self, following: Array, last: Array, finals: Array) -> Array:
        """Return successors: those at ``following``, or final ones where ``finals`` is not -1."""
        ended = finals >= 0
        if not ended.any():
            return self.take(following)
        if self.stack == 1:
            taken: Array = self.flat.take(following, axis=0)
            taken[ended] = self.pool[finals[ended]]
            return taken
        plan = self.plan(last, following, last, finals)
        stacked = self._stacked(plan.following)
        stacked[ended, -self._channels :] = self.pool[finals[ended]]
        for is_next, row, whole in plan.patches:
            if is_next:
                stacked[row] = whole
        return stacked

    def plan(self, cells: Array, following: Array, last: Array, finals: Array) -> Gather:
        """Return the indices that gather transitions from copies of ``flat`` and ``pool``."""
        if self.stack == 1:
            return Gather(cells[:, None], following[:, None], finals, [])
        here, patches = self._trace(cells)
        after, patches_after = self._trace(following)
        fixes = [(False, row, whole) for row, whole in patches]
        ended = np.flatnonzero(finals >= 0)
        fixes += [(True, row, whole) for row, whole in patches_after if finals[row] < 0]
        if ended.size:
            before, patches_before = self._trace(last[ended])
            after[ended, :-1] = before[:, 1:]
            shown = {int(ended[i]): whole for i, whole in patches_before}
            for row in ended.tolist():
                final = int(finals[row])
                if final in self._whole_finals:
                    fixes.append((True, row, self._whole_finals[final]))
                elif row in shown:
                    older = shown[row][self._channels :]
                    fixes.append((True, row, np.concatenate((older, self.pool[final]))))
        return Gather(here, after, finals, fixes)

    def _trace(self, cells: Array) -> tuple[Array, list[tuple[int, Array]]]:
        """Return image indices of stacks, and those stacks that reach a start stored as a whole."""
        index = np.empty((len(cells), self.stack), np.int64)
        index[:, -1] = at = np.asarray(cells)
        for age in range(self.stack - 2, -1, -1):
            mark = self._marks.take(at)
            before = (at - self._num_envs) % self._cells
            at = np.where(mark == _CONTINUES, before, np.where(mark == _BLACK, self._cells, at))
            index[:, age] = at
        if not self._whole_starts:
            return index, []
        kept = np.isin(index[:, 1:], list(self._whole_starts)).any(1)
        return index, [(int(row), self._with_kept(index[row])) for row in np.flatnonzero(kept)]

    def _with_kept(self, index: Array) -> Array:
        """Return a stack that reaches back to a start that was stored as a whole."""
        images = self.flat.take(index, axis=0)
        ages = [i for i, cell in enumerate(index.tolist()) if cell in self._whole_starts]
        first = max(ages)  # the start itself; older images repeat its index
        older = self._whole_starts[int(index[first])]
        images[:first] = older[len(older) - first :]
        return images.reshape(self.shape)

    def _stacked(self, index: Array) -> Array:
        images = self.flat.take(index.reshape(-1), axis=0)
        return images.reshape(len(index), *self.shape)

    # -- state ---------------------------------------------------------------------------------

    def chunk_state(self, rows: slice, pool_rows: Array) -> dict[str, Any]:
        """Return some rows of the ring, and of the pool."""
        state: dict[str, Any] = {"obs": self.rows[rows], "final_obs": self.pool[pool_rows]}
        if self.stack > 1:
            first, last = rows.start * self._num_envs, rows.stop * self._num_envs
            starts = sorted(cell for cell in self._whole_starts if first <= cell < last)
            finals = [i for i, row in enumerate(pool_rows.tolist()) if row in self._whole_finals]
            state["marks"] = self._marks[first:last]
            state["whole_starts"] = {str(cell): self._whole_starts[cell] for cell in starts}
            state["whole_finals"] = {str(i): self._whole_finals[int(pool_rows[i])] for i in finals}
        return state

    def load_chunk(self, rows: slice, pool_rows: list[int], state: Mapping[str, Any]) -> None:
        """Restore rows of the ring, and final observations into ``pool_rows`` of the pool."""
        self.rows[rows] = own_array(state["obs"])
        self.pool[pool_rows] = own_array(state["final_obs"])
        if self.stack > 1:
            first, last = rows.start * self._num_envs, rows.stop * self._num_envs
            self._marks[first:last] = own_array(state["marks"])
            for cell, images in state["whole_starts"].items():
                self._whole_starts[int(cell)] = own_array(images)
            for i, whole in state["whole_finals"].items():
                self._whole_finals[pool_rows[int(i)]] = own_array(whole)

    def forget(self) -> None:
        """Clear everything that is not in the arrays: whole stacks and the newest row."""
        self._whole_starts.clear()
        self._whole_finals.clear()
        self._newest, self._newest_row = None, -1


def own_array(value: Any) -> Array:
    """Return a writable copy of a saved array or tensor."""
    return np.array(value.numpy() if hasattr(value, "numpy") else value)
