"""What one does with a checkpoint: evaluate, predict, resume; and what is refused."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint, save_checkpoint
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runs import read_json
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import Trainer
from rl_training.runtime.workflows import evaluate_checkpoint, load_policy, resume_training
from rl_training.types import Progress


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_checkpoint_evaluates_the_same_each_time(env_id: str, make_config: MakeConfig) -> None:
    result = train_ppo(make_config(env_id=env_id, normalize_obs=True))
    a = evaluate_checkpoint(result.run_dir, num_episodes=3)
    b = evaluate_checkpoint(result.checkpoint_path, num_episodes=3)
    assert a == b
    assert len(a.returns) == 3
    other = evaluate_checkpoint(result.run_dir, num_episodes=3, seed=99)
    assert other.returns != a.returns
    sampled = evaluate_checkpoint(result.run_dir, num_episodes=3, deterministic=False)
    assert sampled.returns != a.returns
    with pytest.raises(ConfigError, match="num_episodes"):
        evaluate_checkpoint(result.run_dir, num_episodes=0)


def test_a_loaded_policy_acts_as_the_trained_one_did(make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(env_id="Pendulum-v1", normalize_obs=True))
    result = trainer.train()
    policy = load_policy(result.run_dir)
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    actor = trainer.spec.eval_actor(trainer.algorithm, trainer.device, None)
    action, _ = actor.act(obs, Progress(1, 1))
    expected = trainer.source.info.action_spec.to_env(action)
    assert np.array_equal(policy.act(obs), expected)
    # One row and five go through other matrix kernels: equal up to rounding.
    assert np.allclose(policy.act(obs[0]), expected[0], atol=1e-6)
    space = gym.make("Pendulum-v1").action_space
    assert space.contains(policy.act(obs[0]))
    assert space.contains(policy.act(obs[0], deterministic=False))


def test_normalisation_is_frozen_in_evaluation_and_prediction(make_config: MakeConfig) -> None:
    result = train_ppo(make_config(normalize_obs=True))
    policy = load_policy(result.run_dir)
    before = {k: v.clone() for k, v in policy.algorithm.module.state_dict().items()}
    assert float(before["norm.leaf0.count"]) == 512
    policy.act(np.ones((4, 4), np.float32))
    policy.evaluate(2)
    after = policy.algorithm.module.state_dict()
    assert all(bool((after[k] == v).all()) for k, v in before.items())


def test_a_policy_file_without_training_state_cannot_be_resumed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    from rl_training.api import PPO

    model = PPO(make_config())
    model.learn()
    path = model.save(tmp_path / "policy")
    assert "training" not in load_checkpoint(path)
    with pytest.raises(CheckpointError, match="not resumed"):
        resume_training(path)
    assert evaluate_checkpoint(path, num_episodes=2) == model.evaluate(2)


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        evaluate_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        resume_training(tmp_path)


def test_training_threads_are_restored_and_recorded(make_config: MakeConfig) -> None:
    # Short: threads that wait for each other on a busy machine are slow.
    config = make_config(torch_threads=2, total_timesteps=128, update_epochs=1, eval_episodes=0)
    result = train_ppo(config)
    assert load_checkpoint(result.checkpoint_path)["training"]["counters"]["threads"] == 2
    trainer = ExperimentManager.resume(result.run_dir, total_timesteps=640)
    assert trainer.threads == 2
    trainer.close()


def test_changed_versions_are_warned_of(make_config: MakeConfig) -> None:
    result = train_ppo(make_config())
    path = result.run_dir / "metadata.json"
    path.write_text(path.read_text().replace('"numpy": "', '"numpy": "0.'))
    with pytest.warns(UserWarning, match="versions differ.*numpy"):
        ExperimentManager.resume(result.run_dir, total_timesteps=640).close()


def test_a_checkpoint_outside_its_run_folder_is_not_resumed_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    result = train_ppo(make_config())
    copy = tmp_path / "elsewhere" / "mine.pt"
    copy.parent.mkdir()
    copy.write_bytes(result.checkpoint_path.read_bytes())
    with pytest.raises(CheckpointError, match="outside its run folder"):
        resume_training(copy)
    assert evaluate_checkpoint(copy, num_episodes=1).returns


def test_a_run_in_progress_cannot_be_resumed_by_another(make_config: MakeConfig) -> None:
    messages = []

    class Intruder(Callback):
        def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
            with pytest.raises(UserError) as caught:
                ExperimentManager.resume(trainer.run_dir).train()
            messages.append(str(caught.value))

    result = train_ppo(make_config(total_timesteps=128), callbacks=[Intruder()])
    assert len(messages) == 1
    assert "trained by another process" in messages[0]
    assert resume_training(result.run_dir, total_timesteps=256).metrics["global_step"] == 256


def test_what_cannot_be_resumed_exactly_is_said_at_the_start(make_config: MakeConfig) -> None:
    config = make_config(env_id="Pendulum-v1", wrappers=["gymnasium.wrappers:NormalizeReward"])
    with pytest.warns(UserWarning, match="resume of this run will be approximate"):
        trainer = ExperimentManager.setup(config)
    trainer.close()
    assert read_json(trainer.run_dir / "metadata.json")["resume"] == "approximate"


def test_a_policy_trained_on_another_device_loads_here(make_config: MakeConfig) -> None:
    from rl_training.api import PPO

    result = train_ppo(make_config())
    state = load_checkpoint(result.checkpoint_path)
    state["config"]["device"] = "mps"
    path = result.run_dir / "checkpoints" / "mps.pt"
    save_checkpoint(path, state)
    with pytest.raises(ConfigError, match="device: mps"):
        PPO.load(path)
    assert PPO.load(path, device="cpu").act(np.zeros(4)) in (0, 1)
    trainer = ExperimentManager.resume(path, device="cpu", total_timesteps=640)
    assert trainer.train().metrics["global_step"] == 640


def test_keeping_an_annealed_horizon_is_warned_of(make_config: MakeConfig) -> None:
    result = train_ppo(make_config())
    with pytest.warns(UserWarning, match="nothing more is learnt"):
        ExperimentManager.resume(result.run_dir, total_timesteps=640, horizon="keep").close()
