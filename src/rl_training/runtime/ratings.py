"""Elo ratings: what the results of games say about the strength of players (Elo 1978)."""

from __future__ import annotations

import math

START = 1000.0
"""The rating of the first player; only differences of ratings have a meaning."""
_SCALE = 400.0
_K = 16.0
"""By how much a game can change a rating."""


def expected_score(rating: float, other: float) -> float:
    """Return 1 / (1 + 10^((other - rating) / 400)): wins count 1, draws a half."""
    return 1.0 / (1.0 + math.pow(10.0, (other - rating) / _SCALE))


def after_game(rating: float, other: float, score: float) -> tuple[float, float]:
    """Return both ratings after a game in which the first player scored 1, 0.5 or 0."""
    change = _K * (score - expected_score(rating, other))
    return rating + change, other - change


def elo_difference(score: float, games: int) -> float:
    """Return the difference of ratings at which ``score``, a mean over games, is expected.

    It is infinite where one player won everything; the score is then taken to be half a game less.
    """
    edge = 0.5 / games
    score = min(max(score, edge), 1.0 - edge)
    return _SCALE * math.log10(score / (1.0 - score))
