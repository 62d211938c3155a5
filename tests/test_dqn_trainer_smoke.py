"""The off-policy runtime by way of DQN: what is owed, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import MakeConfig, probe
from rl_training.checkpointing import load_checkpoint
from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training
from state_compare import assert_same_run
from test_resume import run_and_kill


def updates_of(config: TrainConfig[Any]) -> int:
    trainer = ExperimentManager.setup(config)
    count = 0

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            done = function(*args, **kwargs)
            count += done
            return done

        return counted if part == "update" else function

    trainer.measure(timed)
    trainer.train()
    return count


@pytest.mark.filterwarnings("ignore:nothing will be learnt")
@pytest.mark.parametrize(
    ("num_envs", "train_freq", "gradient_steps", "expected"),
    # gradient_steps for every crossing of a multiple of train_freq in (104, 504].
    [
        (1, 1, 1, 400),
        (1, 10, 0.3, 12),
        (3, 4, 1, 100),
        (3, 10, 0.3, 12),
        (3, 5, -1, 400),
        (3, 1000, 7, 0),
        (8, 1, 1, 400),
        (8, 16, 2, 50),
        (8, 10, 0.3, 12),
    ],
)
def test_updates_owed_are_exact_for_any_number_of_environments(
    num_envs: int, train_freq: int, gradient_steps: float, expected: int, make_config: MakeConfig
) -> None:
    config = make_config(
        algo="dqn",
        num_envs=num_envs,
        total_timesteps=504,
        learning_starts=104,
        train_freq=train_freq,
        gradient_steps=gradient_steps,
        batch_size=2,
        eval_episodes=0,
    )
    assert updates_of(config) == expected


@pytest.mark.filterwarnings("ignore:nothing will be learnt")
def test_warm_up_is_random_and_learns_nothing(make_config: MakeConfig) -> None:
    config = make_config(algo="dqn", learning_starts=512, total_timesteps=512)
    assert updates_of(config) == 0


@pytest.mark.parametrize(
    "switches",
    [
        {"double": True, "dueling": True, "n_step": 3, "prioritized": True},
        *(
            pytest.param({name: value}, marks=pytest.mark.full)
            for name, value in (
                ("double", True),
                ("dueling", True),
                ("n_step", 3),
                ("prioritized", True),
            )
        ),
    ],
    ids=lambda s: "+".join(s),
)
def test_killed_and_resumed_equals_never_stopped(
    switches: dict[str, Any], make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        algo="dqn",
        total_timesteps=3000,
        checkpoint_interval=1000,
        eval_interval=1000,
        train_freq=7,
        gradient_steps=0.9,
        **switches,
    )
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "2000")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def test_only_changed_chunks_are_written_and_unnamed_ones_deleted(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.data.transition_ring._CHUNK_BYTES", 4096)
    config = make_config(
        algo="dqn", buffer_size=4000, total_timesteps=4000, checkpoint_interval=1000
    )
    result = ExperimentManager.setup(config).train()
    files = {path.stem for path in (result.run_dir / "replay").iterdir()}
    named = set()
    for name in ("last", "best"):
        state = load_checkpoint(result.run_dir / "checkpoints" / f"{name}.pt")
        named |= set(state["training"]["extra"]["replay"]["chunks"])
    assert files == named
    older = result.run_dir / "checkpoints" / "step_000000003000.pt"
    chunks = load_checkpoint(older)["training"]["extra"]["replay"]["chunks"]
    shared = set(chunks) & files
    assert len(shared) >= len(chunks) - 2
    assert not any(path.suffix == ".pt" for path in (result.run_dir / "replay").iterdir())


def test_a_checkpoint_whose_replay_is_gone_resumes_only_with_an_empty_one(
    make_config: MakeConfig,
) -> None:
    config = make_config(algo="dqn", total_timesteps=3000, checkpoint_interval=1000)
    result = ExperimentManager.setup(config).train()
    older = result.run_dir / "checkpoints" / "step_000000002000.pt"
    with pytest.raises(CheckpointError, match="--replay empty"):
        ExperimentManager.resume(older)
    trainer = ExperimentManager.resume(older, replay="empty")
    assert trainer.train().metrics["global_step"] == 3000
    assert trainer.resumed is not None
    assert trainer.resumed["resume"] == "approximate"


def test_a_damaged_chunk_is_refused(make_config: MakeConfig) -> None:
    result = ExperimentManager.setup(make_config(algo="dqn")).train()
    (chunk,) = (result.run_dir / "replay").iterdir()
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        ExperimentManager.resume(result.run_dir, total_timesteps=1000)
    assert evaluate_checkpoint(result.run_dir, num_episodes=1).returns


def test_what_it_cannot_do_is_refused_clearly(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"not bounded Box ones; use ppo, .*sac"):
        ExperimentManager.setup(make_config(algo="dqn", env_id="Pendulum-v1"))
    with pytest.raises(ConfigError, match=r"transitions x 33 bytes = .* GiB, but only .* GiB"):
        ExperimentManager.setup(make_config(algo="dqn", buffer_size=10**13))
    with pytest.raises(ConfigError, match="buffer_size"):
        make_config(algo="dqn", num_envs=8, buffer_size=4)


def test_native_reset_rows_are_neither_counted_nor_learnt_from(make_config: MakeConfig) -> None:
    config = make_config(algo="dqn", vectorization="native", num_envs=4, total_timesteps=2000)
    result = train_dqn(config)
    assert 2000 <= result.metrics["global_step"] < 2004


def test_sampled_evaluation_is_epsilon_greedy(make_config: MakeConfig) -> None:
    result = train_dqn(make_config(algo="dqn"), exploration_final_eps=1.0)
    greedy = evaluate_checkpoint(result.run_dir, num_episodes=5)
    sampled = evaluate_checkpoint(result.run_dir, num_episodes=5, deterministic=False)
    assert sampled.returns != greedy.returns


def test_two_resumes_of_one_run_leave_a_checkpoint_that_resumes(make_config: MakeConfig) -> None:
    """Each deletes the chunks that only older checkpoints name."""
    config = make_config(algo="dqn", buffer_size=2000, total_timesteps=1000, eval_episodes=0)
    result = ExperimentManager.setup(config).train()
    for total in (2000, 3000):
        ExperimentManager.resume(result.run_dir, total_timesteps=total).train()
    assert resume_training(result.run_dir, total_timesteps=3500).metrics["global_step"] == 3500


def test_a_damaged_best_checkpoint_does_not_stop_a_resumed_run(make_config: MakeConfig) -> None:
    config = make_config(algo="dqn", total_timesteps=2000, **probe("dqn", "ConstantReward"))
    result = ExperimentManager.setup(config).train()
    best = result.run_dir / "checkpoints" / "best.pt"
    content = best.read_bytes()
    best.unlink()
    best.write_bytes(content[: len(content) // 2])
    (result.run_dir / "replay" / ".torn-1.tmp").write_bytes(b"x")
    with pytest.warns(UserWarning, match="replay files are no longer deleted"):
        longer = resume_training(result.run_dir, total_timesteps=3000)
    assert longer.metrics["global_step"] == 3000
    assert not list((result.run_dir / "replay").glob(".*.tmp"))


class Stateful(gym.Env[Any, Any]):
    """Counts over its whole life, so that a resumed copy stands elsewhere."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    lives = 0

    def __init__(self) -> None:
        Stateful.lives += 1
        self.count = 10_000 * Stateful.lives

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.array([self.count], np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.array([self.count], np.float32), 1.0, False, False, {}


@pytest.mark.filterwarnings("ignore:the environments could not be restored")
def test_an_inexact_resume_splices_no_episodes(make_config: MakeConfig) -> None:
    config = make_config(
        algo="dqn", buffer_size=4000, total_timesteps=1000, eval_episodes=0, n_step=2
    )
    result = ExperimentManager.setup(config, env_fn=Stateful).train()
    trainer = ExperimentManager.resume(result.run_dir, total_timesteps=2000, env_fn=Stateful)
    assert isinstance(trainer, OffPolicyTrainer)
    trainer.train()
    batch = trainer.replay.sample(4000, torch.Generator().manual_seed(0))
    apart = (batch["next_obs"] - batch["obs"]).flatten()
    assert set(apart.tolist()) == {1.0, 2.0}
    assert len(trainer.replay) == 2000
