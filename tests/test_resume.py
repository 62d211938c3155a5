"""Exact resume: a run that was killed and resumed equals the run never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import WITH_MEMORY, MakeConfig
from rl_training.checkpointing import find_checkpoint, load_checkpoint, save_checkpoint
from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, differences, final_state, metric_rows

CHILD = Path(__file__).with_name("resume_child.py")


@dataclasses.dataclass(frozen=True)
class Case:
    env_id: str
    vectorization: str = "sync"
    module: str = "gymnasium"
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.env_id}-{self.vectorization}"


NORMALIZED = (("normalize_obs", True), ("normalize_reward", True))
SPREAD, MEMORY = "pettingzoo:mpe2/simple_spread_v3", (("memory", "lstm"), ("sequence_length", 8))
QUICK = [
    Case("CartPole-v1"),
    Case("CartPole-v1", "async"),
    Case("CartPole-v1", "native"),
    Case("Pendulum-v1", overrides=NORMALIZED),
    Case("LunarLander-v3", module="Box2D"),
    Case("HalfCheetah-v5", module="mujoco", overrides=NORMALIZED),
    Case(SPREAD, "sync", "mpe2", (("algo", "mappo"), ("normalize_values", True), *MEMORY)),
]
FULL = [
    Case(SPREAD, "async", "mpe2", (("algo", "mappo"), ("normalize_values", True))),
    Case(SPREAD, "sync", "mpe2", (("algo", "ippo"), *NORMALIZED, *MEMORY)),
    Case(
        "pettingzoo:classic/tictactoe_v3",
        module="pettingzoo.classic",
        overrides=(("algo", "ippo"), *MEMORY),
    ),
    Case(
        "pettingzoo:mpe2/simple_speaker_listener_v4",
        module="mpe2",
        overrides=(("algo", "ippo"), ("policies", "separate")),
    ),
    Case("Pendulum-v1", "async", overrides=NORMALIZED),
    Case("LunarLander-v3", "async", module="Box2D"),
    Case("HalfCheetah-v5", "async", module="mujoco", overrides=NORMALIZED),
    Case("CartPole-v1", "native", overrides=NORMALIZED),
    Case("LunarLander-v3", module="Box2D", overrides=NORMALIZED),
]
KILLS = [("step", "600"), ("save", "3")]


def config_for(case: Case, make_config: MakeConfig) -> TrainConfig[Any]:
    pytest.importorskip(case.module)
    return make_config(
        env_id=case.env_id,
        vectorization=case.vectorization,
        total_timesteps=1024,
        checkpoint_interval=256,
        eval_interval=512,
        **dict(case.overrides),
    )


def run_and_kill(config: TrainConfig[Any], folder: Path, mode: str, number: str) -> Path:
    config = config.with_overrides(output_dir=folder)
    path = folder / "config.yaml"
    folder.mkdir()
    path.write_text(config.to_yaml())
    tests = Path(__file__).parent
    paths = [str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path), mode, number],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return next(p for p in folder.iterdir() if p.is_dir())


def check(case: Case, make_config: MakeConfig, tmp_path: Path, mode: str, number: str) -> None:
    config = config_for(case, make_config)
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", mode, number)
    assert metric_rows(killed) != metric_rows(whole.run_dir)
    resumed = resume_training(killed)
    assert resumed.run_dir == killed
    assert_same_run(whole.run_dir, killed)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_killed_and_resumed_equals_never_stopped(
    case: Case, make_config: MakeConfig, tmp_path: Path
) -> None:
    check(case, make_config, tmp_path, *KILLS[0])


@pytest.mark.parametrize(
    ("algo", "knobs"),
    [
        ("qmix", {"prioritized": True, "normalize_obs": True}),
        ("c51", {"gradient_steps": 0.7}),  # with noise in its weights
        pytest.param("iqn", {"noisy": True}, marks=pytest.mark.full),
        pytest.param(
            "idqn", {"policies": "separate", "gradient_steps": 0.7}, marks=pytest.mark.full
        ),
        ("pqn", {"normalize_obs": True, "normalize_reward": True}),
        pytest.param("sac_discrete", {"n_step": 3}, marks=pytest.mark.full),
    ],
)
def test_other_algorithms_killed_and_resumed(
    algo: str, knobs: dict[str, Any], make_config: MakeConfig, tmp_path: Path
) -> None:
    if algo != "pqn":
        knobs = {**knobs, "train_freq": 16}
    settings = {"checkpoint_interval": 1000, "eval_episodes": 0}
    config = make_config(algo=algo, total_timesteps=3000, **settings, **knobs)
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "1500")
    assert metric_rows(killed) != metric_rows(whole.run_dir)
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def test_killed_in_the_middle_of_a_save(make_config: MakeConfig, tmp_path: Path) -> None:
    check(QUICK[0], make_config, tmp_path, *KILLS[1])


@pytest.mark.full
@pytest.mark.parametrize("kill", KILLS, ids=lambda k: k[0])
@pytest.mark.parametrize("case", QUICK + FULL, ids=str)
def test_full_cross_product(
    case: Case, kill: tuple[str, str], make_config: MakeConfig, tmp_path: Path
) -> None:
    check(case, make_config, tmp_path, *kill)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        if event.step >= self.step:
            # As a signal does: to be resumed, not concluded.
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("algo", [*ALGORITHMS, *WITH_MEMORY])
def test_every_algorithm_stops_and_resumes_exactly(
    algo: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(algo=algo, total_timesteps=1024, eval_interval=512)
    whole = ExperimentManager.setup(config).train()
    part = ExperimentManager.setup(config, callbacks=[StopAt(300)]).train()
    assert part.interrupted
    assert part.metrics["global_step"] < 1024
    resume_training(part.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)


@pytest.mark.parametrize("algo", ["ppo", "drqn"])
def test_a_checkpoint_from_before_sources_resumes_exactly(
    algo: str, make_config: MakeConfig
) -> None:
    """Actor and environments were two entries, ``actor`` and ``collector``."""
    config = make_config(algo=algo, total_timesteps=1024)
    whole = ExperimentManager.setup(config).train()
    part = ExperimentManager.setup(config, callbacks=[StopAt(300)]).train()
    assert part.interrupted
    state = load_checkpoint(part.checkpoint_path)
    source = state["training"].pop("source")
    state["training"]["actor"] = source.pop("actor")
    state["training"]["collector"] = source
    save_checkpoint(part.checkpoint_path, state)
    resume_training(part.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)


def test_metric_rows_after_the_checkpoint_are_cut_and_kept_aside(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = config_for(QUICK[0], make_config)
    killed = run_and_kill(config, tmp_path / "killed", "step", "600")
    before = (killed / "metrics.jsonl").read_text()
    resume_training(killed)
    aside = list(killed.glob("metrics.after-*.jsonl"))
    assert len(aside) == 1
    assert before.endswith(aside[0].read_text())
    steps = [row["step"] for row in metric_rows(killed) if "losses/loss" in row]
    assert steps == sorted(set(steps))


def test_tensorboard_forgets_the_cut_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_for(QUICK[0], make_config).with_overrides(tensorboard=True)
    killed = run_and_kill(config, tmp_path / "killed", "step", "600")
    resume_training(killed)
    events = EventAccumulator(str(killed / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("losses/loss")]
    assert steps == [128 * i for i in range(1, 9)]


def test_a_damaged_last_checkpoint_names_the_one_before(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    result = ExperimentManager.setup(make_config(checkpoint_interval=128)).train()
    path = find_checkpoint(result.run_dir)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))  # the same inode as the newest numbered one
    with pytest.raises(CheckpointError, match=r"the one before it: .*step_0+384\.pt"):
        ExperimentManager.resume(result.run_dir)
    with pytest.warns(UserWarning, match="already trained up to step 512"):
        trainer = ExperimentManager.resume(result.run_dir / "checkpoints" / "step_000000000384.pt")
    assert trainer.train().metrics["global_step"] == 512


def test_extending_a_finished_run_moves_the_schedules(make_config: MakeConfig) -> None:
    first = ExperimentManager.setup(make_config(total_timesteps=512)).train()
    longer = ExperimentManager.resume(first.run_dir, total_timesteps=1024)
    assert (longer.total, longer.horizon) == (1024, 1024)
    result = longer.train()
    assert result.metrics["global_step"] == 1024
    rates = {
        r["step"]: r["losses/learning_rate"]
        for r in metric_rows(first.run_dir)
        if "losses/loss" in r
    }
    assert rates[512] == pytest.approx(2.5e-4 * (1 - 384 / 512))
    assert rates[640] == pytest.approx(2.5e-4 * (1 - 512 / 1024))


def test_horizon_keep_holds_the_final_values(make_config: MakeConfig) -> None:
    first = ExperimentManager.setup(make_config(total_timesteps=512)).train()
    before = final_state(first.run_dir)["algorithm"]["model"]
    longer = ExperimentManager.resume(first.run_dir, total_timesteps=768, horizon="keep")
    assert (longer.total, longer.horizon) == (768, 512)
    assert longer.train().metrics["losses/learning_rate"] == 0.0
    assert differences(before, final_state(first.run_dir)["algorithm"]["model"]) == []
