"""Games of a policy against another one, a random or a rule player, counted by seat."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_training._internal.tree import tree_leaves
from rl_training.envs import EnvFn, TeamAdapter
from rl_training.envs.board_games import BoardGame, board_game_of
from rl_training.errors import ConfigError
from rl_training.eval import episodes_of_each, make_eval_env
from rl_training.models.action_heads import make_action_head
from rl_training.runtime.ratings import elo_difference, fitted_rating, fitted_ratings
from rl_training.seeding import stream_seed, torch_stream
from rl_training.types import ACTION_MASK, ActionSpec, Array, Obs, Progress

if TYPE_CHECKING:
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.policy import TrainedPolicy

PLAYERS = ("random", "rule")
"""Opponents that have a name; all others are policies."""


@dataclasses.dataclass(frozen=True)
class SeatResult:
    """How the games ended in which a policy had one seat."""

    agent: str
    won: int
    drawn: int
    lost: int


@dataclasses.dataclass(frozen=True)
class MatchResult:
    """How the games of a policy ended, by its seat."""

    seats: tuple[SeatResult, ...]

    def counts(self) -> tuple[int, int, int]:
        """Return how many games were won, drawn and lost."""
        won, drawn, lost = zip(*((s.won, s.drawn, s.lost) for s in self.seats), strict=True)
        return sum(won), sum(drawn), sum(lost)

    @property
    def games(self) -> int:
        """Number of games."""
        return sum(self.counts())

    @property
    def score(self) -> float:
        """Mean over the games: a win counts 1, a draw a half."""
        won, drawn, _ = self.counts()
        return (won + drawn / 2) / self.games

    @property
    def elo_difference(self) -> float:
        """By how much the policy's Elo rating is above the opponent's; finite also at 100%."""
        return elo_difference(self.score, self.games)


@dataclasses.dataclass(frozen=True)
class Rating:
    """The Elo rating of a policy against a fixed set of players, the first of which has 0."""

    elo: float
    standard_error: float
    opponents: tuple[float, ...]
    """The ratings of the set, by the games of its players against each other."""
    matches: tuple[MatchResult, ...]
    """The games of the policy against each player of the set."""


class _Stateless:
    """Base of players without a state."""

    def reset(self, done: Array) -> None:
        """Do nothing: there is no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


class RandomActor(_Stateless):
    """Takes every legal action with the same probability."""

    def __init__(self, action_spec: ActionSpec, generator: torch.Generator) -> None:
        self._spec = action_spec
        self._generator = generator

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row."""
        del progress
        rows = len(tree_leaves(obs)[0])
        if self._spec.kind == "box":  # of a bounded one [-1, 1] is the whole range
            uniform = torch.rand((rows, *self._spec.shape), generator=self._generator)
            return (2 * uniform - 1).numpy(), {}
        head: Any = make_action_head(self._spec, 0.0)
        mask = torch.as_tensor(obs[ACTION_MASK]) if _has_mask(obs) else None
        noise = head.draw_noise((rows,), self._generator)
        return head.sample(torch.zeros(rows, head.param_size), noise, mask).numpy(), {}


class RuleActor(_Stateless):
    """Completes a line of its own, else blocks one of the other player, else plays at random."""

    def __init__(self, game: BoardGame, generator: torch.Generator) -> None:
        self._game = game
        self._generator = generator

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row."""
        del progress
        parts: Any = obs
        boards, legal = parts["observation"], parts[ACTION_MASK]
        preference = torch.rand(legal.shape, generator=self._generator).numpy()
        preference += 2.0 * self._game.completing(boards, 0) + self._game.completing(boards, 1)
        return np.where(legal, preference, -1.0).argmax(1), {}


def _has_mask(obs: Obs) -> bool:
    return isinstance(obs, dict) and ACTION_MASK in obs


def play_match(
    policy: TrainedPolicy,
    opponent: TrainedPolicy | str,
    num_games: int = 200,
    *,
    deterministic: bool = False,
    seed: int | None = None,
    env_fn: EnvFn | None = None,
) -> MatchResult:
    """Let a policy play a game of two agents against an opponent, half of the games from each seat.

    Args:
        policy: the policy that is rated; its agents share it.
        opponent: another policy for the same game; "random"; or "rule", in tic-tac-toe and connect
            four, which completes lines, blocks lines and otherwise plays at random.
        num_games: number of games.
        deterministic: let policies take their most likely actions. In a game without chance all
            games of two policies are then the same.
        seed: seed of the games and of all players; unset: the run's.
        env_fn: makes the game, of a policy that was trained with env_fn.

    Raises:
        ConfigError: the game is not one of two agents, or the opponent cannot play it.
    """
    return _match(policy, (policy, opponent), num_games, deterministic, seed, env_fn)


def rate(
    policy: TrainedPolicy,
    opponents: Sequence[TrainedPolicy | str],
    num_games: int = 200,
    *,
    deterministic: bool = False,
    seed: int | None = None,
    env_fn: EnvFn | None = None,
) -> Rating:
    """Rate a policy against a fixed set of players.

    The players of the set first play against each other, which gives their ratings; the policy then
    plays against each of them. Ratings of several policies can be compared if the set and the seed
    are the same. Arguments are those of `play_match`; ``num_games`` is that of each pair.
    """
    if not opponents:
        raise ConfigError("a rating needs at least one opponent")

    def played(one: TrainedPolicy | str, other: TrainedPolicy | str) -> MatchResult:
        return _match(policy, (one, other), num_games, deterministic, seed, env_fn)

    scores = np.full((len(opponents), len(opponents)), 0.5)
    for i, one in enumerate(opponents):
        for j, other in enumerate(opponents[:i]):
            scores[i, j] = played(one, other).score
            scores[j, i] = 1.0 - scores[i, j]
    matches = tuple(played(policy, other) for other in opponents)
    known = fitted_ratings(scores, num_games)
    elo, error = fitted_rating(np.array([one.score for one in matches]), known, num_games)
    return Rating(elo, error, tuple(known.tolist()), matches)


def _match(
    policy: TrainedPolicy,
    players: tuple[TrainedPolicy | str, TrainedPolicy | str],
    num_games: int,
    deterministic: bool,
    seed: int | None,
    env_fn: EnvFn | None,
) -> MatchResult:
    """Let two players play the game that a policy was trained on."""
    if num_games < 1:
        raise ConfigError(f"the number of games must be at least 1; got {num_games}")
    base = stream_seed(policy.config.seed if seed is None else seed, "evaluation")
    specs = (policy.obs_spec, policy.action_spec)
    env = make_eval_env(policy.config, num_games, env_fn, specs)
    try:
        game = require_two_players(env)
        seeds = (base, stream_seed(base, "opponent"))
        first, second = (
            _player(player, policy, game, deterministic, own)
            for player, own in zip(players, seeds, strict=True)
        )
        return _played(game, (first, second), num_games, base)
    finally:
        env.close()


def require_two_players(env: Any) -> TeamAdapter:
    """Return the environments of a game of two agents that share a policy; refuse others."""
    if not isinstance(env, TeamAdapter) or len(env.agents) != 2:
        number = len(env.agents) if isinstance(env, TeamAdapter) else 1
        raise ConfigError(f"games need two agents; {env.name} has {number}")
    if env.layout.is_grouped:
        raise ConfigError(
            "games need agents that share a policy; this one was trained with one for each agent"
        )
    return env


def _player(
    player: TrainedPolicy | str,
    policy: TrainedPolicy,
    game: TeamAdapter,
    deterministic: bool,
    seed: int,
) -> Actor:
    if not isinstance(player, str):
        theirs, ours = ((p.obs_spec, p.action_spec) for p in (player, policy))
        if [one.to_plain() for one in theirs] != [one.to_plain() for one in ours]:
            raise ConfigError(
                f"the opponent was trained on {player.config.env_id}, with other observations or"
                f" actions than those of {policy.config.env_id}"
            )
        return player.evaluation_actor(deterministic, seed)
    generator = torch_stream(seed, "evaluation_actions")
    if player == "random":
        return RandomActor(game.action_spec, generator)
    if player != "rule":
        raise ConfigError(f"no opponent {player!r}: name a policy, or one of {PLAYERS}")
    board = board_game_of(game.teams.env.metadata)
    if board is None:
        raise ConfigError(f"the rule player plays tic-tac-toe and connect four, not {game.name}")
    return RuleActor(board, generator)


def _played(
    game: TeamAdapter, players: tuple[Actor, Actor], num_games: int, seed: int
) -> MatchResult:
    teams = game.num_episodes
    quota = episodes_of_each(num_games, teams)
    finished, counts = [0] * teams, np.zeros((2, 3), np.int64)
    seats = np.arange(teams) % 2
    """The seat of the first player in each environment."""
    is_first = (np.arange(2) == seats[:, None]).reshape(-1)
    returns = np.zeros((teams, 2))
    obs = game.reseed(seed)
    for player in players:
        player.reset(np.ones(game.num_envs, bool))
    while any(done < wanted for done, wanted in zip(finished, quota, strict=True)):
        # Both see all rows, because a policy with memory has a state for each.
        chosen = [player.act(obs, Progress(1, 1))[0] for player in players]
        of_first = is_first.reshape(-1, *[1] * (chosen[0].ndim - 1))
        step = game.step(np.where(of_first, *chosen))
        returns += step.reward.reshape(teams, 2)
        for episode in step.episodes:
            team, seat = episode.env, int(seats[episode.env])
            if finished[team] < quota[team]:
                finished[team] += 1
                ours, theirs = returns[team, seat], returns[team, 1 - seat]
                counts[seat, 0 if ours > theirs else 1 if ours == theirs else 2] += 1
            returns[team] = 0
        if step.cut.any():
            for player in players:
                player.reset(step.cut)
        obs = step.obs
    pairs = zip(game.agents, counts.tolist(), strict=True)
    return MatchResult(tuple(SeatResult(agent, *three) for agent, three in pairs))
