"""The programs of Stable-Baselines3 in the guides run there."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training.config import TrainConfig, algo_config_type
from rl_training.registry import ALGORITHMS
from test_docs import DOCS, blocks

pytest.importorskip("stable_baselines3")


NO_SETTINGS = {"env_fn", "callbacks", "on_step", "on_iteration", "rl_training", "td3_bc"}
NO_SETTINGS |= {"auto", "sync", "async", "native", "gae"}
"""What the tables name besides settings."""


@pytest.mark.parametrize("page", ["from-sb3.md", "from-cleanrl.md"])
def test_the_settings_that_the_tables_name_exist(page: str) -> None:
    kinds: list[Any] = [TrainConfig, *(algo_config_type(algo) for algo in ALGORITHMS)]
    known = NO_SETTINGS | {field.name for kind in kinds for field in dataclasses.fields(kind)}
    named: set[str] = set()
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            for code in re.findall(r"`([^`]+)`", line.split(" | ")[1]):
                named |= set(re.findall(r"^[a-z]\w+(?=$|=|: )|\b[a-z_]+(?==)", code))
    assert len(named) > 30
    assert named - known == set()


def run_there(text: str, folder: Path) -> None:
    (folder / "program.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def programs(page: str) -> list[str]:
    """The blocks of a page that are for another library."""
    return [block.text for block in blocks(DOCS / page) if block.language == "py"]


@pytest.mark.full
def test_the_same_program_runs_with_stable_baselines3(tmp_path: Path) -> None:
    (text,) = programs("from-sb3.md")
    assert "total_timesteps=20_000" in text
    run_there(text.replace("20_000", "256"), tmp_path)
    assert (tmp_path / "cartpole.zip").is_file()


def test_the_numbers_of_a_vecnormalize_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    from rl_training.tools.importing.sb3_checks import read_statistics

    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2), clip_obs=5.0)
    env.reset()
    env.save(str(tmp_path / "vec_normalize.pkl"))
    monkeypatch.chdir(tmp_path)
    (text,) = programs("sharing.md")
    exec(compile(text, "sharing.md", "exec"), {})
    found = read_statistics(tmp_path / "statistics.npz", (3,))
    np.testing.assert_array_equal(found.mean, env.obs_rms.mean)
    assert (found.clip_obs, found.count) == (5.0, env.obs_rms.count)
