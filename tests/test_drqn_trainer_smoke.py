"""DRQN on the runtime; what it shares with RecurrentPPO is in test_recurrent_ppo_trainer_smoke."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_training
from conftest import MakeConfig
from rl_training import DRQN
from rl_training.cli import main
from rl_training.envs import VectorAdapter
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.drqn_trainer import train_drqn
from rl_training.runtime.workflows import resume_training


def test_it_is_part_of_the_core_surface() -> None:
    assert rl_training.DRQN is rl_training.api.DRQN
    assert rl_training.train_drqn is train_drqn
    assert rl_training.algorithms.DRQN is not DRQN


def test_it_logs_what_it_learns(make_config: MakeConfig) -> None:
    result = train_drqn(make_config(algo="drqn"))
    assert {"losses/loss", "losses/q_mean", "losses/td_error"} <= set(result.metrics)
    assert result.metrics["losses/loss"] > 0


def test_the_target_moves_by_its_interval(make_config: MakeConfig) -> None:
    config = make_config(algo="drqn", total_timesteps=400, target_update_interval_steps=10_000)
    trainer: Any = ExperimentManager.setup(config)
    trainer.train()
    learner = trainer.learner
    assert any(
        not np.array_equal(a.detach(), b)
        for a, b in zip(
            learner.module.parameters(), learner.target.module.parameters(), strict=True
        )
    )
    config = make_config(algo="drqn", total_timesteps=400, target_update_interval_steps=4)
    trainer = ExperimentManager.setup(config)
    trainer.train()
    learner = trainer.learner
    for a, b in zip(learner.module.parameters(), learner.target.module.parameters(), strict=True):
        assert np.array_equal(a.detach(), b)


def test_random_actions_are_seen_by_the_network_all_the_same(make_config: MakeConfig) -> None:
    config = make_config(algo="drqn", exploration_initial_eps=1.0, exploration_final_eps=1.0)
    trainer: Any = ExperimentManager.setup(config)
    trainer.train()
    assert trainer.source.actor.memory.state.any()


def test_it_predicts_saves_and_loads(make_config: MakeConfig, tmp_path: Path) -> None:
    model = DRQN(make_config(algo="drqn"))
    model.learn()
    obs = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    actions, state = model.predict(obs)
    again, after = model.predict(obs, state)
    assert actions.shape == again.shape == (4,)
    assert state.shape == (4, 2 * 16)
    assert not np.allclose(state, after)
    loaded = DRQN.load(model.save(tmp_path / "policy"))
    np.testing.assert_array_equal(loaded.predict(obs)[1], state)
    sampled = [loaded.predict(obs, deterministic=False) for _ in range(3)]
    np.testing.assert_allclose(sampled[0][1], state)


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_the_replay_counts_every_episode_once(vectorization: str, make_config: MakeConfig) -> None:
    """Whether it is reset with its last step, or by a step of its own as in native CartPole."""
    trainer: Any = ExperimentManager.setup(make_config(algo="drqn", vectorization=vectorization))
    assert trainer.source.info.has_invalid_rows == (vectorization == "native")
    begun, is_over = [0, 0], [True, True]
    real = trainer.replay.add

    def add(obs: Any, action: Any, record: Any, step: Any) -> None:
        for env in range(2):
            if step.valid[env] and is_over[env]:
                begun[env] += 1
                is_over[env] = False
            is_over[env] |= bool(step.terminated[env] or step.truncated[env])
        real(obs, action, record, step)

    trainer.replay.add = add
    trainer.train()
    assert min(begun) > 5
    assert trainer.replay.ring_state()["episodes"] == begun


@pytest.mark.parametrize("learning_starts", [0, 64])
def test_it_goes_on_with_an_empty_replay(learning_starts: int, make_config: MakeConfig) -> None:
    """However early it learns: at first the replay holds nothing but burn-in."""
    config = make_config(algo="drqn", learning_starts=learning_starts, burn_in=8)
    result = ExperimentManager.setup(config).train()
    longer = resume_training(result.run_dir, total_timesteps=1024, replay="empty")
    assert longer.metrics["global_step"] >= 1024


def test_an_approximate_resume_begins_new_episodes_in_the_replay(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ExperimentManager.setup(make_config(algo="drqn", buffer_size=1000)).train()
    trainer: Any = ExperimentManager.resume(result.run_dir)
    newest = len(trainer.replay) // trainer.source.info.num_envs - 1
    assert trainer.replay.episode_continues(newest).any()
    trainer.close()
    # The environments show what they showed: nothing but this says that they are others.
    real = VectorAdapter.load_state_dict
    monkeypatch.setattr(VectorAdapter, "load_state_dict", lambda *args: (real(*args)[0], False))
    with pytest.warns(UserWarning, match="this resume is approximate"):
        trainer = ExperimentManager.resume(result.run_dir)
    assert not trainer.replay.episode_continues(newest).any()
    trainer.close()


def test_continuous_actions_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"drqn takes Discrete actions.*recurrent_ppo"):
        ExperimentManager.setup(make_config(algo="drqn", env_id="Pendulum-v1"))


def test_the_command_line_trains_both_presets(tmp_path: Path) -> None:
    flags = ["--total-timesteps", "1500", "--output-dir", str(tmp_path), "--eval-episodes", "2"]
    for preset in ("drqn/cartpole", "drqn/cartpole_masked"):
        assert main(["train", preset, *flags]) == 0
    assert len(list(tmp_path.iterdir())) == 2
