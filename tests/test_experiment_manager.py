"""`ExperimentManager`: run folders, resumes and their lineage, weights from elsewhere."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probe_envs
from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint, save_checkpoint, state_digest, to_storable
from rl_training.config import TrainConfig, config_from_file
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime import Callback, Trainer, resume_training
from rl_training.runtime.callbacks import IterationEnd
from rl_training.version import __version__

Config = Callable[..., TrainConfig[Any]]


class StopAt(Callback):
    """Ends a run before its total."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        if event.step >= self.step:
            trainer.request_stop("far enough")


@pytest.fixture
def quick(make_config: MakeConfig) -> Config:
    """Configs of CartPole whose iterations have 128 steps; four of them in a run."""

    def make(**overrides: Any) -> TrainConfig[Any]:
        return make_config(**{"env_id": "CartPole-v1", "update_epochs": 1, **overrides})

    return make


def read(path: Path) -> dict[str, Any]:
    """A JSON file."""
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def steps(run_dir: Path) -> list[int]:
    """The steps of the rows that iterations wrote."""
    return [row["step"] for row in lines(run_dir)[1:] if "losses/loss" in row]


def learning_rates(run_dir: Path) -> list[float]:
    """The learning rate of every iteration."""
    rows = lines(run_dir)[1:]
    return [row["losses/learning_rate"] for row in rows if "losses/learning_rate" in row]


def weights(trainer: Trainer) -> str:
    """A digest of the networks."""
    return state_digest(to_storable(trainer.algorithm.module.state_dict()))


# -- a new run -------------------------------------------------------------------------------------


def test_set_up_makes_a_run_folder_that_describes_the_run(quick: Config) -> None:
    config = quick(env_kwargs={"sutton_barto_reward": True}, gamma=0.9)
    trainer = ExperimentManager.setup(config)
    trainer.close()
    assert trainer.run_dir.parent == config.output_dir
    assert sorted(path.name for path in trainer.run_dir.iterdir()) == [
        "config.yaml",
        "metadata.json",
    ]
    assert config_from_file(trainer.run_dir / "config.yaml") == config

    metadata = read(trainer.run_dir / "metadata.json")
    assert metadata["format"] == 1
    assert (metadata["algo"], metadata["env_id"], metadata["seed"]) == ("ppo", "CartPole-v1", 7)
    assert metadata["command"] == sys.argv
    assert metadata["versions"] == {
        "rl_training": __version__,
        "python": platform.python_version(),
        **{
            name: importlib.metadata.version(name)
            for name in ("torch", "numpy", "gymnasium", "mujoco", "box2d", "ale-py")
            if _is_installed(name)
        },
    }
    assert metadata["hardware"]["cpu_count"] == os.cpu_count()
    assert metadata["hardware"]["machine"] == platform.machine()
    assert metadata["resumes"] == []
    assert (metadata["device"], metadata["torch_threads"]) == ("cpu", 1)
    assert metadata["resume"] == "exact"
    assert metadata["env_fn"] is None


def test_what_made_the_environments_is_noted(quick: Config) -> None:
    def name_of(env_fn: Any) -> str:
        trainer = ExperimentManager.setup(quick(), env_fn=env_fn)
        trainer.close()
        return str(read(trainer.run_dir / "metadata.json")["env_fn"])

    def make(length: int, wide: bool = False) -> Any:
        return probe_envs.DelayedReward()

    assert name_of(probe_envs.DelayedReward) == "probe_envs.DelayedReward"
    assert name_of(functools.partial(make, 3, wide=True)).endswith("make(3, wide=True)")
    first = name_of(lambda: make(1))
    second = name_of(lambda: make(2))
    assert ".<lambda>:" in first
    assert first != second


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_of_the_users_code_is_noted(
    quick: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.delenv("GIT_DIR", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def commit() -> Any:
        trainer = ExperimentManager.setup(quick())
        trainer.close()
        return read(trainer.run_dir / "metadata.json")["git_commit"]

    assert commit() is None

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--no-gpg-sign", "-m", "first")
    assert commit() == git("rev-parse", "HEAD")


def test_training_adds_metrics_a_summary_and_checkpoints(quick: Config) -> None:
    result = ExperimentManager.setup(quick()).train()
    run_dir = result.run_dir
    first, *rows = lines(run_dir)
    assert first == {"format": 1}
    assert steps(run_dir) == [128, 256, 384, 512]
    assert rows[-1]["step"] == 512
    assert rows[-1]["eval/return_mean"] == result.metrics["eval/return_mean"]

    summary = read(run_dir / "summary.json")
    assert (summary["format"], summary["status"]) == (1, "finished")
    assert summary["reason"] == result.stop_reason == "total_timesteps reached"
    assert summary["global_step"] == summary["total_timesteps"] == 512
    assert {**summary["metrics"], "global_step": 512} == result.metrics

    assert result.checkpoint_path == run_dir / "checkpoints" / "last.pt"
    assert load_checkpoint(result.checkpoint_path)["training"]["counters"]["global_step"] == 512
    assert not result.interrupted


def test_the_total_is_rounded_up_to_whole_iterations(quick: Config) -> None:
    trainer = ExperimentManager.setup(quick(total_timesteps=129))
    trainer.close()
    assert trainer.total == 256
    assert trainer.config.total_timesteps == 129


def test_a_failed_run_says_why_in_its_summary(quick: Config) -> None:
    trainer = ExperimentManager.setup(quick(env_id="probe/Broken-v0"))
    with pytest.raises(RuntimeError, match="the pole fell on my foot"):
        trainer.train()
    summary = read(trainer.run_dir / "summary.json")
    assert summary["status"] == "failed"
    assert "environment 0" in summary["reason"]
    assert "RuntimeError: the pole fell on my foot" in summary["reason"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"env_id": "CartPol-v1"},
        {"env_kwargs": {"no_such_argument": 1}},
        {"wrappers": ["gymnasium.wrappers:NoSuchWrapper"]},
        {"init_from": "nowhere.pt"},
        {"encoder": "no_such_module:Encoder"},
        {"vectorization": "native", "env_id": "probe/ConstantReward-v0"},
    ],
)
def test_a_refused_run_leaves_no_folder(quick: Config, overrides: dict[str, Any]) -> None:
    config = quick(**overrides)
    with pytest.raises(UserError):
        ExperimentManager.setup(config)
    assert not config.output_dir.exists()


@pytest.mark.parametrize("value", [np.int64(10_000), (1, 2), object()])
def test_what_a_config_file_cannot_hold_leaves_no_half_a_run(quick: Config, value: Any) -> None:
    output_dir = quick().output_dir
    try:
        config = quick(env_id="probe/Broken-v0", env_kwargs={"at": value})
        trainer = ExperimentManager.setup(config)
        trainer.close()
    except ConfigError:
        assert not output_dir.exists()
    else:
        assert config_from_file(trainer.run_dir / "config.yaml") == config


# -- resume ----------------------------------------------------------------------------------------


def test_resume_goes_on_in_the_same_folder(quick: Config) -> None:
    stopped = ExperimentManager.setup(quick(), callbacks=[StopAt(256)]).train()
    assert stopped.stop_reason == "far enough"
    trainer = ExperimentManager.resume(stopped.run_dir)
    assert (trainer.global_step, trainer.iteration, trainer.total) == (256, 2, 512)
    result = trainer.train()
    assert result.run_dir == stopped.run_dir
    assert list(stopped.run_dir.parent.iterdir()) == [stopped.run_dir]
    assert lines(result.run_dir)[0] == {"format": 1}
    assert steps(result.run_dir) == [128, 256, 384, 512]
    assert read(result.run_dir / "summary.json")["global_step"] == 512

    whole = ExperimentManager.setup(quick())
    whole.train()
    assert weights(trainer) == weights(whole), "as if it had never stopped"


def test_each_resume_adds_to_the_lineage(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(), callbacks=[StopAt(128)]).train().run_dir
    before = read(run_dir / "metadata.json")
    ExperimentManager.resume(run_dir, callbacks=[StopAt(256)]).train()
    ExperimentManager.resume(run_dir / "checkpoints" / "last.pt").train()
    after = read(run_dir / "metadata.json")
    first, second = after.pop("resumes")
    assert after == {key: value for key, value in before.items() if key != "resumes"}
    assert (first["step"], second["step"]) == (128, 256)
    assert first["checkpoint"] == second["checkpoint"] == "last.pt"
    assert first["resume"] == "exact"
    assert first["command"] == sys.argv
    assert first["versions"] == before["versions"]
    assert first["at"] >= before["created"]


def test_an_older_checkpoint_is_resumed_and_what_came_after_set_aside(quick: Config) -> None:
    config = quick(checkpoint_interval=128, keep_checkpoints=9)
    run_dir = ExperimentManager.setup(config).train().run_dir
    before = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    trainer = ExperimentManager.resume(run_dir / "checkpoints" / "step_000000000256.pt")
    assert trainer.global_step == 256
    trainer.train()
    assert steps(run_dir) == [128, 256, 384, 512]
    (aside,) = run_dir.glob("metrics.after-*.jsonl")
    assert before.endswith(aside.read_text(encoding="utf-8"))
    assert json.loads(aside.read_text(encoding="utf-8").splitlines()[0])["step"] == 384


def test_other_versions_are_warned_of(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(), callbacks=[StopAt(128)]).train().run_dir
    metadata = read(run_dir / "metadata.json")
    metadata["versions"]["numpy"] = "0.0.1"
    (run_dir / "metadata.json").write_text(json.dumps(metadata))
    with pytest.warns(UserWarning, match=r"versions differ from the run's: numpy 0\.0\.1 -> "):
        ExperimentManager.resume(run_dir).close()


def test_a_run_of_another_environment_is_refused(
    quick: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "probe/Swapped-v0"
    monkeypatch.setitem(
        gym.registry, name, gym.envs.registration.EnvSpec(name, "probe_envs:DelayedReward")
    )
    config = quick(env_id=name)
    run_dir = ExperimentManager.setup(config, callbacks=[StopAt(128)]).train().run_dir
    before = (run_dir / "metadata.json").read_bytes()
    for other, what in (("ReachTarget", "actions"), ("MaskedActions", "observations")):
        swapped = gym.envs.registration.EnvSpec(name, f"probe_envs:{other}")
        monkeypatch.setitem(gym.registry, name, swapped)
        with pytest.raises(
            CheckpointError, match=f"is not the one of the checkpoint: its {what} are"
        ):
            ExperimentManager.resume(run_dir)
    assert (run_dir / "metadata.json").read_bytes() == before


def test_an_env_fn_of_another_environment_is_refused(quick: Config) -> None:
    trainer = ExperimentManager.setup(
        quick(), callbacks=[StopAt(128)], env_fn=probe_envs.DelayedReward
    )
    run_dir = trainer.train().run_dir
    with pytest.raises(CheckpointError, match="its actions are bounded Box"):
        ExperimentManager.resume(run_dir, env_fn=probe_envs.ReachTarget)
    with pytest.raises(CheckpointError, match="was trained with env_fn"):
        ExperimentManager.resume(run_dir)
    resumed = ExperimentManager.resume(run_dir, env_fn=probe_envs.DelayedReward)
    assert resumed.train().metrics["global_step"] == 512


# -- a new end -------------------------------------------------------------------------------------


def test_a_total_below_what_is_done_is_refused(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(), callbacks=[StopAt(384)]).train().run_dir
    before = (run_dir / "metadata.json").read_bytes()
    with pytest.raises(ConfigError, match="at least the 384 steps already done; got 200"):
        ExperimentManager.resume(run_dir, total_timesteps=200)
    assert (run_dir / "metadata.json").read_bytes() == before, "a refusal is not a resume"


def test_a_new_total_may_lie_before_the_old_one(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(), callbacks=[StopAt(128)]).train().run_dir
    result = resume_training(run_dir, total_timesteps=250)
    assert result.metrics["global_step"] == 256
    assert result.stop_reason == "total_timesteps reached"


def test_a_new_horizon_is_recorded_and_stretches_the_schedules(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(learning_rate=0.008)).train().run_dir
    resume_training(run_dir, total_timesteps=1000)
    (entry,) = read(run_dir / "metadata.json")["resumes"]
    assert (entry["total_timesteps"], entry["horizon"]) == (1024, 1024)
    assert entry["progress_jump"] == [1.0, 0.5]
    before = [0.008, 0.006, 0.004, 0.002]
    after = [0.004, 0.003, 0.002, 0.001]
    assert learning_rates(run_dir) == pytest.approx(before + after)


def test_a_kept_horizon_is_recorded_and_holds_the_final_values(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(learning_rate=0.008)).train().run_dir
    resume_training(run_dir, total_timesteps=768, horizon="keep")
    (entry,) = read(run_dir / "metadata.json")["resumes"]
    assert (entry["total_timesteps"], entry["horizon"]) == (768, 512)
    assert entry["progress_jump"] == [1.0, 1.0]
    assert learning_rates(run_dir)[4:] == [0.0, 0.0]


def test_a_new_end_outlives_the_next_resume(quick: Config) -> None:
    run_dir = ExperimentManager.setup(quick(), callbacks=[StopAt(128)]).train().run_dir
    resume_training(run_dir, total_timesteps=768, horizon="keep", callbacks=[StopAt(256)])
    trainer = ExperimentManager.resume(run_dir)
    trainer.close()
    assert (trainer.global_step, trainer.total, trainer.horizon) == (256, 768, 512)
    assert trainer.config.total_timesteps == 768


# -- weights from elsewhere ------------------------------------------------------------------------


def test_init_from_starts_from_the_weights_alone(quick: Config) -> None:
    source = ExperimentManager.setup(quick(normalize_obs=True, learning_rate=0.01))
    result = source.train()
    for path in (result.run_dir, result.checkpoint_path):
        config = quick(normalize_obs=True, seed=8, init_from=path)
        trainer = ExperimentManager.setup(config)
        trainer.close()
        assert weights(trainer) == weights(source)
        assert (trainer.global_step, trainer.run_dir != result.run_dir) == (0, True)
        assert trainer.algorithm.state_dict()["optimizer"]["step"] == 0
        assert config_from_file(trainer.run_dir / "config.yaml").init_from == path
    plain = ExperimentManager.setup(quick(normalize_obs=True, seed=8))
    plain.close()
    assert weights(plain) != weights(source)


def test_a_run_from_other_weights_can_be_trained_and_resumed(quick: Config) -> None:
    source = ExperimentManager.setup(quick(), callbacks=[StopAt(128)]).train()
    config = quick(init_from=source.checkpoint_path)
    run_dir = ExperimentManager.setup(config, callbacks=[StopAt(256)]).train().run_dir
    shutil.rmtree(source.run_dir)
    assert resume_training(run_dir).metrics["global_step"] == 512


def test_weights_that_do_not_fit_are_refused(quick: Config, tmp_path: Path) -> None:
    path = ExperimentManager.setup(quick(), callbacks=[StopAt(128)]).train().checkpoint_path
    made = sorted(quick().output_dir.iterdir())
    for overrides, message in (
        ({"hidden_sizes": [8]}, "init_from: the weights of .* do not fit"),
        ({"normalize_obs": True}, "init_from: the weights of .* do not fit"),
        (
            {"env_id": "probe/ReachTarget-v0"},
            "is not the one of the checkpoint: its observations are",
        ),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            ExperimentManager.setup(quick(init_from=path, **overrides))
        assert "\n" not in str(caught.value)
    assert sorted(quick().output_dir.iterdir()) == made


@pytest.mark.parametrize("kind", ["text", "weights", "another state"])
def test_a_file_of_another_kind_is_refused(quick: Config, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other.pt"
    if kind == "text":
        path.write_text("hello")
    elif kind == "weights":
        torch.save({"layer.weight": torch.zeros(3)}, path)
    else:
        save_checkpoint(path, {"anything": 1})
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        ExperimentManager.setup(quick(init_from=path))
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        ExperimentManager.resume(path)
