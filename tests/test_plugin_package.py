"""An algorithm of another package: the one of docs/extending.md, really installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rl_training import registry
from rl_training.errors import ConfigError
from rl_training.registry import ALGORITHMS, Entry, Registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extending.md"


def files_of_the_page() -> dict[str, str]:
    """The blocks of the page that have a title, by their titles."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the page's package is installed in."""
    source, target = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "vpg.py"):
        (source / name).write_text(files_of_the_page()[name], encoding="utf-8")
    # Without an index: what it depends on is installed here already.
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(target), str(source)],
        check=True,
        timeout=120,
    )
    return target


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has the package."""
    path = os.pathsep.join([str(installed), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


SETTINGS = [
    *("--algo", "vpg", "--env-id", "CartPole-v1", "--num-envs", "4", "--total-timesteps", "1024"),
    *("--eval-episodes", "2", "--no-progress", "--no-tensorboard", "--json"),
]


def test_an_installed_algorithm_is_trained_resumed_and_evaluated_by_the_command_line(
    installed: Path, tmp_path: Path
) -> None:
    cli = ("-m", "rl_training.cli")
    trained = run(installed, tmp_path, *cli, "train", *SETTINGS, "--algo-kwargs.num-steps", "8")
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout.strip().splitlines()[-1])
    folder = result["run_dir"]
    more = ["--checkpoint", folder, "--total-timesteps", "2048", "--json"]
    resumed = run(installed, tmp_path, *cli, "resume", *more)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.strip().splitlines()[-1])["metrics"]["global_step"] == 2048
    evaluated = run(
        installed, tmp_path, *cli, "eval", "--checkpoint", folder, "--num-episodes", "2"
    )
    assert evaluated.returncode == 0, evaluated.stderr
    metrics = (tmp_path / folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"losses/policy_loss"' in metrics


def test_it_learns_as_the_page_uses_it(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(files_of_the_page()["use.py"], encoding="utf-8")
    done = run(installed, tmp_path, "use.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.strip().splitlines()[-1]) > 100  # random actions: about 22


def test_what_it_does_not_support_is_refused_by_its_entry(installed: Path, tmp_path: Path) -> None:
    refused = run(
        installed,
        tmp_path,
        *("-m", "rl_training.cli", "train", *SETTINGS, "--acceleration", "cudagraph"),
    )
    assert refused.returncode != 0
    assert "acceleration" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_refusals_name_installed_algorithms_too(installed: Path, tmp_path: Path) -> None:
    refused = run(
        installed,
        tmp_path,
        *("-m", "rl_training.cli", "train", "--algo", "drqn", "--acceleration", "compile"),
    )
    assert refused.returncode != 0
    assert "vpg" in refused.stderr


def test_without_the_package_its_name_is_unknown() -> None:
    assert "vpg" not in ALGORITHMS
    with pytest.raises(ConfigError, match="vpg"):
        registry.find_entry("vpg")


# -- entry points ----------------------------------------------------------------------------------


def _points(monkeypatch: pytest.MonkeyPatch, **values: str) -> Registry:
    points = {
        name: EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()
    }
    monkeypatch.setattr(registry, "_installed", lambda: points)
    return Registry({"ppo": ALGORITHMS["ppo"]})


def test_nothing_is_imported_until_an_algorithm_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = _points(monkeypatch, other="no_such_module:ENTRY")
    assert "other" in table
    assert table.names() == ["ppo", "other"]
    with pytest.raises(ConfigError, match="no_such_module"):
        _ = table["other"]
    with pytest.raises(KeyError):
        _ = table["unknown"]


def test_an_entry_point_that_is_no_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _points(monkeypatch, other="json:dumps")
    with pytest.raises(ConfigError, match="function"):
        _ = table["other"]


def test_an_entry_of_this_package_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _points(monkeypatch, ppo="no_such_module:ENTRY")
    assert table["ppo"] is ALGORITHMS["ppo"]
    assert isinstance(table["ppo"], Entry)
