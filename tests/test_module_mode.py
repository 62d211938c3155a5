"""Acting and evaluation in eval mode, learning in train mode, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_training.checkpointing import load_checkpoint, state_digest
from rl_training.config import TrainConfig
from rl_training.runtime import resume_training
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer
from rl_training.types import Progress

KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2},
    "a2c": {"num_steps": 16},
    "dqn": {"target_update_interval_steps": 40, "train_freq": 4},
    "sac": {},
    "td3": {},
}


def config_of(algo: str, folder: Path, **overrides: Any) -> TrainConfig[Any]:
    """A short run whose networks have dropout and batch normalisation."""
    knobs = {"encoder": "mode_encoder:ModeEncoder", "hidden_sizes": (8,), **KNOBS[algo]}
    if algo not in ("ppo", "a2c"):
        knobs |= {"learning_starts": 20, "buffer_size": 400, "batch_size": 16}
    settings = {
        "algo": algo,
        "env_id": "Pendulum-v1" if algo in ("sac", "td3") else "CartPole-v1",
        "num_envs": 2,
        "total_timesteps": 128,
        "eval_episodes": 1,
        "eval_interval": 64,
        "progress": False,
        "tensorboard": False,
        "torch_threads": 1,
        "output_dir": folder,
        "algo_kwargs": knobs,
    }
    return TrainConfig(**{**settings, **overrides})


def statistics(module: nn.Module) -> list[Tensor]:
    """Copies of the buffers of batch normalisation."""
    return [
        buffer.clone()
        for part in module.modules()
        if isinstance(part, nn.BatchNorm1d)
        for buffer in part.buffers()
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("algo", KNOBS)
def test_statistics_move_in_learning_alone(algo: str, tmp_path: Path) -> None:
    trainer: Any = ExperimentManager.setup(config_of(algo, tmp_path))
    module = trainer.learner.module
    assert not any(part.training for part in module.modules())
    before = statistics(module)
    assert before
    buffer = getattr(trainer, "buffer", None) or trainer.replay
    trainer.source.collect(buffer, 16, Progress(100, 200))
    assert same(statistics(module), before)
    trainer.learner.learn(buffer, Progress(100, 200), updates=2)
    moved = statistics(module)
    assert not same(moved, before)
    assert not any(part.training for part in module.modules())
    trainer.source.collect(_Dropped(), 4, Progress(100, 200))
    assert same(statistics(module), moved)
    trainer.close()


class _Dropped:
    """A buffer that stores nothing."""

    def add(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_targets_take_the_statistics_over(algo: str, tmp_path: Path) -> None:
    trainer: Any = ExperimentManager.setup(config_of(algo, tmp_path))
    trainer.source.collect(trainer.replay, 30, Progress(0, 200))
    learner = trainer.learner
    # DQN's target moves where its interval is crossed, TD3's with the policy.
    for step in (41, 85):
        learner.learn(trainer.replay, Progress(step, 200), updates=2)
    pairs = {
        "dqn": lambda: [(learner.module, learner.target)],
        "sac": lambda: [(learner.model.critics, learner.target)],
        "td3": lambda: [
            (learner.model.critics, learner.target_critics),
            (learner.model.actor, learner.target_actor),
        ],
    }[algo]()
    for network, target in pairs:
        assert same(statistics(network), statistics(target.module))
        assert float(statistics(target.module)[0].abs().sum()) > 0  # zero at the start
        assert not any(part.training for part in target.module.modules())
    trainer.close()


class StopHalfway(Callback):
    """Ends a run in the middle."""

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        if event.step >= 64:
            trainer.request_stop("halfway")


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_run_with_dropout_resumes_exactly(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.runtime.off_policy._ITERATION", 64)
    config = config_of(algo, tmp_path)
    whole = ExperimentManager.setup(config).train()
    half = ExperimentManager.setup(config, callbacks=[StopHalfway()]).train()
    assert half.stop_reason == "halfway"
    rest = resume_training(half.run_dir, trust=True)
    ends = [load_checkpoint(run.checkpoint_path)["algorithm"] for run in (whole, rest)]
    assert state_digest(ends[0]) == state_digest(ends[1])


def test_evaluation_sees_no_dropout(tmp_path: Path) -> None:
    trainer: Any = ExperimentManager.setup(config_of("ppo", tmp_path))
    obs = torch.randn(64, 4)
    first, _ = trainer.learner.model.policy(obs)
    second, _ = trainer.learner.model.policy(obs)
    assert torch.equal(first, second)
    trainer.close()
