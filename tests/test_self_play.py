"""Games against a pool of snapshots, matches, and how near the result is to optimal play."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pty
import signal
import subprocess
import sys
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
from rl_training.runtime.matches import RuleActor, play_match
from rl_training.runtime.ratings import after_game, elo_difference, expected_score
from rl_training.runtime.self_play import SnapshotPool
from rl_training.runtime.workflows import load_policy, resume_training
from rl_training.types import Progress
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
    last = model.actor[-1] if not hasattr(model.actor, "layers") else model.actor.layers[-1]
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
        snapshot_interval=60, total_timesteps=500, checkpoint_interval=100, eval_episodes=0,
        normalize_obs=True,
    )  # fmt: skip
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "300")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)
