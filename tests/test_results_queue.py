"""The queue of zoo runs: it stops and continues, packs what finished, and merges it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rl_training.config import config_from_file
from rl_training.errors import UserError
from rl_training.runs import read_json
from rl_training.runtime.workflows import evaluate_checkpoint
from rl_training.tools.zoo.jobs import plan
from rl_training.tools.zoo.manifest import Benchmark, load_benchmark
from rl_training.tools.zoo.results import (
    FinishedRun,
    Origin,
    SeedResult,
    kept_results,
    merge_runs,
    read_results,
    write_results,
)

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "results_queue.py"
PPO = "format: 1\npreset: ppo/cartpole\neval_episodes: 2\n"
DQN = "format: 1\npreset: dqn/cartpole\neval_episodes: 2\n"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_queue", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_queue"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


queue = _load()


def manifest(folder: Path, **steps: int) -> Path:
    """A benchmark of presets with two seeds each, of so many steps."""
    folder.mkdir(parents=True)
    runs = []
    for name, count in steps.items():
        (folder / f"{name}.yaml").write_text(DQN if name.startswith("dqn") else PPO)
        entry = {"preset": name, "steps": count, "seeds": [1, 2], "expected": 20.0, "source": "us"}
        runs.append(entry)
    (folder / "benchmark.yaml").write_text(
        yaml.safe_dump({"format": 1, "title": "Small", "runs": runs})
    )
    return folder


def start(*args: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def run(*args: Any) -> tuple[int, str]:
    process = start(*args)
    output, _ = process.communicate(timeout=180)
    return process.returncode, output


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# -- order -----------------------------------------------------------------------------------------


def test_first_seeds_of_every_preset_come_before_further_ones() -> None:
    works = queue.all_work(queue.Choice(), Path())
    names = list(dict.fromkeys(work.benchmark.name for work in works))
    assert names == ["mujoco", "atari", "box2d", "classic"]
    mujoco = [work for work in works if work.benchmark.name == "mujoco"]
    presets = [entry.preset for entry in load_benchmark("mujoco").entries]
    order = [(work.job.entry.preset, work.job.seed) for work in mujoco]
    first = [(preset, seed) for preset in presets for seed in (1, 2, 3)]
    assert order == first + [(preset, seed) for preset in presets for seed in (4, 5)]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"presets": ("sac_hoper",)}, "sac_hopper"),
        ({"seeds": (1, 101)}, "101"),
        ({"scale": 0.0}, "--scale"),
    ],
)
def test_mistaken_choices_are_refused(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        queue.all_work(queue.Choice(**choice), Path())


def finished(preset: str, seed: int, mean: float = 30.0, **changes: Any) -> FinishedRun:
    result = SeedResult(seed=seed, steps=1024, episodes=2, mean=mean, std=1.0, seconds=1.0)
    values: dict[str, Any] = {"commit": "abc", "device": "cpu", "cpu_cores": 2, "versions": {}}
    return FinishedRun(preset, result, Origin(**{**values, **changes}))


def keep(benchmark: Benchmark, *runs: FinishedRun) -> None:
    merge = merge_runs(benchmark, kept_results(benchmark), runs)
    write_results(benchmark.path.parent / "results.json", merge.results)


def test_what_has_a_result_of_the_preset_as_it_is_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = manifest(tmp_path / "small", ppo=1024)
    keep(load_benchmark(folder), finished("ppo", 1))
    assert queue.main(["list", "--family", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "small/ppo seed 2"
    (folder / "ppo.yaml").write_text(f"{PPO}algo_kwargs: {{gamma: 0.9}}\n")
    assert queue.main(["list", "--family", str(folder)]) == 0
    assert "small/ppo seed 1" in capsys.readouterr().out


# -- run -------------------------------------------------------------------------------------------


def test_a_stopped_queue_continues_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, folder = manifest(tmp_path / "small", dqn=5000), tmp_path / "runs"
    args = ("run", "--family", family, "--folder", folder, "--seeds", 1)
    process = start(*args, "--log-seconds", 0.5)
    (work,) = queue.all_work(queue.Choice(family=(str(family),), seeds=(1,)), folder)

    def saved() -> bool:
        found = queue.look(work)
        return found.run_dir is not None and queue.latest_row(found.run_dir)[0] >= 1000

    wait_until(saved)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    found = queue.look(work)
    assert found.status == "unfinished"
    assert read_json(found.run_dir / "summary.json")["status"] == "interrupted"
    assert "steps/s" in (folder / "queue.log").read_text()

    # Without its replay it cannot be continued: it would begin anew.
    shutil.copytree(folder, tmp_path / "copy")
    (copied,) = queue.all_work(queue.Choice(family=(str(family),), seeds=(1,)), tmp_path / "copy")
    assert queue.look(copied).status == "unfinished"
    shutil.rmtree(queue.look(copied).run_dir / "replay")
    assert queue.look(copied).status == "missing"

    code, output = run(*args)
    assert code == 0, output
    assert queue.look(work) == queue.Found("finished", found.run_dir)
    (resumed,) = read_json(found.run_dir / "metadata.json")["resumes"]
    assert resumed["resume"] == "exact"
    assert resumed["step"] >= 1000
    starts = read_json(work.job.folder / "queue.json")["starts"]
    assert len(starts) == 2
    assert queue.main([*map(str, args)]) == 0
    assert "0 runs to do" in capsys.readouterr().out
    assert len(read_json(work.job.folder / "queue.json")["starts"]) == 2


def test_the_time_limit_stops_the_runs(tmp_path: Path) -> None:
    family = manifest(tmp_path / "small", ppo=50_000_000)
    args = ("--family", family, "--folder", tmp_path / "runs", "--processes", 2)
    code, output = run("run", *args, "--minutes", 0.1)
    assert code == 0, output
    assert "0 finished, 0 failed, 2 stopped" in output
    assert "asking every run to save" in (tmp_path / "runs" / "queue.log").read_text()


def test_a_failed_run_is_named_and_stops_no_other(small: tuple[Path, Path]) -> None:
    log = (small[1] / "queue.log").read_text()
    (line,) = [line for line in log.splitlines() if "small/broken seed 1: failed" in line]
    assert "NoSuchEnv" in line
    assert "small/ppo seed 1: finished" in log


def test_runs_of_other_settings_are_refused_before_anything_starts(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    family, runs = small
    shutil.copytree(family, tmp_path / "small")
    (tmp_path / "small" / "ppo.yaml").write_text(f"{PPO}algo_kwargs: {{gamma: 0.9}}\n")
    args = ["run", "--family", str(tmp_path / "small"), "--folder", str(runs)]
    assert queue.main(args) == 2


def test_with_must_finish_only_runs_that_fit_are_started(tmp_path: Path) -> None:
    family = manifest(tmp_path / "small", ppo=1000)
    options = queue.RunArgs(folder=tmp_path, minutes=1.0, must_finish=True, family=(str(family),))
    (work, _) = queue.all_work(options, tmp_path)
    one = queue.Queue(options, [], queue.QueueLog(tmp_path), {})
    one._deadline = time.monotonic() + 60
    assert one._fits(work), "no speed is known yet"
    one._speeds = [1000 / 50.0]
    assert one._fits(work)
    one._speeds = [1000 / 70.0]
    assert not one._fits(work)


@pytest.mark.parametrize("works", [True, False])
def test_mps_is_started_and_ended_by_the_queue(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\necho "$1$CUDA_MPS_PIPE_DIRECTORY" >> {calls}\ntest "$1" || cat >> {calls}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(queue, "_gpu_answers", lambda _: works)
    place = str(tmp_path / "runs" / "mps")
    with queue.multi_process_service(
        tmp_path / "runs", True, queue.QueueLog(tmp_path / "runs")
    ) as variables:
        assert variables.get("CUDA_MPS_PIPE_DIRECTORY") == (place if works else None)
        assert calls.read_text().splitlines()[0] == f"-d{place}"
        assert ("quit" in calls.read_text()) is not works
    assert calls.read_text().count("quit") == 1


# -- pack and merge --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A benchmark and the folder of its finished runs; seed 2 of one of the presets is missing."""
    place = tmp_path_factory.mktemp("queue")
    family, runs = manifest(place / "small", broken=64, dqn=1200, ppo=1024), place / "runs"
    (family / "broken.yaml").write_text(f"{PPO}env_id: NoSuchEnv-v0\n")
    args = ("run", "--family", family, "--folder", runs, "--processes", 2, "--commit", "abc123")
    code, output = run(*args, "--seeds", 1, "--device", "cpu", "--acceleration", "eager")
    assert code == 1, output
    code, output = run(*args, "--seeds", 2, "--presets", "ppo")
    assert code == 0, output
    return family, runs


@pytest.fixture(scope="module")
def packed(small: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, runs = small
    out = tmp_path_factory.mktemp("packed")
    assert (
        queue.main(["pack", "--family", str(family), "--folder", str(runs), "--out", str(out)]) == 0
    )
    return out


def test_a_pack_holds_figures_and_a_policy_that_evaluates(
    small: tuple[Path, Path], packed: Path, tmp_path: Path
) -> None:
    family, runs = small
    assert sorted(path.name for path in packed.iterdir()) == ["queue.log", "results-1.tar.gz"]
    queue.extract(packed / "results-1.tar.gz", tmp_path)
    for job in plan(load_benchmark(family), runs):
        if job.entry.preset == "broken" or (job.entry.preset, job.seed) == ("dqn", 2):
            assert not (tmp_path / job.folder.relative_to(runs)).exists()
            continue
        (run_dir,) = job.folder.glob("*/")
        there = tmp_path / run_dir.relative_to(runs)
        names = {*queue.PACKED, "policy.pt"}
        assert {path.name for path in there.iterdir()} == names
        assert (there.parent / "queue.json").is_file()
        for name in queue.PACKED:
            assert (there / name).read_bytes() == (run_dir / name).read_bytes()
        assert evaluate_checkpoint(there / "policy.pt", 2) == evaluate_checkpoint(run_dir, 2)


def test_parts_stay_below_the_limit_and_what_has_no_room_is_named() -> None:
    runs = [{f"small/ppo/seed{seed}/run/policy.pt": os.urandom(40_000)} for seed in range(6)]
    parts, left_out = queue.split(runs, max_part=100_000, max_parts=2)
    assert [len(part) < 100_000 for part in parts] == [True, True]
    assert left_out == ["small/ppo/seed4/run", "small/ppo/seed5/run"]
    with tarfile.open(fileobj=io.BytesIO(parts[1])) as archive:
        assert archive.getnames() == [name for run in runs[2:4] for name in run]


@pytest.fixture
def target(small: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the benchmark whose presets are whole presets of a folder ``configs``."""
    configs = tmp_path / "configs"
    configs.mkdir()
    monkeypatch.setattr(queue, "presets_dir", lambda: configs)
    shutil.copytree(small[0], tmp_path / "small")
    return tmp_path / "small"


def test_merged_runs_are_kept_with_what_they_were_made_with(
    packed: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queue.main(["merge", str(packed), "--family", str(target)]) == 0
    assert capsys.readouterr().out.count("added:") == 3
    benchmark = load_benchmark(target)
    results = kept_results(benchmark)
    assert results is not None
    dqn, ppo = results.presets
    assert [run.seed for run in dqn.runs] == [1]
    assert not dqn.is_whole
    assert "1 of 2 seeds" in dqn.summary()
    assert [run.seed for run in ppo.runs] == [1, 2]
    assert ppo.is_whole
    first, second = ppo.runs
    assert (first.device, first.acceleration) == ("cpu", "eager")
    repeat = "rl-training train --config ppo.yaml --seed 1 --total-timesteps 1024"
    assert first.command == f"{repeat} --device cpu --torch-threads 1"
    assert second.device == config_from_file(target / "ppo.yaml").device == "auto"
    assert ppo.settings["device"] == "auto"
    assert ppo.command("small") == str(first.command).replace("seed 1", "seed S")
    for one in (first, second):
        origin = results.origin_of(one)
        assert origin is not None
        assert origin.device == "cpu"
        assert "torch" in origin.versions
        assert origin.commit is not None

    before = (target / "results.json").read_text()
    assert queue.main(["merge", str(packed), "--family", str(target)]) == 0
    assert capsys.readouterr().out.count("ignored:") == 3
    assert (target / "results.json").read_text() == before
    assert queue.main(["list", "--family", str(target)]) == 0
    left = capsys.readouterr().out.splitlines()[:-1]
    assert [name for name in left if "broken" not in name] == ["small/dqn seed 2"]


def test_presets_state_what_was_merged(packed: Path, target: Path) -> None:
    configs = target.parent / "configs"
    for name in ("ppo", "dqn"):
        settings = config_from_file(target / f"{name}.yaml").to_yaml()
        (configs / f"{name}.yaml").write_text(f"{settings}partial:\n  steps: 1\n")
    benchmark = load_benchmark(target)
    queue.extract(packed / "results-1.tar.gz", target.parent / "runs")
    queue.merge_benchmark(benchmark, target.parent / "runs")
    results = kept_results(benchmark)
    assert results is not None
    # The zoo's file is now nothing but the name of a preset.
    for name in ("ppo", "dqn"):
        (target / f"{name}.yaml").write_text(f"format: 1\npreset: {name}\n")
    for own in results.presets:
        queue.update_preset(benchmark, own)
    ppo, dqn = (yaml.safe_load((configs / f"{name}.yaml").read_text()) for name in ("ppo", "dqn"))
    assert "partial" not in ppo
    assert ppo["verified"]["seeds"] == [1, 2]
    assert ppo["algo"] == "ppo"
    assert "verified" not in dqn
    assert dqn["partial"]["seeds"] == [1]
    assert "1 of 2 seeds" in dqn["partial"]["return"]
    assert "--device cpu" in ppo["verified"]["command"]


def test_runs_of_another_preset_are_not_merged(packed: Path, target: Path) -> None:
    (target / "ppo.yaml").write_text(f"{PPO}algo_kwargs: {{gamma: 0.9}}\n")
    assert queue.main(["merge", str(packed), "--family", str(target)]) == 2
    assert not (target / "results.json").exists()


def test_a_pack_writes_nothing_elsewhere_and_damage_is_named(tmp_path: Path) -> None:
    for name in ("bad", "place", "empty"):
        (tmp_path / name).mkdir()
    outside, damaged = tmp_path / "bad" / "a.tar.gz", tmp_path / "bad" / "b.tar.gz"
    outside.write_bytes(queue._archive([{"../outside.json": b"{}"}]))
    damaged.write_bytes(outside.read_bytes()[:40])
    for path in (outside, damaged):
        with pytest.raises(UserError, match=path.name):
            queue.extract(path, tmp_path / "place")
    assert not (tmp_path / "outside.json").exists()
    with pytest.raises(UserError, match="empty"):
        queue.pack_files([tmp_path / "empty"])


# -- merging, figure by figure ---------------------------------------------------------------------


def test_origins_are_kept_per_run(tmp_path: Path) -> None:
    benchmark = load_benchmark(manifest(tmp_path / "small", ppo=1024))
    keep(benchmark, finished("ppo", 2, commit="first"))
    keep(benchmark, finished("ppo", 1, commit="second"), finished("ppo", 2, commit="third"))
    results = read_results(tmp_path / "small" / "results.json")
    (together,) = merge_runs(
        benchmark, None, [finished("ppo", 1), finished("ppo", 2)]
    ).results.made_with
    assert together.commit == "abc", "runs made alike share an origin"
    commits = {run.seed: results.origin_of(run) for run in results.presets[0].runs}
    assert {seed: one.commit for seed, one in commits.items() if one} == {1: "second", 2: "first"}
    assert len(results.made_with) == 2


def test_results_of_other_settings_are_replaced(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "small", ppo=1024)
    keep(load_benchmark(folder), finished("ppo", 1, 10.0), finished("ppo", 2, 10.0))
    (folder / "ppo.yaml").write_text(f"{PPO}algo_kwargs: {{gamma: 0.9}}\n")
    benchmark = load_benchmark(folder)
    merge = merge_runs(benchmark, kept_results(benchmark), [finished("ppo", 2, 20.0)])
    assert merge.replaced == ["ppo"]
    (own,) = merge.results.presets
    assert [(run.seed, run.mean) for run in own.runs] == [(2, 20.0)]
    assert own.settings["algo_kwargs"]["gamma"] == 0.9


def test_files_from_before_origins_were_kept_per_run_can_be_merged_into(tmp_path: Path) -> None:
    benchmark = load_benchmark(manifest(tmp_path / "small", ppo=1024))
    keep(benchmark, finished("ppo", 1, commit="old"))
    path = tmp_path / "small" / "results.json"
    content = json.loads(path.read_text())
    for name in ("device", "acceleration", "command", "made_with"):
        del content["presets"][0]["runs"][0][name]
    path.write_text(json.dumps(content))
    keep(benchmark, finished("ppo", 2, commit="new"))
    results = kept_results(benchmark)
    assert results is not None
    assert [origin.commit for origin in results.made_with] == ["old", "new"]
    old, new = results.presets[0].runs
    assert results.origin_of(old) is None
    assert results.origin_of(new) == results.made_with[1]
