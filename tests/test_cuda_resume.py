"""Resume on CUDA with ``deterministic``: killed and resumed equals never killed, bit for bit.

Where a mode is not declared exact (`EXACT_ACCELERATIONS`), a difference is an expected failure: a
mode whose tests all pass can be added there. All tests of CUDA run by

    python -m pytest -q -rxX tests/test_cuda_resume.py tests/test_cuda_device_envs.py \
        tests/test_cuda.py tests/test_cuda_ranks.py
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import MakeConfig, any_env
from rl_training.checkpointing import load_checkpoint
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.runs import read_json
from rl_training.runtime import determinism
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, differences, metric_rows
from test_device_source import ON_DEVICE, StopAt
from test_device_source import config_for as device_config
from test_resume import run_and_kill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
if torch.cuda.is_available():  # when tests are collected, before any of them starts CUDA
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MODES = ("eager", "compile", "cudagraph")
EXACT = determinism.EXACT_ACCELERATIONS["cuda"]
MAY_DIFFER = [
    mode
    if mode in EXACT
    else pytest.param(mode, marks=pytest.mark.xfail(reason="not declared exact", strict=False))
    for mode in MODES
]
HOST = {"ppo": "CartPole-v1", "a2c": "Pendulum-v1", "sac": "Pendulum-v1", "dqn": "CartPole-v1"}
ON_CUDA: dict[str, Any] = {"device": "cuda", "deterministic": True}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(mode=False)
    determinism._ours["set"] = False


def check_stopped(config: TrainConfig[Any], at: int) -> None:
    """A run that is stopped and resumed in this process ends as one that is not."""
    mode = config.acceleration
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if mode in EXACT else "ignore", message=".*approximate")
        whole = ExperimentManager.setup(config).train()
        again = ExperimentManager.setup(config).train()
        part = ExperimentManager.setup(config, callbacks=[StopAt(at)]).train()
        assert part.interrupted
        resume_training(part.run_dir)
    described = read_json(part.run_dir / "metadata.json")
    word = "exact" if mode in EXACT else "approximate"
    assert described["resume"] == word
    assert [one["resume"] for one in described["resumes"]] == [word]
    assert described["gpu"] == torch.cuda.get_device_name()
    assert_same_run(whole.run_dir, again.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)


def check_killed(config: TrainConfig[Any], folder: Path, at: int) -> None:
    """The same across processes, the first of which is killed."""
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, folder, "step", str(at))
    assert metric_rows(killed) != metric_rows(whole.run_dir)
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def half(config: TrainConfig[Any]) -> int:
    return max(1, config.total_timesteps // 2 - 100)


@pytest.mark.parametrize("mode", MAY_DIFFER)
@pytest.mark.parametrize("algo", ON_DEVICE)
def test_environments_on_the_device_resume_exactly(
    algo: str, mode: str, make_config: MakeConfig
) -> None:
    config = device_config(make_config, algo, acceleration=mode, normalize_obs=True, **ON_CUDA)
    check_stopped(config, half(config))


@pytest.mark.parametrize("mode", MAY_DIFFER)
@pytest.mark.parametrize("algo", HOST)
def test_environments_on_the_host_resume_exactly(
    algo: str, mode: str, make_config: MakeConfig
) -> None:
    config = make_config(
        algo=algo, env_id=HOST[algo], acceleration=mode, total_timesteps=2048, **ON_CUDA
    )
    check_stopped(config, half(config))


@pytest.mark.parametrize("mode", MAY_DIFFER)
@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_a_replay_that_is_copied_to_the_device_resumes_exactly(
    algo: str, mode: str, make_config: MakeConfig
) -> None:
    config = make_config(
        algo=algo,
        env_id=any_env(algo),
        acceleration=mode,
        replay_device="accelerator",
        total_timesteps=2048,
        **ON_CUDA,
    )
    check_stopped(config, half(config))


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
@pytest.mark.parametrize("mode", MAY_DIFFER)
@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_killed_run_ends_as_one_that_was_not(
    algo: str, mode: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    settings = {"total_timesteps": 4096, "checkpoint_interval": 1000, "acceleration": mode}
    config = device_config(make_config, algo, **settings, **ON_CUDA)
    check_killed(config, tmp_path / "killed", 3000)


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
def test_without_it_a_run_says_approximate(make_config: MakeConfig) -> None:
    config = device_config(make_config, "ppo", device="cuda", acceleration="eager")
    run = ExperimentManager.setup(config).train()
    assert read_json(run.run_dir / "metadata.json")["resume"] == "approximate"
    assert not torch.are_deterministic_algorithms_enabled()


def test_it_moves_to_the_cpu_as_approximate(make_config: MakeConfig) -> None:
    for algo in ("ppo", "sac"):
        config = device_config(make_config, algo, acceleration="eager", **ON_CUDA)
        part = ExperimentManager.setup(config, callbacks=[StopAt(half(config))]).train()
        resume_training(part.run_dir, device="cpu")
        described = read_json(part.run_dir / "metadata.json")
        assert [one["resume"] for one in described["resumes"]] == ["approximate"]
        state = load_checkpoint(part.run_dir / "checkpoints" / "last.pt")
        assert not differences(state["config"]["device"], "cpu")
