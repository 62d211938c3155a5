"""Games against a pool of snapshots, matches, and how near the result is to optimal play."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from conftest import MakeConfig
from reference_runs import load_script
from rl_training import DQN, IPPO, cli
from rl_training.algorithms.ippo import IPPOConfig
from rl_training.envs.board_games import board_game_of
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.models.cnn.columns import ColumnGameNetwork
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.matches import MatchResult, RuleActor, play_match, rate
from rl_training.runtime.ratings import (
    after_game,
    elo_difference,
    expected_score,
    fitted_rating,
    fitted_ratings,
)
from rl_training.runtime.self_play import SnapshotPool
from rl_training.runtime.workflows import load_policy, resume_training
from rl_training.types import ArraySpec, ObsSpec, Progress
from state_compare import assert_same_run
from test_resume import run_and_kill

pytest.importorskip("pettingzoo")
from pettingzoo import ParallelEnv

from team_envs import Duel, Mortals

TICTACTOE = "pettingzoo:classic/tictactoe_v3"
CONNECT_FOUR = "pettingzoo:classic/connect_four_v3"
START = Progress(0, 1)
EXAMPLE = Path(__file__).parent.parent / "examples" / "kuhn_poker.py"


class Higher(ParallelEnv):  # type: ignore[misc]
    """Both choose 0 or 1 at once, three times; the higher sum wins. Observes (agent, step)."""

    metadata = {"name": "higher"}
    possible_agents = ["x", "y"]

    def __init__(self, x_wins: bool = False) -> None:
        self.x_wins = x_wins

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _seen(self) -> Any:
        return {a: np.array([i, self.count], np.float32) for i, a in enumerate("xy")}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.count, self.sums = ["x", "y"], 0, {"x": 0, "y": 0}
        return self._seen(), {"x": {}, "y": {}}

    def step(self, actions: Any) -> Any:
        self.count += 1
        for agent, action in actions.items():
            self.sums[agent] += int(action)
        over = self.count == 3
        won = 1 if self.x_wins else int(np.sign(self.sums["x"] - self.sums["y"]))
        rewards = {"x": float(over * won), "y": float(over * -won)}
        ends = dict.fromkeys("xy", over)
        self.agents = [] if over else ["x", "y"]
        return self._seen(), rewards, ends, dict.fromkeys("xy", False), {"x": {}, "y": {}}


def prefer(model: Any, action: int) -> None:
    """Let a model take this action always."""
    last = model.actor.layers[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.fill_(-50.0)
        last.bias[action] = 50.0


def trainer_of(env_fn: Callable[[], Any], make_config: MakeConfig, **settings: Any) -> Any:
    config = make_config(
        **{
            "algo": "ippo", "num_envs": 4, "num_steps": 30, "num_minibatches": 1,
            "opponents": "pool", "pool_fraction": 1.0, **settings,
        }
    )  # fmt: skip
    return ExperimentManager.setup(config, env_fn=env_fn, run_dir=None)


def by_team(buffer: Any, name: str) -> Any:
    return getattr(buffer, name).numpy().reshape(30, 4, 2)


# -- rows of snapshots -----------------------------------------------------------------------------


@pytest.mark.parametrize("env_fn", [Higher, functools.partial(Duel, length=6)])
@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_a_snapshot_has_one_seat_and_its_rows_are_not_learnt_from(
    algo: str, env_fn: Callable[[], Any], make_config: MakeConfig
) -> None:
    trainer = trainer_of(env_fn, make_config, algo=algo)
    taken = trainer.source.collect(trainer.buffer, 30, START)
    length = 3 if env_fn is Higher else 6
    games = by_team(trainer.buffer, "valid").reshape(30 // length, length, 4, 2)
    learnt = games.any(1)  # (games, environments, seats)
    assert (learnt.sum(-1) == 1).all()  # one seat of each game is the learner's
    assert 0.2 < learnt[..., 0].mean() < 0.8
    turns = length if env_fn is Higher else length // 2
    assert taken.steps == turns * 4 * 30 // length
    trainer.learner.prepare(trainer.buffer, START)
    learnt_rows = trainer.buffer.learnt.numpy().reshape(30, 4, 2)
    assert not (learnt_rows & ~by_team(trainer.buffer, "valid")).any()
    trainer.close()


def test_snapshots_act_with_their_own_weights_and_are_rated(make_config: MakeConfig) -> None:
    trainer = trainer_of(Higher, make_config, pool_fraction=0.5)
    source = trainer.source
    prefer(trainer.learner.model, 0)
    source.pool.update(0, set())  # a snapshot that takes action 0
    prefer(trainer.learner.model, 1)
    source.collect(trainer.buffer, 30, START)
    valid, actions = by_team(trainer.buffer, "valid"), by_team(trainer.buffer, "actions")
    assert (actions[valid] == 1).all()
    assert (actions[~valid] == 0).all()
    against = ~valid.reshape(10, 3, 4, 2).all((1, 3))  # games with a snapshot
    assert 0.2 < against.mean() < 0.8
    # The learner won each of them: ratings from the formula, one game after the other.
    assert list(source.pool.results) == [1.0] * int(against.sum())
    ours = theirs = 1000.0
    for _ in range(int(against.sum())):
        ours, theirs = after_game(ours, theirs, 1.0)
    assert source.pool.rating == ours
    assert source.pool.snapshots[0].rating == theirs
    assert source.metrics()["self_play/win_rate"] == 1.0
    assert source.metrics()["self_play/elo"] == ours
    trainer.close()


def test_a_step_of_a_snapshot_changes_no_gradient(make_config: MakeConfig) -> None:
    def gradient(poison: float) -> Any:
        trainer = trainer_of(Higher, make_config)
        buffer, learner = trainer.buffer, trainer.learner
        trainer.source.collect(buffer, 30, START)
        learner.prepare(buffer, START)
        for name in ("logprobs", "values", "advantages", "returns", "obs"):
            getattr(buffer, name)[~buffer.valid] = poison
        (batch,) = next(iter(learner.epoch([buffer], 1)))
        learner.module.zero_grad()
        parts = torch.autograd.grad(learner.loss(batch)["loss"], [*learner.module.parameters()])
        trainer.close()
        return torch.cat([part.flatten() for part in parts])

    torch.testing.assert_close(gradient(0.0), gradient(50.0), rtol=0, atol=1e-6)


# -- the pool --------------------------------------------------------------------------------------


def pool_of(**settings: Any) -> SnapshotPool:
    model: Any = IPPO(env_fn=Higher, num_envs=1).policy.module
    generator = torch.Generator().manual_seed(3)
    return SnapshotPool(model, IPPOConfig(**settings), generator, torch.device("cpu"))


def test_snapshots_are_made_where_a_multiple_of_the_interval_is_crossed() -> None:
    pool = pool_of(opponents="pool", pool_size=2, snapshot_interval=100)
    for step in (0, 0, 60, 130, 130, 190, 420, 499, 501):
        pool.update(step, {1})
    steps = {number: one.step for number, one in pool.snapshots.items()}
    assert steps == {1: 130, 2: 420, 3: 501}  # 1: a game against it goes on
    assert pool.drawn_from == [2, 3]
    pool.update(600, set())
    assert sorted(pool.snapshots) == [3, 4]


def test_opponents_are_drawn_by_rating() -> None:
    pool = pool_of(opponents="pool", pool_sampling="rating", snapshot_interval=1, pool_fraction=0.8)
    for step in range(3):
        pool.update(step, set())
    for number, rating in enumerate((600.0, 1000.0, 1400.0)):
        pool.snapshots[number].rating = rating
    drawn = np.array([pool.draw() for _ in range(4000)])
    assert np.mean(drawn[:, 0] >= 0) == pytest.approx(0.8, abs=0.03)
    games = drawn[drawn[:, 0] >= 0]
    weights = np.array([1 / 11, 1 / 2, 10 / 11])
    found = [np.mean(games[:, 0] == number) for number in range(3)]
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.03)
    assert np.mean(games[:, 1]) == pytest.approx(0.5, abs=0.03)


def test_ratings() -> None:
    assert expected_score(1400, 1000) == pytest.approx(10 / 11)
    assert after_game(1000, 1000, 1.0) == (1008.0, 992.0)
    assert after_game(1000, 1000, 0.5) == (1000.0, 1000.0)
    assert elo_difference(10 / 11, 100) == pytest.approx(400)
    assert elo_difference(1.0, 200) == pytest.approx(1040.39, abs=0.01)  # 199.5 of 200
    assert elo_difference(0.0, 200) == pytest.approx(-1040.39, abs=0.01)


def test_ratings_of_a_set_explain_its_games() -> None:
    known = np.array([0.0, 400.0, 100.0])
    scores = np.array([[expected_score(a, b) for b in known] for a in known])
    np.testing.assert_allclose(fitted_ratings(scores, 100), known, atol=1e-3)
    found, error = fitted_rating(np.array([expected_score(250, b) for b in known]), known, 100)
    assert found == pytest.approx(250, abs=1e-3)
    # By hand: against one equal player the information of a game is (ln 10 / 400)^2 / 4.
    found, error = fitted_rating(np.array([0.5]), np.zeros(1), 100)
    assert found == pytest.approx(0, abs=1e-3)
    assert error == pytest.approx(34.744, abs=1e-2)
    # Results that contradict each other, by a search for the most likely ratings.
    scores = np.array([[0.5, 0.9, 0.1], [0.1, 0.5, 0.7], [0.9, 0.3, 0.5]])
    ratings = fitted_ratings(scores, 10)

    def likelihood(second: float, third: float) -> float:
        at = np.array([0.0, second, third])
        chances = np.array([[expected_score(a, b) for b in at] for a in at])
        return float((scores * np.log(chances)).sum())

    best = likelihood(ratings[1], ratings[2])
    for step in (-1.0, 1.0):
        assert likelihood(ratings[1] + step, ratings[2]) < best
        assert likelihood(ratings[1], ratings[2] + step) < best
    # A player who wins everything is half a game short of it.
    assert fitted_ratings(np.array([[0.5, 0.0], [1.0, 0.5]]), 200)[1] == pytest.approx(
        1040.39, 1e-4
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IPPO(env_fn=Mortals, opponents="pool").learn(9), "two agents; .* has 3 .a, b, c"),
        (
            lambda: IPPO(env_fn=Higher, opponents="pool", policies="separate").learn(9),
            "needs agents that share a policy: use policies: shared",
        ),
        (lambda: IPPO(env_fn=Higher, opponents="pool", shards=2).learn(9), "runs in one shard"),
        (lambda: IPPO(TICTACTOE, pool_fraction=0.0), "'algo_kwargs.pool_fraction' must be above 0"),
        (lambda: IPPO(TICTACTOE, snapshot_interval=0), "snapshot_interval' must be at least 1"),
        (lambda: IPPO(TICTACTOE, opponents="past"), "'algo_kwargs.opponents' must be"),
        (lambda: DQN(TICTACTOE, opponents="pool"), "'opponents'"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


# -- exact resume ----------------------------------------------------------------------------------


def test_killed_and_resumed_equals_never_stopped(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        algo="ippo", env_id=TICTACTOE, opponents="pool", pool_sampling="rating", pool_size=3,
        snapshot_interval=150, total_timesteps=500, checkpoint_interval=100, eval_episodes=0,
        normalize_obs=True,
    )  # fmt: skip
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "300")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


class Interrupt(Callback):
    def on_step(self, trainer: Any, event: Any) -> None:
        if event.step >= 330:
            trainer.stopping.signals.received = "SIGTERM"


def test_stopped_within_a_rollout_it_resumes_exactly(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        algo="mappo", opponents="pool", pool_fraction=0.9, snapshot_interval=60,
        total_timesteps=400, eval_episodes=0, normalize_reward=True,
    )  # fmt: skip
    whole = ExperimentManager.setup(config, env_fn=Duel).train()
    part = config.with_overrides(output_dir=tmp_path / "part")
    stopped = ExperimentManager.setup(part, callbacks=[Interrupt()], env_fn=Duel).train()
    assert stopped.interrupted
    resume_training(stopped.run_dir, env_fn=Duel)
    assert_same_run(whole.run_dir, stopped.run_dir)


# -- matches ---------------------------------------------------------------------------------------


def always(action: int) -> IPPO:
    model = IPPO(env_fn=Higher, num_envs=1)
    prefer(model.policy.module, action)
    return model


def by_seat(result: MatchResult) -> list[Any]:
    return [dataclasses.astuple(seat) for seat in result.seats]


def test_games_are_counted_by_seat() -> None:
    one, zero = always(1).policy, always(0).policy
    result = play_match(one, zero, 30, env_fn=Higher)
    assert by_seat(result) == [("x", 15, 0, 0), ("y", 15, 0, 0)]
    assert result.score == 1.0
    assert play_match(zero, one, 5, env_fn=Higher).counts() == (0, 0, 5)
    assert play_match(one, one, 5, env_fn=Higher).counts() == (0, 5, 0)
    fixed = play_match(zero, one, 30, env_fn=functools.partial(Higher, x_wins=True))
    assert by_seat(fixed) == [("x", 15, 0, 0), ("y", 0, 0, 15)]
    assert fixed.elo_difference == 0
    # A random player takes three ones in a row in an eighth of the games.
    won, drawn, _ = play_match(one, "random", 800, env_fn=Higher).counts()
    assert won / 800 == pytest.approx(7 / 8, abs=0.04)
    assert won + drawn == 800


def test_a_policy_is_rated_against_a_fixed_set() -> None:
    one, zero = always(1).policy, always(0).policy
    rating = rate(one, [zero, "random"], 200, env_fn=Higher)
    assert rating.opponents[0] == 0
    assert 200 < rating.opponents[1] < rating.elo
    assert [match.counts()[2] for match in rating.matches] == [0, 0]
    # The ratings of the set do not depend on who is rated.
    again = rate(zero, [zero, "random"], 200, seed=one.config.seed, env_fn=Higher)
    assert again.opponents == rating.opponents
    assert again.elo < 100
    assert again.matches[0].counts() == (0, 200, 0)
    assert 0 < rating.standard_error < 200
    with pytest.raises(ConfigError, match="at least one opponent"):
        rate(one, [], env_fn=Higher)


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (lambda: play_match(always(1).policy, "rule", env_fn=Higher), "rule player plays tic-tac"),
        (lambda: play_match(always(1).policy, "expert", env_fn=Higher), "no opponent 'expert'"),
        (lambda: play_match(always(1).policy, "random", 0, env_fn=Higher), "at least 1; got 0"),
        (
            lambda: play_match(IPPO(TICTACTOE).policy, IPPO(CONNECT_FOUR).policy),
            "the opponent was trained on pettingzoo:classic/connect_four_v3",
        ),
        (lambda: play_match(IPPO(env_fn=Mortals).policy, "random", env_fn=Mortals), "has 3"),
    ],
)
def test_matches_that_cannot_be_played(play: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        play()


def connect_four(*rows: str) -> Any:
    """A board of the lowest rows; x: the agent's own pieces, o: the other's."""
    text = [*["......."] * (6 - len(rows)), *rows]
    cells = np.array([list(row) for row in text])
    return np.stack([cells == "x", cells == "o"], -1).astype(np.int8)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (["ooo....", "xxx...."], {3}),  # x wins below, where o would win above
        (["x......", "x......", "x..ooo."], {0}),  # a win before a block
        ([".......", "xx.ooo."], {2, 6}),
        (["...x...", "..xo...", ".xoo...", ".oox..."], {0}),  # a diagonal
        ([".xxx...", ".oxo..."], {0, 1, 2, 3, 4, 5, 6}),  # a piece would drop lower
    ],
)
def test_the_rule_player(rows: list[str], columns: set[int]) -> None:
    game = board_game_of({"name": "connect_four_v3"})
    assert game is not None
    actor = RuleActor(game, torch.Generator().manual_seed(1))
    boards = np.repeat(connect_four(*rows)[None], 60, 0)
    legal = np.ones((60, 7), bool)
    chosen, _ = actor.act({"observation": boards, "action_mask": legal}, START)
    assert set(chosen.tolist()) == columns


# -- on the command line ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = IPPO(
        TICTACTOE, num_envs=2, num_steps=16, output_dir=tmp_path_factory.mktemp("runs"),
        progress=False, tensorboard=False, eval_episodes=0,
    )  # fmt: skip
    folder = model.learn(64).run_dir
    assert folder is not None
    return folder


def call(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


def test_eval_against(run: Path, capsys: Any) -> None:
    assert call("eval", run, "--against", "rule", "--num-episodes", "40", "--json") == 0
    first, *seats, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    result = play_match(load_policy(run), "rule", 40)
    assert (found["won"], found["drawn"], found["lost"]) == result.counts()
    assert f"{found['won']} won, {found['drawn']} drawn, {found['lost']} lost of 40" in first
    assert [line.split(":")[0] for line in seats] == ["  as player_1", "  as player_2"]
    assert call("eval", run, "--against", run, "--num-episodes", "10") == 0
    capsys.readouterr()
    words = ("eval", run, "--against", "random", "rule", "--num-episodes", "20", "--json")
    assert call(*words) == 0
    *_, line, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["opponents"]["random"] == 0 < found["opponents"]["rule"]
    assert line.startswith(f"Elo {found['elo']:.0f} +/- ")
    assert line.endswith(f"where random 0, rule {found['opponents']['rule']:.0f}")
    assert [one["against"] for one in found["matches"]] == ["random", "rule"]
    assert call("eval", run, "--against", "rule", "rule") == 2
    assert "named twice: rule rule" in capsys.readouterr().err
    assert call("eval", run, "--against") == 2
    assert "--against names no opponent" in capsys.readouterr().err
    assert call("eval", run, "--against", "rulr") == 2
    assert "no run or checkpoint 'rulr'" in capsys.readouterr().err


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_person_plays_in_the_terminal(
    run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "".join(f"{word}\n" for word in ("ten", "0", *"512346789")))
    assert call("play", run, "--seat", "player_1", "--json") == 0
    shown = capsys.readouterr().out
    assert "you are player_1 (X), against player_2" in shown
    assert "1 2 3\n4 5 6\n7 8 9\nyour move (1 2 3 4 5 6 7 8 9)" in shown
    assert "'ten' is no legal move" in shown
    assert "'0' is no legal move" in shown
    result = {"you win": 1.0, "you lose": -1.0, "a draw": 0.0}
    (ended,) = [line for line in shown.splitlines() if line in result]
    last = json.loads(shown.splitlines()[-1])
    assert last["episodes"][0]["return"] == result[ended]
    assert "X" in shown.split("player_2 plays")[1]


def test_the_second_seat_and_the_end_of_the_input(
    run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "")
    assert call("play", run, "--seat", "player_2") == 0
    captured = capsys.readouterr()
    assert "player_1 plays" in captured.out.split("your move")[0]
    assert "the input ended" in captured.err
    for seat, message in (("player_3", "must be player_1 or player_2, or none"), ("", "must be")):
        assert call("play", run, "--seat", seat) == 2
        assert message in capsys.readouterr().err
    assert call("play", "CartPole-v1", "--seat", "player_1") == 2
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pytest.importorskip("pygame")
    assert call("play", run, "--seat", "none", "--max-steps", "2") == 0
    assert "in 2 steps (stopped by --max-steps)" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_in_a_real_terminal_ctrl_c_ends_the_game(run: Path) -> None:
    outside, inside = pty.openpty()
    words = [sys.executable, "-m", "rl_training.cli", "play", str(run)]
    child = subprocess.Popen(words, stdin=inside, stdout=inside, stderr=inside, close_fds=True)
    os.close(inside)
    seen = b""
    try:
        while b"9): " not in seen:
            seen += os.read(outside, 4096)
        os.write(outside, b"5\n")
        while seen.count(b"your move") < 2:
            seen += os.read(outside, 4096)
        time.sleep(0.2)  # it waits for input
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        seen += os.read(outside, 4096)
    finally:
        child.kill()
        os.close(outside)
    assert seen.rstrip().endswith(b"stopped")
    assert b"Traceback" not in seen


def test_connect_four_as_text() -> None:
    game = board_game_of({"name": "connect_four_v3"})
    assert game is not None
    shown = game.text(connect_four("x......", "o.x...."), 1).splitlines()
    assert shown[-3:] == ["O . . . . . .", "X . O . . . .", "1 2 3 4 5 6 7"]
    assert [game.number(action) for action in range(7)] == list(range(1, 8))


# -- the network of connect four -------------------------------------------------------------------

BOARD = ObsSpec({"observation": ArraySpec((6, 7, 2), "int8")})


def threes(columns: list[int]) -> tuple[Any, Any]:
    """Boards with three own pieces in one of these columns and two in another, and the first."""
    pairs = [(three, two) for three in columns for two in range(7) if two != three]
    boards = np.zeros((len(pairs), 6, 7, 2), np.int8)
    for board, (three, two) in zip(boards, pairs, strict=True):
        board[3:, three, 0] = board[4:, two, 0] = 1
    return {"observation": torch.from_numpy(boards)}, torch.tensor([three for three, _ in pairs])


def test_what_is_learnt_of_some_columns_holds_in_others() -> None:
    """Fully connected layers take none of the columns that were never the right ones."""
    torch.manual_seed(2)
    network = ColumnGameNetwork(BOARD, 7)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    boards, columns = threes([0, 1, 2, 4])
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(boards)[0], columns).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    others, expected = threes([3, 5, 6])
    logits, values = network(others)
    assert (logits.argmax(1) == expected).float().mean() > 0.9
    assert values.shape == expected.shape


@pytest.mark.parametrize(
    ("spec", "actions", "window", "message"),
    [
        (BOARD, 42, 4, "an action for each column; got .* and 42 actions"),
        (ObsSpec({"": ArraySpec((7,), "float32")}), 7, 4, "takes one board, .rows, columns, pla"),
        (BOARD, 7, 7, "window = 7 must be at most 6"),
    ],
)
def test_what_is_no_game_of_columns(spec: ObsSpec, actions: int, window: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ColumnGameNetwork(spec, actions, window=window)


# -- optimal play ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kuhn() -> Any:
    return load_script(EXAMPLE)


def optimal(kuhn: Any, a: float) -> dict[tuple[int, str], float]:
    """An equilibrium of Kuhn poker for each a in [0, 1/3] (Kuhn 1950)."""
    first = {(0, ""): a, (1, ""): 0.0, (2, ""): 3 * a}
    called = {(0, "pb"): 0.0, (1, "pb"): a + 1 / 3, (2, "pb"): 1.0}
    second = {(0, "p"): 1 / 3, (1, "p"): 0.0, (2, "p"): 1.0}
    return {**first, **called, **second, (0, "b"): 0.0, (1, "b"): 1 / 3, (2, "b"): 1.0}


def test_exploitability_is_exact(kuhn: Any) -> None:
    for a in (0.0, 0.2, 1 / 3):
        policy = optimal(kuhn, a)
        assert kuhn.exploitability(policy) == pytest.approx(0, abs=1e-12)
        assert kuhn.best_response(policy, 1) == pytest.approx(1 / 18)  # the value of the game
    uniform = dict.fromkeys(optimal(kuhn, 0.0), 0.5)
    assert kuhn.exploitability(uniform) == pytest.approx(11 / 24)
    # Half of the games everything is bet, half of them nothing: the second move of the
    # first player is made only by the policy that passed before.
    bets, passes = (dict.fromkeys(uniform, p) for p in (1.0, 0.0))
    mixed = kuhn.average([bets, passes])
    assert mixed[1, ""] == mixed[1, "b"] == 0.5
    assert mixed[1, "pb"] == 0.0


def test_the_game_is_played_by_its_rules(kuhn: Any) -> None:
    api_test = pytest.importorskip("pettingzoo.test").api_test
    api_test(kuhn.KuhnPoker(), num_cycles=60)
    game = kuhn.KuhnPoker()
    for seed in range(6):
        game.reset(seed=seed)
        for move in (0, 1, 1):  # pass, bet, call
            game.step(move)
        won = 2.0 if game._cards[0] > game._cards[1] else -2.0
        assert game.rewards == {"player_0": won, "player_1": -won}


def test_self_play_comes_nearer_to_optimal_play(kuhn: Any) -> None:
    trainer, _ = kuhn.train(10_000, 1, "pool")
    pool = [kuhn.policy_of(one.module) for one in trainer.source.pool.snapshots.values()]
    trainer.close()
    assert kuhn.exploitability(pool[0]) > 0.44  # as random play
    assert kuhn.exploitability(kuhn.average(pool)) < 0.2
