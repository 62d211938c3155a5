"""The zoo: manifests that parse strictly and point to real files, and benchmarks that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from conftest import NOT_MEASURED, ONLINE
from rl_training._internal.yaml_io import load_yaml_file
from rl_training.cli import main
from rl_training.config import config_from_file, zoo_dir
from rl_training.errors import ConfigError
from rl_training.runs import read_json
from rl_training.tools.zoo.jobs import Job, job_status, latest_row, plan
from rl_training.tools.zoo.manifest import MANIFEST, benchmark_names, load_benchmark
from rl_training.tools.zoo.results import read_results, result_settings

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in zoo_dir().rglob("*.yaml") if path.name != MANIFEST)
QUICK = "format: 1\npreset: ppo/cartpole\neval_episodes: 2\ntensorboard: false\n"


# -- what is packaged ------------------------------------------------------------------------------


def test_there_is_a_benchmark_for_every_family_of_environments() -> None:
    assert benchmark_names() == ["atari", "box2d", "classic", "mujoco"]
    assert (zoo_dir().resolve()) == ROOT / "zoo"


@pytest.mark.parametrize("name", benchmark_names())
def test_manifests_parse_and_list_every_file_beside_them(name: str) -> None:
    benchmark = load_benchmark(name)
    beside = {path.stem for path in benchmark.path.parent.glob("*.yaml")} - {"benchmark"}
    assert {entry.preset for entry in benchmark.entries} == beside
    for entry in benchmark.entries:
        config = config_from_file(benchmark.preset_file(entry))
        assert config.total_timesteps == entry.steps, "the preset's own length"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_zoo_files_are_a_preset_and_what_differs(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert content["preset"]
    name = path.relative_to(zoo_dir()).with_suffix("").as_posix()
    config = config_from_file(f"zoo/{name}")
    assert path.stem.startswith(config.algo)
    assert config == config_from_file(path)


def test_every_algorithm_is_in_the_classic_benchmark() -> None:
    benchmark, measured = load_benchmark("classic"), set(ONLINE) - NOT_MEASURED["classic"]
    assert {benchmark.config(entry).algo for entry in benchmark.entries} == measured


def test_a_zoo_preset_trains_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--total-timesteps", "512", "--eval-episodes", "1"]
    assert main(["train", "zoo/classic/ppo_cartpole", *flags]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


# -- strictness ------------------------------------------------------------------------------------

ENTRY = {"preset": "quick", "steps": 1024, "seeds": [1, 2], "expected": 20.0, "source": "us"}


def manifest(folder: Path, *entries: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quick.yaml").write_text(QUICK)
    content = {"format": 1, "title": "Quick", "runs": list(entries or (ENTRY,)), **changes}
    path = folder / MANIFEST
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "qick"}, "no qick.yaml beside it. Did you mean 'quick'"),
        ({"steps": 0}, "quick.steps"),
        ({"steps": "many"}, "whole number"),
        ({"seeds": []}, "quick.seeds"),
        ({"seeds": [1, 1]}, "quick.seeds"),
        ({"source": " "}, "quick.source"),
        ({"expcted": 1.0}, "expcted.*Did you mean 'expected'"),
    ],
)
def test_mistakes_in_an_entry_are_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = manifest(tmp_path, {**ENTRY, **change})
    with pytest.raises(ConfigError, match=message) as caught:
        load_benchmark(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("missing", list(ENTRY))
def test_nothing_may_be_left_out(missing: str, tmp_path: Path) -> None:
    entry = {key: value for key, value in ENTRY.items() if key != missing}
    with pytest.raises(ConfigError, match=f"needs '{missing}'"):
        load_benchmark(manifest(tmp_path, entry))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "'format' must be 1"),
        ({"titel": "x"}, "titel.*Did you mean 'title'"),
        ({"runs": []}, "one run or more"),
        ({"runs": 3}, "must be a list"),
        ({"runs": ["quick"]}, r"runs\[0\]' must be a mapping"),
        ({"runs": [ENTRY, ENTRY]}, "different presets; got 'quick'"),
    ],
)
def test_mistakes_in_a_manifest_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_benchmark(manifest(tmp_path, **changes))


def test_a_broken_preset_is_found_with_the_manifest(tmp_path: Path) -> None:
    path = manifest(tmp_path)
    (tmp_path / "quick.yaml").write_text(QUICK + "num_env: 4\n")
    with pytest.raises(ConfigError, match="num_env"):
        load_benchmark(path)


# -- running ---------------------------------------------------------------------------------------


def zoo(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_training.cli", "zoo", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"},
        **kwargs,
    )


def jobs_of(path: Path, out: Path) -> list[Job]:
    return plan(load_benchmark(path), out)


def test_it_runs_every_seed_and_compares(tmp_path: Path) -> None:
    path, out = manifest(tmp_path / "small"), tmp_path / "out"
    done = zoo("run", path, "--output-dir", out, "--processes", 2)
    assert done.returncode == 0, done.stderr
    finals = []
    for job in jobs_of(path, out):
        now = job_status(job)
        assert now.status == "finished"
        assert now.run_dir is not None
        summary = read_json(now.run_dir / "summary.json")
        finals.append(summary["metrics"]["eval/return_mean"])
        config = config_from_file(now.run_dir / "config.yaml")
        assert (config.seed, config.total_timesteps) == (job.seed, 1024)
    reported = tmp_path / "new" / "table.json"
    again = zoo("report", path, "--output-dir", out, "--output", reported)
    assert again.returncode == 0, again.stderr
    results = read_results(reported)
    (row,) = results.presets
    assert row.means == pytest.approx(finals, abs=1e-4)
    assert [(run.seed, run.steps, run.episodes) for run in row.runs] == [(1, 1024, 2), (2, 1024, 2)]
    assert row.is_whole
    config = config_from_file(path.parent / "quick.yaml").with_overrides(total_timesteps=1024)
    assert row.settings == result_settings(config)
    assert row.settings["algo_kwargs"]["clip_coef"] == 0.2, "defaults too"
    (origin,) = results.made_with
    assert origin.versions["torch"] == torch.__version__
    mean = sum(finals) / 2
    verdict = "reached" if mean >= 20 else f"{20 - mean:.1f} below"
    line = next(line for line in again.stdout.splitlines() if line.startswith("  quick"))
    assert f"{mean:,.1f}" in line
    assert line.endswith(verdict)
    assert "2 of 2" in line


def test_fewer_seeds_and_a_share_of_the_steps(tmp_path: Path) -> None:
    path = manifest(tmp_path / "small", {**ENTRY, "steps": 51_200})
    done = zoo("run", path, "--output-dir", tmp_path, "--seeds", 1, "--scale", 0.02)
    assert done.returncode == 0, done.stderr
    assert "not comparable: 0.02 of the steps" in done.stdout
    runs = list(tmp_path.glob("small-x0.02/quick/seed*/ppo__*"))
    assert len(runs) == 1
    assert read_json(runs[0] / "summary.json")["total_timesteps"] == 1024


def test_a_failed_run_does_not_sink_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    entries = [{**ENTRY, "preset": "broken", "seeds": [1]}, {**ENTRY, "seeds": [1]}]
    path = manifest(folder, *entries)
    (folder / "broken.yaml").write_text(QUICK + "env_id: NoSuchEnv-v0\n")
    done = zoo("run", path, "--output-dir", tmp_path)
    assert done.returncode == 1
    assert "failed: broken seed 1" in done.stderr
    assert "NoSuchEnv" in done.stderr
    assert "1 of 2 runs are finished" in done.stderr
    (folder / "broken.yaml").write_text(QUICK)
    log = tmp_path / "small" / "quick" / "seed1" / "log.txt"
    before = log.read_text()
    assert zoo("run", path, "--output-dir", tmp_path).returncode == 0
    assert log.read_text() == before, "what is finished is not even looked at again"
    assert len(list(tmp_path.glob("small/*/seed1/ppo__*"))) == 2


def start(*args: Any, new_session: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training.cli", "zoo", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        start_new_session=new_session,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_an_interrupted_benchmark_goes_on_where_it_stopped(
    how: signal.Signals, tmp_path: Path
) -> None:
    entries = [{**ENTRY, "seeds": [1]}, {**ENTRY, "preset": "long", "steps": 40_960, "seeds": [1]}]
    folder = tmp_path / "small"
    path = manifest(folder, *entries)
    (folder / "long.yaml").write_text(QUICK)
    process = start("run", path, "--output-dir", tmp_path)
    short, long = jobs_of(path, tmp_path)
    wait_until(lambda: job_status(long).status == "unfinished" and job_status(long).step >= 2048)
    process.send_signal(how)
    process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 0
    now = job_status(long)
    run_dir = now.run_dir
    assert run_dir is not None
    # The run outlives neither: it saved, and is still.
    wait_until(lambda: read_json(run_dir / "summary.json").get("status") == "interrupted")
    stopped_at = latest_row(run_dir)[0]
    assert stopped_at < 40_960
    first = job_status(short).run_dir
    assert first is not None
    before = (first / "summary.json").stat().st_mtime_ns

    done = zoo("run", path, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (first / "summary.json").stat().st_mtime_ns == before
    assert job_status(long).run_dir == run_dir, "resumed, not started again"
    assert job_status(long).status == "finished"
    (resumed,) = read_json(run_dir / "metadata.json")["resumes"]
    assert 0 < resumed["step"] <= stopped_at
    assert resumed["resume"] == "exact"


def test_runs_of_other_settings_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    path = manifest(tmp_path / "small", {**ENTRY, "seeds": [1]})
    assert zoo("run", path, "--output-dir", tmp_path).returncode == 0
    (tmp_path / "small" / "quick.yaml").write_text(QUICK + "algo_kwargs: {gamma: 0.9}\n")
    for command in ("run", "report"):
        done = zoo(command, path, "--output-dir", tmp_path)
        assert done.returncode == 2
        assert "other settings (algo_kwargs)" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "clasic"], "Did you mean 'classic'"),
        (["rum"], "Did you mean 'run'"),
        (["run", "classic", "--scale", "0"], "--scale must be above 0"),
        (["run", "classic", "--processes", "0"], "--processes must be at least 1"),
        (["run", "classic", "--only", "pong"], "lists no pong"),
        (["report", "classic", "--output-dir", "nowhere"], "zoo run classic"),
    ],
)
def test_mistakes_on_the_command_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["zoo", *args]) == 2
    assert message in capsys.readouterr().err


def test_list_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list"]) == 0
    listed = capsys.readouterr().out
    for path in FILES:
        content = load_yaml_file(path)
        own = set(content) - {"format"} != {"preset"}
        assert (f"zoo/{path.parent.name}/{path.stem}" if own else content["preset"]) in listed
    assert main(["zoo"]) == 0
    assert "classic" in capsys.readouterr().out


def test_the_script_is_the_command() -> None:
    script = ROOT / "scripts" / "benchmark_zoo.py"
    done = subprocess.run(
        [sys.executable, str(script), "list", "box2d"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "dqn/lunarlander" in done.stdout
