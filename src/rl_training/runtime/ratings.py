"""Elo ratings: what the results of games say about the strength of players (Elo 1978)."""

from __future__ import annotations

import math

import numpy as np

from rl_training.types import Array

START = 1000.0
"""The rating of the first player; only differences of ratings have a meaning."""
_SCALE = 400.0
_RATE = math.log(10.0) / _SCALE
_K = 16.0
"""By how much a game can change a rating."""
_CLOSE = 1e-6


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
    score = float(_possible(np.array(score), games))
    return _SCALE * math.log10(score / (1.0 - score))


def fitted_ratings(scores: Array, games: int) -> Array:
    """Return the ratings under which the results of a set of players are the most likely.

    ``scores[i, j]`` is the mean score of player i in ``games`` games against player j; the diagonal
    does not matter. The first rating is 0. Scores of 0 and 1 are taken to be half a game less.
    """
    wanted = _possible(np.asarray(scores, float), games)
    np.fill_diagonal(wanted, 0.5)
    ratings = np.zeros(len(wanted))
    for _ in range(100):  # Newton's method on a concave likelihood
        expected = _expected(ratings[:, None] - ratings)
        slopes = expected * (1.0 - expected)
        curvature = np.diag(slopes.sum(1)) - slopes
        change = np.zeros_like(ratings)
        change[1:] = np.linalg.solve(curvature[1:, 1:], (wanted - expected).sum(1)[1:]) / _RATE
        ratings += np.clip(change, -_SCALE, _SCALE)
        if np.abs(change).max() < _CLOSE:
            return ratings
    raise ArithmeticError("the ratings do not converge")


def fitted_rating(scores: Array, others: Array, games: int) -> tuple[float, float]:
    """Return the most likely rating of a player, and its standard error.

    ``scores`` are its mean scores in ``games`` games against each of ``others``, whose ratings are
    known.
    """
    wanted = _possible(np.asarray(scores, float), games).sum()
    low, high = (edge(others) + sign * 10 * _SCALE for edge, sign in ((min, -1), (max, 1)))
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if _expected(middle - others).sum() < wanted else (low, middle)
    expected = _expected(high - others)
    information = games * float((expected * (1.0 - expected)).sum())
    return float(high), 1.0 / (_RATE * math.sqrt(information))


def _expected(differences: Array) -> Array:
    return 1.0 / (1.0 + np.power(10.0, -differences / _SCALE))


def _possible(scores: Array, games: int) -> Array:
    """Scores of 0 and 1 would make ratings infinite."""
    edge = 0.5 / games
    return np.clip(scores, edge, 1.0 - edge)
