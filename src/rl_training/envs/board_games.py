"""Tic-tac-toe and connect four of PettingZoo: lines, legal cells, and boards as text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_training.types import Array


@dataclasses.dataclass(frozen=True)
class BoardGame:
    """A game in which pieces in a row win.

    An observation has two planes, (rows, columns, 2): the pieces of the agent that observes, and
    those of the other one.
    """

    rows: int
    columns: int
    length: int
    """Pieces in a row that win."""
    drops: bool
    """Whether an action is a column, in which the piece drops; else it is a cell."""
    pieces: str
    """The pieces of the first and the second agent, as text."""
    transposed: bool = False
    """Whether the first index of an observation is the column."""

    @functools.cached_property
    def _lines(self) -> Array:
        """Which cells are in which line that wins: (lines, cells)."""
        lines = []
        for row in range(self.rows):
            for column in range(self.columns):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    cells = [(row + i * down, column + i * right) for i in range(self.length)]
                    if all(0 <= y < self.rows and 0 <= x < self.columns for y, x in cells):
                        line = np.zeros((self.rows, self.columns), np.int64)
                        line[tuple(zip(*cells, strict=True))] = 1
                        lines.append(line.reshape(-1))
        return np.stack(lines)

    def completing(self, boards: Array, player: int) -> Array:
        """Return which actions complete a line of ``player`` (0: the agent that observes).

        Args:
            boards: observations, (n, rows, columns, 2).
            player: index of the plane.

        Returns:
            (n, actions), bool. Of an illegal action it has no meaning.
        """
        planes = boards.reshape(len(boards), -1, 2).astype(np.int64)
        own, taken = planes[:, :, player], planes.sum(-1)
        # A line lacks one piece; its free cell is the one to take.
        open_lines = (own @ self._lines.T == self.length - 1) & (
            taken @ self._lines.T == self.length - 1
        )
        cells: Array = (open_lines.astype(np.int64) @ self._lines > 0) & (taken == 0)
        if not self.drops:
            return cells
        heights = taken.reshape(-1, self.rows, self.columns).sum(1)
        landing = np.maximum(self.rows - 1 - heights, 0) * self.columns + np.arange(self.columns)
        of_columns: Array = np.take_along_axis(cells, landing, 1)
        return of_columns

    def text(self, board: Array, seat: int) -> str:
        """Return a board as text, seen by the agent in ``seat``; free cells have their numbers."""
        planes = board.swapaxes(0, 1) if self.transposed else board
        shown = []
        for row in range(self.rows):
            cells = [self._cell(planes, row, column, seat) for column in range(self.columns)]
            shown.append(" ".join(cells))
        if self.drops:
            shown.append(" ".join(str(column + 1) for column in range(self.columns)))
        return "\n".join(shown)

    def _cell(self, planes: Array, row: int, column: int, seat: int) -> str:
        for plane in (0, 1):
            if planes[row, column, plane]:
                return self.pieces[seat ^ plane]
        return "." if self.drops else str(row * self.columns + column + 1)

    def action(self, number: int) -> int:
        """Return the action of a number in `text`."""
        return self._transposed(number - 1) if self.transposed else number - 1

    def number(self, action: int) -> int:
        """Return the number in `text` of an action."""
        return 1 + (self._transposed(action) if self.transposed else action)

    def _transposed(self, cell: int) -> int:
        row, column = divmod(cell, self.columns)
        return column * self.rows + row


_GAMES = {
    "connect_four_v3": BoardGame(6, 7, 4, drops=True, pieces="XO"),
    "tictactoe_v3": BoardGame(3, 3, 3, drops=False, pieces="XO", transposed=True),
}


def board_game_of(metadata: Mapping[str, Any]) -> BoardGame | None:
    """Return the board game with this metadata of an environment; None for any other."""
    return _GAMES.get(str(metadata.get("name")))
