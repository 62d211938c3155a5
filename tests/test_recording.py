"""Videos of evaluations during training: what they show, and that training is the same."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from conftest import MakeConfig
from rl_training import PPO
from rl_training.config import TrainConfig
from rl_training.errors import UserError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime import recording, video
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, differences, final_state, metric_rows

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("PIL")


def train(config: TrainConfig[Any], **given: Any) -> Path:
    return ExperimentManager.setup(config, **given).train().run_dir


def videos(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "videos").glob("*"))


def learnt(run_dir: Path) -> dict[str, Any]:
    """The last checkpoint, less what names the recordings."""
    state = final_state(run_dir)
    state["config"].pop("record_interval")
    state["training"]["callbacks"].pop("RecordingCallback", None)
    return state


@pytest.mark.parametrize(
    "settings",
    [
        {"algo": "recurrent_ppo", "eval_deterministic": False, "normalize_obs": True},
        pytest.param({"algo": "ppo", "vectorization": "async"}, marks=pytest.mark.full),
        pytest.param({"algo": "ppo", "vectorization": "native"}, marks=pytest.mark.full),
        pytest.param({"algo": "ppo", "shards": 2}, marks=pytest.mark.full),
        pytest.param({"algo": "dqn"}, marks=pytest.mark.full),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_training_is_the_same_bit_for_bit(
    make_config: MakeConfig, settings: dict[str, Any]
) -> None:
    config = make_config(eval_interval=128, eval_episodes=1, **settings)
    plain = train(config)
    recorded = train(config.with_overrides(record_interval=256))
    assert metric_rows(recorded) == metric_rows(plain)
    assert differences(learnt(recorded), learnt(plain)) == []
    assert videos(recorded)
    assert not (plain / "videos").exists()


def test_a_video_shows_the_first_episode_of_its_evaluation(make_config: MakeConfig) -> None:
    config = make_config(eval_interval=128, eval_episodes=1, record_interval=200)
    run_dir = train(config)
    lengths = {
        row["step"]: row["eval/length_mean"]
        for row in metric_rows(run_dir)
        if "eval/length_mean" in row
    }
    assert videos(run_dir) == ["step_000000000256.mp4", "step_000000000512.mp4"]
    for step in (256, 512):
        path = run_dir / "videos" / f"step_{step:012d}.mp4"
        frames, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
        assert frames == lengths[step] + 1


def test_a_run_that_is_stopped_while_it_records_records_after_its_resume(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(eval_interval=128, eval_episodes=1, record_interval=256)
    whole = train(config)
    frames = 0

    def captioned(picture: Any, text: str) -> Any:
        nonlocal frames
        frames += 1
        if frames == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return video.captioned(picture, text)

    monkeypatch.setattr(recording, "captioned", captioned)
    result = ExperimentManager.setup(config).train()
    assert result.interrupted
    assert len(videos(result.run_dir)) < len(videos(whole))  # and no partial file
    resume_training(result.run_dir)
    assert videos(result.run_dir) == videos(whole)
    assert_same_run(result.run_dir, whole)


class NoPictures(gym.Env[Any, Any]):
    """An environment that cannot be drawn."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": []}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, True, {}


@pytest.mark.parametrize(
    ("settings", "env_fn", "message"),
    [
        ({}, NoPictures, "NoPictures was made with render_mode None"),
        ({}, lambda: gym.make("CartPole-v1"), "render_mode='rgb_array'"),
        ({"eval_episodes": 0}, None, "eval_episodes: 0"),
        ({"record_interval": -1}, None, "zero or more"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_run(
    make_config: MakeConfig, settings: dict[str, Any], env_fn: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(make_config(**{"record_interval": 128, **settings}), env_fn=env_fn)
    assert not list(make_config().output_dir.glob("*"))


def test_a_missing_extra_and_a_missing_folder_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="record_interval needs a run folder"):
        PPO("CartPole-v1", record_interval=64, progress=False).learn(64, run_dir=None)
    monkeypatch.setattr(video, "_NEEDED", ("no_such_module",))
    with pytest.raises(UserError, match=r"pip install '\.\[video\]'"):
        train(make_config(record_interval=128))


def test_an_env_fn_that_renders_is_recorded(make_config: MakeConfig) -> None:
    config = make_config(record_interval=512, eval_episodes=1)
    run_dir = train(config, env_fn=lambda: gym.make("CartPole-v1", render_mode="rgb_array"))
    assert videos(run_dir) == ["step_000000000512.mp4"]


@pytest.mark.parametrize("how", ["renderer", "link"])
def test_a_recording_that_fails_warns_once_and_training_ends_the_same(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    config = make_config(eval_interval=128, eval_episodes=1)
    plain = train(config)
    (tmp_path / "elsewhere").mkdir()

    def start(trainer: Any, event: Any) -> None:
        if how == "link" and not (trainer.run_dir / "videos").exists():
            (trainer.run_dir / "videos").symlink_to(tmp_path / "elsewhere")

    def fails(picture: Any, text: str) -> Any:
        raise RuntimeError("no pixels")

    if how == "renderer":
        monkeypatch.setattr(recording, "captioned", fails)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_dir = train(config.with_overrides(record_interval=128), callbacks=[start])
    ours = [str(one.message) for one in seen if "no more videos" in str(one.message)]
    assert len(ours) == 1
    assert ("no pixels" if how == "renderer" else "symbolic link") in ours[0]
    assert metric_rows(run_dir) == metric_rows(plain)
    assert not list((tmp_path / "elsewhere").iterdir())
