"""A tracker of another package: the one of docs/watching.md, really installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_plugin_package import ROOT, run

PAGE = ROOT / "docs" / "watching.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the page's package is installed in."""
    source, target = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("installed")
    blocks = re.findall(
        r'^```\w+ title="([\w.]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    for name, text in blocks:
        (source / name).write_text(text, encoding="utf-8")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(target), str(source)],
        check=True,
        timeout=120,
    )
    return target


SETTINGS = [
    *("--env-id", "CartPole-v1", "--num-envs", "4", "--num-steps", "16", "--eval-episodes", "1"),
    *("--no-progress", "--no-tensorboard", "--total-timesteps", "256"),
]


PROGRAM = """
import pathlib, sys
from rl_training.cli import main
assert main(["train", *sys.argv[1:]]) == 0
(folder,) = pathlib.Path("runs").iterdir()
assert main(["resume", str(folder), "--total-timesteps", "512"]) == 0
"""


def test_an_installed_tracker_gets_a_run_and_its_resume(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-c", PROGRAM, *SETTINGS, "--trackers", "csv")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (tmp_path / "all_runs.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines]
    assert len({row[0] for row in cells}) == 1
    ends = [row[1:] for row in cells if row[1] in ("start", "resume", "end")]
    name = folder.name
    finished = ["end", "", "finished"]
    assert ends == [["start", "0", name], finished, ["resume", "256", name], finished]
    steps = [int(row[2]) for row in cells if row[1] == "losses/loss"]
    assert steps == list(range(64, 513, 64))
