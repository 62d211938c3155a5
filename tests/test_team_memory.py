"""IPPO and MAPPO with memory: one recurrent state per environment and agent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeConfig
from rl_training import IPPO, MAPPO, RecurrentPPO
from rl_training.data.recurrent_rollout_buffer import split_at
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.actors import after_step
from rl_training.types import Progress

pytest.importorskip("pettingzoo")
from team_envs import Duel, Mortals, Recall, SoloCartPole, recall_at_once

START = Progress(0, 1)
SPEAKER = "pettingzoo:mpe2/simple_speaker_listener_v4"
MEMORY: dict[str, Any] = {"memory": "lstm", "lstm_size": 5, "sequence_length": 4}


def test_one_agent_with_memory_is_recurrent_ppo_bit_for_bit() -> None:
    settings: dict[str, Any] = {
        "seed": 5, "num_envs": 4, "num_steps": 32, "progress": False, "lstm_size": 8,
        "sequence_length": 16,
    }  # fmt: skip
    team = IPPO(env_fn=SoloCartPole, memory="lstm", **settings)
    team.learn(512, run_dir=None)
    alone = RecurrentPPO("CartPole-v1", **settings)
    alone.learn(512, run_dir=None)
    ours, theirs = team.policy.module.state_dict(), alone.policy.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_steps_that_a_row_did_not_see_are_left_out() -> None:
    """Two sequences of five steps, worked by hand: see `split_at`."""
    starts = np.zeros((5, 2), bool)
    seen = np.zeros((5, 2), bool)
    starts[0, 0] = starts[3, 0] = True
    seen[[0, 2, 4], 0] = True  # an episode begins in a step in which it waits, step 3
    starts[1, 1] = True
    seen[[3, 4], 1] = True  # the episode at the start ended before its first turn
    segments = split_at(starts, seen)
    columns = [
        [int(row) for row, kept in zip(rows, mask, strict=True) if kept]
        for rows, mask in zip(segments.rows.T, segments.mask.T, strict=True)
    ]
    assert columns == [[0 * 2 + 0, 2 * 2 + 0], [4 * 2 + 0], [3 * 2 + 1, 4 * 2 + 1]]
    assert segments.sequence.tolist() == [0, 0, 1]
    assert segments.leads.tolist() == [True, False, False]


@pytest.mark.parametrize("policies", ["shared", "separate"])
@pytest.mark.parametrize("env_fn", [Mortals, functools.partial(Duel, length=5, cut=True)])
@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_sequences_contain_what_the_actor_saw(
    algo: str, env_fn: Callable[[], Any], policies: str, make_config: MakeConfig
) -> None:
    """What is evaluated over whole sequences is what was computed step by step.

    Over two rollouts, in which episodes end and begin, agents die, appear, and wait.
    """
    config = make_config(
        algo=algo, num_envs=2, num_steps=12, num_minibatches=1, policies=policies, **MEMORY
    )
    trainer: Any = ExperimentManager.setup(config, env_fn=env_fn, run_dir=None)
    trainer.source.actor.record(frozenset({"logprobs", "values"}))
    groups = getattr(trainer.buffer, "groups", {"": trainer.buffer})
    learners = getattr(trainer.learner, "groups", {"": trainer.learner})
    for _ in range(2):
        trainer.buffer.reset()
        trainer.source.collect(trainer.buffer, 12, START)
        for name, buffer in groups.items():
            acted = {key: getattr(buffer, key).clone() for key in ("logprobs", "values")}
            with torch.no_grad():
                found = learners[name].model.evaluate(buffer.whole())
            buffer.recorded = frozenset()
            buffer.keep_evaluation(found.logprob, found.value)
            for key, numbers in acted.items():
                ours = getattr(buffer, key)[buffer.valid]
                torch.testing.assert_close(ours, numbers[buffer.valid], rtol=1e-4, atol=1e-6)
    trainer.close()


def test_a_state_changes_only_when_its_agent_acts(make_config: MakeConfig) -> None:
    config = make_config(algo="ippo", num_envs=2, num_steps=12, num_minibatches=1, **MEMORY)
    trainer: Any = ExperimentManager.setup(config, env_fn=Duel, run_dir=None)
    actor, env = trainer.source.actor, trainer.source.env
    obs = env.reset()
    before = np.zeros((4, 20), np.float32)
    for t in range(11):
        action, _ = actor.act(obs, START)
        step = env.step(action)
        after_step(actor, step)
        after, obs = np.asarray(actor.memory.state), step.obs
        turn = t % 5
        if turn == 4:
            assert not after.any()
        else:
            acts, waits = (0, 1) if turn % 2 == 0 else (1, 0)
            if turn:  # the first observation is zero, and so is the state after it
                assert (after[acts] != before[acts]).any()
            np.testing.assert_array_equal(after[waits], before[waits])
        before = after
    trainer.close()


@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_truncated_games_bootstrap_with_the_state_from_before_the_reset(
    algo: str, make_config: MakeConfig
) -> None:
    """Agent x acts last; y waits, and its state is the one after its last turn."""
    config = make_config(
        algo=algo, num_envs=1, num_steps=8, num_minibatches=1, gamma=0.5, gae_lambda=1.0, **MEMORY
    )
    env_fn = functools.partial(Duel, length=5, cut=True)
    trainer: Any = ExperimentManager.setup(config, env_fn=env_fn, run_dir=None)
    trainer.source.collect(trainer.buffer, 8, START)
    trainer.learner.prepare(trainer.buffer, START)
    buffer, model = trainer.buffer, trainer.learner.model

    def value_after(row: int, turns: list[int]) -> float:
        """The value of the final observation, after the agent's turns, one step at a time."""
        state = torch.zeros(1, model.state_size)
        for t in turns:
            obs = {name: leaf[t, row : row + 1] for name, leaf in buffer.obs.items()}
            _, state, _ = model.act(obs, state)
        index, seen = buffer.truncated_observations()
        at = index.tolist().index(4 * 2 + row)
        obs = {name: leaf[at : at + 1] for name, leaf in seen.obs.items()}
        torch.testing.assert_close(seen.state[at : at + 1], state)
        return float(model.value(type(seen)(obs, state)))

    with torch.no_grad():
        x, y = value_after(0, [0, 2, 4]), value_after(1, [1, 3])
    assert float(buffer.returns[4, 0]) == pytest.approx(1.0 + 0.5 * x, abs=1e-5)
    assert float(buffer.returns[3, 1]) == pytest.approx(0.75 + 0.5 * y, abs=1e-5)
    trainer.close()


def test_restored_states_of_groups_can_be_reset(make_config: MakeConfig) -> None:
    """As on a resume that begins new episodes, before anything was chosen."""
    config = make_config(
        algo="ippo", num_envs=2, num_steps=8, num_minibatches=1, policies="separate", **MEMORY
    )

    def made() -> Any:
        return ExperimentManager.setup(config, env_fn=Mortals, run_dir=None)

    trainer, other = made(), made()
    trainer.source.collect(trainer.buffer, 4, START)
    actor = other.source.actor
    actor.load_state_dict(trainer.source.actor.state_dict())
    states = [one.memory.state for one in actor.actors.values()]
    assert all(np.any(np.asarray(state)) for state in states[1:])  # a is dead
    actor.reset(np.ones(6, bool))
    assert not any(np.any(np.asarray(one.memory.state)) for one in actor.actors.values())
    trainer.close()
    other.close()


@pytest.mark.full
@pytest.mark.parametrize("env_fn", [Recall, recall_at_once])
@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_agents_learn_to_recall(
    algo: str, env_fn: Callable[[], Any], make_config: MakeConfig
) -> None:
    """Without memory the best that can be done is to be right half of the time."""
    plain = make_config(
        algo=algo, num_envs=8, num_steps=36, total_timesteps=24_000, learning_rate=5e-3, gamma=0.9,
        hidden_sizes=[16], eval_episodes=40,
    )  # fmt: skip
    config = plain.with_overrides(memory="lstm", lstm_size=16, sequence_length=12)
    result = ExperimentManager.setup(config, env_fn=env_fn, run_dir=None).train()
    assert result.metrics["eval/return_min"] == 2.0
    result = ExperimentManager.setup(plain, env_fn=env_fn, run_dir=None).train()
    assert abs(result.metrics["eval/return_mean"]) < 1.0


@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_shards_in_one_process_with_memory(algo: str, make_config: MakeConfig) -> None:
    config = make_config(algo=algo, num_envs=4, shards=2, num_steps=8, total_timesteps=96, **MEMORY)
    result = ExperimentManager.setup(config, env_fn=Mortals, run_dir=None).train()
    assert np.isfinite(result.metrics["losses/loss"])


@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_groups_with_memory(algo: str, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        algo=algo, env_id=SPEAKER, policies="separate", total_timesteps=256, normalize_obs=True,
        **MEMORY,
    )  # fmt: skip
    run = ExperimentManager.setup(config).train().run_dir
    model: Any = (IPPO if algo == "ippo" else MAPPO).load(run)
    obs = {"speaker_0": np.ones(3, np.float32), "listener_0": np.ones((2, 11), np.float32)}
    actions, state = model.predict(obs)
    assert np.shape(actions["speaker_0"]) == ()
    assert state["listener_0"].shape == (2, 20)
    _, after = model.predict(obs, state)
    assert (after["listener_0"] != state["listener_0"]).any()
    _, again = model.predict(obs, state, episode_start=True)
    np.testing.assert_array_equal(again["speaker_0"], state["speaker_0"])
    with pytest.raises(ConfigError, match="state of speaker_0 has shape"):
        model.predict(obs, {**state, "speaker_0": np.zeros(3)})
    with pytest.raises(ConfigError, match="state must be a dict by group: speaker_0, listener_0"):
        model.predict(obs, np.zeros(20))
    with pytest.raises(ConfigError, match="a recurrent policy has a state"):
        model.act(obs)
    assert model.evaluate(2).mean_return < 0


def test_predict_needs_no_state_of_the_team(make_config: MakeConfig, tmp_path: Path) -> None:
    """And it is exported: the file chooses what `predict` chooses, which `export` compares."""
    config = make_config(algo="mappo", total_timesteps=192, agent_id=True, **MEMORY)
    model: Any = MAPPO.load(ExperimentManager.setup(config).train().run_dir)
    obs = {"observation": np.ones((2, 18), np.float32), "agent": np.array([0, 2])}
    actions, state = model.predict(obs)
    assert actions.shape == (2,)
    assert (state[:, :10] != 0).any()
    assert not state[:, 10:].any()  # the memory of the critic, which needs the team's state
    assert model.export(tmp_path / "file", "torch").folder.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 5}, "sequence_length' must be a divisor of num_steps = 16; got 5"),
        ({"network": "module:Class"}, "network' must be unset with memory: lstm"),
        ({"acceleration": "compile"}, "acceleration' must be eager with memory: lstm"),
    ],
)
def test_what_does_not_fit_memory_is_refused(
    settings: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**{"algo": "ippo", "num_steps": 16, **MEMORY, **settings})
