"""Studies in real processes: killed, stopped, shared, on Ray; and a bad preset that gets better."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from rl_training.runs import read_json
from rl_training.tools.zoo.jobs import latest_row
from state_compare import assert_same_run
from test_tune import ENV, short_config
from test_zoo_presets import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]  # on a busy machine
TOTAL = 24_576


def write_inputs(folder: Path) -> list[str]:
    """Write preset and space; return the words of the command."""
    config = short_config(total_timesteps=TOTAL, num_envs=8, checkpoint_interval=2048)
    (folder / "base.yaml").write_text(config.to_yaml())
    (folder / "space.yaml").write_text("learning_rate: [0.0003, 0.001]\nnum_steps: [32, 64]\n")
    words = ["tune", "base.yaml", "--space", "space.yaml", "--sampler", "random"]
    return [*words, "--pruner", "none", "--evaluations", "4", "--final-seeds", "0", "--json"]


def start(folder: Path, words: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENV,
        cwd=folder,
        **options,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=900)
    return process.returncode, printed


def steps_of(folder: Path) -> int:
    return max((latest_row(log.parent)[0] for log in folder.rglob("metrics.jsonl")), default=0)


def halfway(process: subprocess.Popen[str], study: Path) -> int | None:
    """Return the pid of a run that a process started, if it has a checkpoint and steps to go."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "ppid=,pid=,args="], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        parent, pid, *words = line.split(None, 2)
        trial = re.search(r"trial-\d+", "".join(words))
        if parent == str(process.pid) and trial:
            has_steps_to_go = 4096 <= steps_of(study / trial[0]) <= TOTAL // 2
            return int(pid) if has_steps_to_go else None
    return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_study_that_was_stopped_ends_as_one_that_was_not(
    how: signal.Signals, tmp_path: Path
) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    words = [*write_inputs(tmp_path / "whole"), "--trials", "2", "--seeds", "1"]
    write_inputs(tmp_path / "stopped")
    code, printed = ended(start(tmp_path / "whole", words))
    assert code == 0, printed
    wanted = json.loads(printed.splitlines()[-1])

    folder = tmp_path / "stopped"
    process = start(folder, words)
    wait_until(lambda: steps_of(folder / "runs/tune/base/trial-0001") >= 4096, 120)
    process.send_signal(how)
    code, printed = ended(process)
    if how == signal.SIGINT:
        assert code == 0, printed
        assert "the same command continues" in printed
    (run,) = (folder / "runs/tune/base/trial-0001/seed101").glob("ppo__*")
    wait_until(lambda: read_json(run / "summary.json").get("status") == "interrupted")
    code, printed = ended(start(folder, words))
    assert code == 0, printed
    found = json.loads(printed.splitlines()[-1])
    assert {**found, "interrupted": False} == wanted
    assert len(read_json(run / "metadata.json")["resumes"]) == 1
    (same,) = (tmp_path / "whole/runs/tune/base/trial-0001/seed101").glob("ppo__*")
    assert_same_run(run, same)


@pytest.mark.parametrize("storage", ["study.db", "study.log"])
def test_two_processes_share_a_study_and_one_is_killed(storage: str, tmp_path: Path) -> None:
    words = [*write_inputs(tmp_path), "--trials", "5", "--seeds", "1", "--storage", storage]
    first = start(tmp_path, words)
    study = tmp_path / "runs/tune/base"
    wait_until(lambda: steps_of(study / "trial-0000") >= 2048, 120)
    second = start(tmp_path, words)
    try:
        wait_until(lambda: steps_of(study / "trial-0001") >= 2048, 120)
        wait_until(lambda: halfway(first, study) is not None, 120)
        first.send_signal(signal.SIGKILL)
        code, printed = ended(second)
    finally:
        first.kill()
        second.kill()
        first.communicate(timeout=30)
    assert code == 0, printed
    assert json.loads(printed.splitlines()[-1])["trials"] == {"complete": 5}
    runs = sorted(study.glob("trial-*/seed101/ppo__*"))
    assert len(runs) == 5, "none was started twice"
    assert {read_json(run / "summary.json")["status"] for run in runs} == {"finished"}
    resumes = [read_json(run / "metadata.json").get("resumes", []) for run in runs]
    assert sum(map(len, resumes)) == 1
    assert {one["resume"] for each in resumes for one in each} == {"exact"}


def test_a_run_that_is_killed_continues(tmp_path: Path) -> None:
    process = start(tmp_path, [*write_inputs(tmp_path), "--trials", "1", "--seeds", "1"])
    study = tmp_path / "runs/tune/base"
    wait_until(lambda: halfway(process, study) is not None, 120)
    run = halfway(process, study)
    assert run is not None
    os.kill(run, signal.SIGKILL)
    code, printed = ended(process)
    assert code == 0, printed
    assert "killed by signal 9; it continues from its last checkpoint (retry 1 of 2)" in printed
    (folder,) = study.glob("trial-0000/seed101/ppo__*")
    (resumed,) = read_json(folder / "metadata.json")["resumes"]
    assert resumed["resume"] == "exact"
    assert json.loads(printed.splitlines()[-1])["trials"] == {"complete": 1}


def test_trials_run_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = [*write_inputs(tmp_path), "--trials", "2", "--seeds", "1", "--engine", "ray"]
    code, printed = ended(start(tmp_path, [*words, "--jobs", "2"]))
    assert code == 0, printed
    assert json.loads(printed.splitlines()[-1])["trials"] == {"complete": 2}


def test_a_bad_preset_gets_better_on_seeds_that_were_not_tuned_on(tmp_path: Path) -> None:
    words = ["tune", "ppo/cartpole", "--trials", "12", "--seeds", "2", "--jobs", "2", "--json"]
    words += ["--evaluations", "5", "--final-seeds", "3", "--"]
    words += ["--learning-rate", "1e-6", "--total-timesteps", "2e4", "--eval-episodes", "10"]
    code, printed = ended(start(tmp_path, words))
    assert code == 0, printed
    found = json.loads(printed.splitlines()[-1])
    assert min(found["tuned"]["returns"].values()) > max(found["preset"]["returns"].values())
    assert found["tuned"]["low"] > 300 > found["preset"]["high"]
    best = ["train", "--config", found["best_config"], "--seed", "1", "--no-progress", "--json"]
    code, printed = ended(start(tmp_path, [*best, "--eval-interval", "4000"]))
    assert code == 0, printed
    metrics = json.loads(printed.splitlines()[-1])["metrics"]
    assert metrics["eval/return_mean"] == found["tuned"]["returns"]["1"], "the same run"
