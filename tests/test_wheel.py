"""A wheel built from the repo trains from a packaged preset, used from another directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_trains_from_a_preset_elsewhere(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"  # a build in the checkout would leave its folders there
    source.mkdir()
    for name in ("src", "configs", "zoo"):
        shutil.copytree(REPO / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    run([*pip, *build], tmp_path)
    (wheel,) = tmp_path.glob("rl_training-*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], tmp_path)
    assert (site / "rl_training" / "py.typed").is_file()
    where = run(
        [sys.executable, "-c", "import rl_training; print(rl_training.__file__)"],
        elsewhere,
        PYTHONPATH=str(site),
    )
    assert Path(where.strip()).is_relative_to(site)
    flags = ["--total-timesteps", "512", "--eval-episodes", "2", "--json"]
    out = run(
        [sys.executable, "-m", "rl_training.cli", "train", "ppo/cartpole", *flags],
        elsewhere,
        PYTHONPATH=str(site),
    )
    result = json.loads(out.splitlines()[-1])
    assert result["global_step"] == 512
    assert (elsewhere / "runs").is_dir()
    tool = [sys.executable, "-m", "rl_training.cli"]
    assert "ppo/cartpole" in run([*tool, "zoo", "list", "classic"], elsewhere, PYTHONPATH=str(site))
    run([*tool, "report", "runs", "--output", "page"], elsewhere, PYTHONPATH=str(site))
    page = (elsewhere / "page" / "report.html").read_text()
    assert "prefers-color-scheme" in page or "color-scheme" in page, "its style came along"
    for path in ("report/report.js", *(f"watch/watch.{end}" for end in ("html", "css", "js"))):
        assert (site / "rl_training" / "tools" / path).is_file()
    assert (site / "rl_training" / "tools" / "watch" / "chart.js").is_file()
