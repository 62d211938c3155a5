"""A sum tree over non-negative numbers, with vectorised updates and look-ups by cumulative sum."""

from __future__ import annotations

import numpy as np

from rl_training.types import Array


class SumTree:
    """A complete binary tree in one array: node i has the children 2i and 2i + 1.

    Sums are recomputed from children, never adjusted by differences, so they do not drift.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._depth = max(1, int(np.ceil(np.log2(max(size, 2)))))
        self._first = 1 << self._depth
        self._nodes = np.zeros(2 * self._first)

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        return float(self._nodes[1])

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._nodes.nbytes

    def get(self, index: Array) -> Array:
        """Return the numbers at ``index``."""
        values: Array = self._nodes[self._first + index]
        return values

    def set(self, index: Array, values: Array) -> None:
        """Set the numbers at ``index``; for a duplicate index the last value is stored."""
        nodes = self._first + np.asarray(index)
        self._nodes[nodes] = values
        for _ in range(self._depth):
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Array) -> Array:
        """Return, for each s in [0, total), the index at which the cumulative sum exceeds s."""
        nodes = np.ones(len(sums), np.int64)
        sums = np.array(sums, np.float64)
        for _ in range(self._depth):
            left = self._nodes[2 * nodes]
            # Rounding may lead to the end of a branch, where all numbers are zero.
            right = (sums >= left) & (self._nodes[2 * nodes + 1] > 0)
            sums = np.where(right, sums - left, np.minimum(sums, np.nextafter(left, 0)))
            nodes = 2 * nodes + right
        return nodes - self._first

    def leaves(self) -> Array:
        """Return all numbers, for saving."""
        return self._nodes[self._first : self._first + self._size].copy()

    def load(self, leaves: Array) -> None:
        """Restore saved numbers."""
        self._nodes[:] = 0.0
        self.set(np.arange(self._size), leaves)
