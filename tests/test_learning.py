"""`make test-learn`: presets trained to their bars, five seeds each, none of them tuned on.

A figure is of the final policy: deterministic, 20 whole episodes on seeds of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_training.config import config_from_file
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.workflows import evaluate_checkpoint

SEEDS = (1, 2, 3, 4, 5)
EVALUATION_SEED = 20_000

pytestmark = pytest.mark.learn


def final_returns(preset: str, folder: Path, **overrides: Any) -> list[float]:
    returns = []
    for seed in SEEDS:
        config = config_from_file(preset).with_overrides(
            seed=seed, output_dir=folder, progress=False, eval_episodes=0, **overrides
        )
        run = ExperimentManager.setup(config).train()
        result = evaluate_checkpoint(run.run_dir, num_episodes=20, seed=EVALUATION_SEED + seed)
        returns.append(result.mean_return)
        print(f"\n{preset} seed {seed}: {result.mean_return:.1f}", end="", flush=True)
    print(f"\n{preset} mean {sum(returns) / len(returns):.1f}")
    return returns


def test_ppo_cartpole(tmp_path: Path) -> None:
    assert min(final_returns("ppo/cartpole", tmp_path)) >= 490


def test_ppo_lunarlander(tmp_path: Path) -> None:
    returns = final_returns("ppo/lunarlander", tmp_path)
    assert sum(returns) / len(returns) >= 200


def test_ppg_cartpole(tmp_path: Path) -> None:
    assert min(final_returns("ppg/cartpole", tmp_path)) >= 490


def test_ppg_acrobot(tmp_path: Path) -> None:
    returns = final_returns("ppg/acrobot", tmp_path)
    assert sum(returns) / len(returns) >= -85


def test_dqn_cartpole(tmp_path: Path) -> None:
    returns = final_returns("dqn/cartpole", tmp_path)
    assert sum(returns) / len(returns) >= 475
    assert min(returns) >= 400


def test_pqn_cartpole(tmp_path: Path) -> None:
    returns = final_returns("pqn/cartpole", tmp_path)
    assert sum(returns) / len(returns) >= 490


def test_pqn_acrobot(tmp_path: Path) -> None:
    returns = final_returns("pqn/acrobot", tmp_path)
    assert sum(returns) / len(returns) >= -85


def test_ppo_pendulum(tmp_path: Path) -> None:
    returns = final_returns("ppo/pendulum", tmp_path)
    assert sum(returns) / len(returns) >= -250


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_pendulum(algo: str, tmp_path: Path) -> None:
    returns = final_returns(f"{algo}/pendulum", tmp_path)
    assert sum(returns) / len(returns) >= -170


def test_recurrent_ppo_cartpole_without_velocities(tmp_path: Path) -> None:
    returns = final_returns("recurrent_ppo/cartpole_no_velocity", tmp_path)
    assert sum(returns) / len(returns) >= 475


def test_recurrent_ppo_pendulum_without_velocities(tmp_path: Path) -> None:
    returns = final_returns("recurrent_ppo/pendulum_no_velocity", tmp_path)
    assert sum(returns) / len(returns) >= -300


def test_drqn_cartpole_without_velocities(tmp_path: Path) -> None:
    returns = final_returns("drqn/cartpole_masked", tmp_path)
    assert sum(returns) / len(returns) >= 300


def test_drqn_cartpole(tmp_path: Path) -> None:
    returns = final_returns("drqn/cartpole", tmp_path)
    assert sum(returns) / len(returns) >= 300


@pytest.mark.parametrize(
    ("preset", "steps"), [("ppo/cartpole", 100_000), ("dqn/cartpole", 150_000)]
)
def test_without_memory_velocities_are_missed(preset: str, steps: int, tmp_path: Path) -> None:
    hidden = ("rl_training.envs.wrappers:HideVelocities",)
    returns = final_returns(preset, tmp_path, wrappers=hidden, total_timesteps=steps)
    assert max(returns) < 200


def test_sac_pendulum_with_normalised_observations(tmp_path: Path) -> None:
    returns = final_returns("sac/pendulum", tmp_path, normalize_obs=True)
    assert sum(returns) / len(returns) >= -170


def test_a2c_cartpole(tmp_path: Path) -> None:
    assert min(final_returns("a2c/cartpole", tmp_path)) >= 490
