"""Games of a person against a policy in the terminal: tic-tac-toe and connect four."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.envs.board_games import BoardGame, board_game_of
from rl_training.errors import ConfigError
from rl_training.eval import make_eval_env
from rl_training.runtime.matches import require_two_players
from rl_training.seeding import stream_seed
from rl_training.terminal import show
from rl_training.types import ACTION_MASK, Array, Progress

if TYPE_CHECKING:
    from rl_training.envs import TeamAdapter
    from rl_training.runtime.policy import TrainedPolicy

NO_SEAT = "none"
"""In place of a seat: nobody plays, the agents are shown on the screen."""


class InputEndedError(Exception):
    """There is no more input: the person has left."""


@dataclasses.dataclass(frozen=True)
class PlayedGame:
    """A game that has ended, or was stopped after a number of moves."""

    ret: float
    """The person's return."""
    moves: int


@contextlib.contextmanager
def opened_game(policy: TrainedPolicy, seat: str | None) -> Iterator[_Table | None]:
    """Yield the game that a policy plays against a person; None where it is to be shown instead.

    Raises `ConfigError` where the seat does not exist, or the game cannot be played as text.
    """
    if seat == NO_SEAT:
        yield None
        return
    config = policy.config.with_overrides(vectorization="sync")
    env = make_eval_env(config, 1, None, (policy.obs_spec, policy.action_spec))
    with contextlib.closing(env):
        board = board_game_of(env.teams.env.metadata) if hasattr(env, "teams") else None
        if board is None:
            if seat is not None:
                raise ConfigError(
                    f"--seat is for tic-tac-toe and connect four, which are played in the terminal;"
                    f" {env.name} is shown on the screen without it"
                )
            yield None
            return
        game = require_two_players(env)
        if seat is not None and seat not in game.agents:
            raise ConfigError(
                f"--seat must be {' or '.join(game.agents)}, or {NO_SEAT} to watch; got {seat!r}"
            )
        yield _Table(policy, game, board, 0 if seat is None else game.agents.index(seat))


class _Table:
    """A game, the policy and the person."""

    def __init__(
        self, policy: TrainedPolicy, game: TeamAdapter, board: BoardGame, seat: int
    ) -> None:
        self._policy, self._game, self._board, self._seat = policy, game, board, seat

    def play(
        self, count: int, seed: int, *, deterministic: bool | None, max_steps: int | None
    ) -> Iterator[PlayedGame]:
        """Play so many games, asking the person for moves; yield each game that has ended.

        Raises `InputEndedError` where the input ends.
        """
        game = self._game
        base = stream_seed(seed, "evaluation")
        actor = self._policy.evaluation_actor(deterministic, base)
        person, other = game.agents[self._seat], game.agents[1 - self._seat]
        pieces = self._board.pieces
        show(f"you are {person} ({pieces[self._seat]}), against {other} (Ctrl-C ends)\n")
        obs: Any = game.reseed(base)
        for _ in range(count):
            actor.reset(np.ones(2, bool))
            returns, moves, over = np.zeros(2), 0, False
            while not over and moves != max_steps:
                chosen, _ = actor.act(obs, Progress(1, 1))
                action = np.array(chosen)
                if game.acting[self._seat]:
                    show(f"\n{self._text(obs)}\n")
                    action[self._seat] = self._ask(obs[ACTION_MASK][self._seat])
                else:
                    taken = self._board.number(int(action[1 - self._seat]))
                    show(f"{other} plays {taken}\n")
                step = game.step(action)
                obs = step.obs
                returns += step.reward
                moves += 1
                over = bool(step.episodes)
            if over:
                show(f"\n{self._text(step.final_obs)}\n{self._result(returns)}\n")
            else:
                show("stopped by --max-steps\n")
                obs = game.reset()
            yield PlayedGame(float(returns[self._seat]), moves)

    def _text(self, obs: Any) -> str:
        return self._board.text(obs["observation"][self._seat], self._seat)

    def _result(self, returns: Array) -> str:
        ours, theirs = returns[self._seat], returns[1 - self._seat]
        return "a draw" if ours == theirs else "you win" if ours > theirs else "you lose"

    def _ask(self, legal: Array) -> int:
        """Return the action that the person types; asks again until it is a legal one."""
        legal_numbers = sorted(self._board.number(int(a)) for a in np.flatnonzero(legal))
        shown = " ".join(map(str, legal_numbers))
        while True:
            word = _typed(f"your move ({shown}): ")
            if word.isdecimal() and int(word) in legal_numbers:
                return self._board.action(int(word))
            show(f"{word!r} is no legal move\n")


def _typed(prompt: str) -> str:
    """Return a line of the input."""
    show(prompt)
    try:
        line = sys.stdin.readline() if sys.stdin is not None else ""
    except UnicodeDecodeError:
        return "?"
    if not line:
        show("\n")
        raise InputEndedError
    return line.strip()
