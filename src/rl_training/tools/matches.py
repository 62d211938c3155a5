"""``rl-training eval RUN --against OPPONENT``: games of two policies, counted by seat."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError, did_you_mean
from rl_training.terminal import show
from rl_training.trust import trust_from_flag

if TYPE_CHECKING:
    from rl_training.runtime.matches import MatchResult
    from rl_training.runtime.policy import TrainedPolicy
    from rl_training.tools.training import EvalArgs

_GAMES = 200


def evaluate_against(options: EvalArgs, against: str) -> int:
    """Let the policy of a run play against an opponent, and print how the games ended."""
    from rl_training.runtime.matches import play_match
    from rl_training.tools.episodes import load_player

    trust = trust_from_flag(options.trust_modules)
    other = {"env_id": options.env_id, "env_kwargs": options.env_kwargs}
    policy, _ = load_player(options.checkpoint, options.device, trust, **other)  # type: ignore[arg-type]
    result = play_match(
        policy,
        _opponent(against, options),
        _GAMES if options.num_episodes is None else options.num_episodes,
        deterministic=bool(options.deterministic),
        seed=options.seed,
    )
    show(match_text(result, against))
    if options.json:
        show(json.dumps(_plain(result, options.checkpoint, against)) + "\n")
    return 0


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


def _plain(result: MatchResult, checkpoint: Path, against: str) -> dict[str, Any]:
    won, drawn, lost = result.counts()
    return {
        "checkpoint": str(checkpoint),
        "against": against,
        "won": won,
        "drawn": drawn,
        "lost": lost,
        "score": result.score,
        "elo_difference": result.elo_difference,
        "seats": [dataclasses.asdict(seat) for seat in result.seats],
    }
