"""The package imports fast and without torch until torch is needed."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import rl_training
from rl_training.version import __version__

SRC = Path(__file__).resolve().parents[1] / "src"


def python(*words: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(*words: str, tries: int = 3) -> float:
    """The shortest of a few runs: the others waited for something else."""
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        python(*words)
        best = min(best, time.perf_counter() - started)
    return best


@functools.cache
def seconds_of_torch() -> float:
    """How long torch takes here and now: the measure of how fast this machine is."""
    return seconds("-c", "import torch", tries=2)


def test_the_version_is_one_and_the_same() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", __version__)
    assert rl_training.__version__ == __version__
    assert metadata.version("rl_training") == __version__
    assert python("-m", "rl_training.cli", "--version") == f"{__version__}\n"


@pytest.mark.parametrize(
    "statement",
    [
        "import rl_training",
        "import rl_training.config",
        "import rl_training.cli; rl_training.cli.main(['--help'])",
        "import rl_training.cli; rl_training.cli.main(['trian'])",
        "from rl_training import TrainConfig, make_vector_env",
        "import rl_training.runtime, rl_training.experiment.registry",
    ],
)
def test_torch_is_not_loaded_before_it_is_needed(statement: str) -> None:
    out = python("-c", f"import sys; {statement}; print(sorted(sys.modules))")
    loaded = out.splitlines()[-1]
    assert "'rl_training'" in loaded
    assert "'torch'" not in loaded


def test_the_bare_import_loads_nothing_else() -> None:
    out = python("-c", "import sys; import rl_training; print(sorted(sys.modules))")
    for heavy in ("torch", "numpy", "gymnasium", "yaml", "tyro", "tensorboard", "rich"):
        assert f"'{heavy}'" not in out


def test_the_import_is_quick() -> None:
    assert seconds("-c", "import rl_training") < max(0.3, 0.2 * seconds_of_torch())


def test_the_help_is_quick() -> None:
    # Torch alone would take longer than this.
    assert seconds("-m", "rl_training.cli", "--help") < max(1.0, 0.5 * seconds_of_torch())
