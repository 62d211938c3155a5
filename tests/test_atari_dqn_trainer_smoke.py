"""DQN on real Atari games through the whole runtime, with each frame stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atari_runs import QUICK_ATARI, assert_policy_works, atari_run
from conftest import MakeConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.workflows import resume_training
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, VectorStep
from state_compare import assert_same_run
from test_resume import run_and_kill

pytest.importorskip("ale_py")
FRAMES = ObsSpec({"": ArraySpec((4, 84, 84), "uint8")})
PUSH = ActionSpec("discrete", (), "int64", nvec=(4,), start=(0,))


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_it_trains_saves_loads_and_evaluates(vectorization: str, make_config: MakeConfig) -> None:
    result = atari_run("dqn", make_config, vectorization=vectorization)
    assert result.metrics["global_step"] == 128
    assert np.isfinite(result.metrics["losses/loss"])
    assert_policy_works(result)


@pytest.mark.parametrize(
    ("vectorization", "knobs", "kill"),
    [
        ("sync", {"num_envs": 3, "n_step": 3, "prioritized": True}, ("step", "1500")),
        ("native", {"num_envs": 2, "double": True, "dueling": True}, ("step", "1500")),
        pytest.param("sync", {}, ("step", "1500"), marks=pytest.mark.full),
        pytest.param("native", {}, ("save", "6"), marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_equals_never_stopped(
    vectorization: str,
    knobs: dict[str, Any],
    kill: tuple[str, str],
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        **QUICK_ATARI["dqn"],
        "vectorization": vectorization,
        "total_timesteps": 1500,  # reports, and so checkpoints, come every thousand
        "checkpoint_interval": 1000,
        "eval_interval": 1000,
        "train_freq": 16,
        "atari": {**QUICK_ATARI["dqn"]["atari"], "seed_interval": 500},
    }
    config = make_config(algo="dqn", **{**settings, **knobs})
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", *kill)
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def test_a_million_transitions_fit_in_eight_gigabytes(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    each = ReplayBuffer.bytes_per_transition(FRAMES, PUSH, frame_stack=4)
    assert each == 84 * 84 + 1 + 8 + 9 <= 7200
    assert each * 1_000_000 < 8e9
    trainer = ExperimentManager.setup(
        make_config(**{"algo": "dqn", **QUICK_ATARI["dqn"], "progress": True})
    )
    trainer.close()
    assert f"replay: 60 transitions x {each:,} bytes" in capsys.readouterr().err


def test_what_real_games_fill_a_replay_with_costs_no_more_than_is_said(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real games with lives and ends, and every stored transition equals what happened."""
    lived: list[tuple[Any, Any, VectorStep]] = []
    real = ReplayBuffer.add

    def add(self: ReplayBuffer, obs: Any, action: Any, record: Any, step: VectorStep) -> None:
        lived.append((obs, action, step))
        real(self, obs, action, record, step)

    monkeypatch.setattr(ReplayBuffer, "add", add)
    config = make_config(
        **{
            "algo": "dqn",
            **QUICK_ATARI["dqn"],
            "atari": {"sticky_actions": 0.0},
            "total_timesteps": 1500,
            "learning_starts": 1499,
            "buffer_size": 1300,
            "eval_episodes": 0,
        }
    )
    trainer: Any = ExperimentManager.setup(config)
    trainer.train()
    replay: ReplayBuffer = trainer.replay
    ends = sum(int((s.terminated | s.truncated).any()) for _, _, s in lived)
    games = sum(len(s.episodes) for _, _, s in lived)
    assert ends > games > 2
    assert replay.nbytes / 1300 < 7200 + 64 * 84 * 84 / 1300  # the pool's first 64 rows included

    cells = np.arange(200, 1500)  # what is still stored, by when it happened
    batch = replay._gather(cells % replay._ring)
    for i, when in enumerate(cells):
        obs, action, step = lived[when]
        assert np.array_equal(batch["obs"][i], obs[0])
        assert batch["actions"][i] == action[0]
        assert batch["rewards"][i] == step.reward[0]
        final: Any = step.final_obs
        assert np.array_equal(batch["next_obs"][i], final[0])
        assert (batch["discounts"][i] == 0) == step.terminated[0]


def test_the_source_hands_frames_over_as_they_are(make_config: MakeConfig) -> None:
    trainer: Any = ExperimentManager.setup(make_config(algo="dqn", **QUICK_ATARI["dqn"]))
    trainer.train()
    assert isinstance(trainer.source.obs, np.ndarray)
    assert trainer.source.obs.dtype == np.uint8
    assert trainer.replay.sample(4, torch.Generator())["obs"].dtype == torch.uint8
