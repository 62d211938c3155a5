"""``rl-training eval RUN --against OPPONENT...``: games of two policies, and Elo ratings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError, did_you_mean
from rl_training.terminal import show
from rl_training.trust import trust_from_flag

if TYPE_CHECKING:
    from rl_training.runtime.matches import MatchResult, Rating
    from rl_training.runtime.policy import TrainedPolicy
    from rl_training.tools.training import EvalArgs

_GAMES = 200


def evaluate_against(options: EvalArgs, names: Sequence[str]) -> int:
    """Let the policy of a run play against opponents, and print how the games ended."""
    from rl_training.runtime.matches import PLAYERS, play_match, rate
    from rl_training.tools.episodes import load_player

    trust = trust_from_flag(options.trust_modules)
    other = {"env_id": options.env_id, "env_kwargs": options.env_kwargs}
    policy, _ = load_player(options.checkpoint, options.device, trust, **other)  # type: ignore[arg-type]
    if not names:
        raise ConfigError(f"--against names no opponent: a run, or one of {', '.join(PLAYERS)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--against: an opponent is named twice: {' '.join(names)}")
    opponents = [_opponent(name, options) for name in names]
    games = _GAMES if options.num_episodes is None else options.num_episodes
    how: dict[str, Any] = {"deterministic": bool(options.deterministic), "seed": options.seed}
    about: dict[str, Any] = {"checkpoint": str(options.checkpoint)}
    if len(opponents) == 1:
        result = play_match(policy, opponents[0], games, **how)
        show(match_text(result, names[0]))
        about |= _plain(result, names[0])
    else:
        rating = rate(policy, opponents, games, **how)
        for name, match in zip(names, rating.matches, strict=True):
            show(match_text(match, name))
        show(rating_text(rating, names))
        about |= {
            "elo": rating.elo,
            "elo_standard_error": rating.standard_error,
            "opponents": dict(zip(names, rating.opponents, strict=True)),
            "matches": [_plain(m, name) for name, m in zip(names, rating.matches, strict=True)],
        }
    if options.json:
        show(json.dumps(about) + "\n")
    return 0


def rating_text(rating: Rating, names: Sequence[str]) -> str:
    """Return the line that is printed of a rating."""
    pairs = zip(names, rating.opponents, strict=True)
    others = ", ".join(f"{name} {elo:.0f}" for name, elo in pairs)
    return f"Elo {rating.elo:.0f} +/- {1.96 * rating.standard_error:.0f} (95%), where {others}\n"


def _opponent(against: str, options: EvalArgs) -> TrainedPolicy | str:
    from rl_training.runtime.matches import PLAYERS
    from rl_training.tools.episodes import load_player

    if against in PLAYERS:
        return against
    if not Path(against).exists():
        raise ConfigError(
            f"--against: no run or checkpoint {against!r}; players with a name are"
            f" {', '.join(PLAYERS)}.{did_you_mean(against, PLAYERS)}"
        )
    return load_player(Path(against), options.device, trust_from_flag(options.trust_modules))[0]


def match_text(result: MatchResult, against: str) -> str:
    """Return the lines that are printed of a match."""
    won, drawn, lost = result.counts()
    games = result.games
    bound = " or more" if won == games else " or less" if lost == games else ""
    elo = f"Elo difference {result.elo_difference:+.0f}{bound}"
    seats = (f"  as {s.agent}: {s.won} won, {s.drawn} drawn, {s.lost} lost" for s in result.seats)
    total = f"against {against}: {won} won, {drawn} drawn, {lost} lost of {games} games; {elo}"
    return "\n".join([total, *seats]) + "\n"


def _plain(result: MatchResult, against: str) -> dict[str, Any]:
    won, drawn, lost = result.counts()
    return {
        "against": against,
        "won": won,
        "drawn": drawn,
        "lost": lost,
        "score": result.score,
        "elo_difference": result.elo_difference,
        "seats": [dataclasses.asdict(seat) for seat in result.seats],
    }
