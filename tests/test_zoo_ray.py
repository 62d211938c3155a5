"""Benchmarks as tasks of a Ray cluster: lost tasks are repeated from the last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rl_training.cli import main
from rl_training.runs import read_json
from rl_training.tools.zoo.jobs import Job, job_status
from state_compare import assert_same_run
from test_remote_source import processes_of
from test_zoo_presets import ENTRY, QUICK, jobs_of, manifest, start, wait_until

pytest.importorskip("ray")


def runs_under(folder: Path) -> list[tuple[int, int]]:
    """The processes of runs below a folder, each with its parent."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [
        (int(pid), int(parent))
        for pid, parent, *words in rows
        if words and "rl_training.tools.zoo.child" in words[0] and str(folder) in words[0]
    ]


def has_trained(job: Job) -> bool:
    now = job_status(job)
    return now.status == "unfinished" and now.step >= 4096


def test_a_lost_task_continues_and_so_does_a_stopped_benchmark(tmp_path: Path) -> None:
    path = manifest(tmp_path / "small", {**ENTRY, "steps": 61_440, "seeds": [1]})
    (path.parent / "quick.yaml").write_text(QUICK + "checkpoint_interval: 2048\ntorch_threads: 1\n")
    out = tmp_path / "out"
    (job,) = jobs_of(path, out)
    process = start(
        "run", path, "--engine", "ray", "--output-dir", out, "--processes", 1, new_session=True
    )
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()))
    reader.start()
    try:
        wait_until(lambda: has_trained(job))
        ((run, task),) = runs_under(out)
        os.kill(task, signal.SIGKILL)
        # A new task resumes the same run; the process of the first one has saved and ended.
        wait_until(lambda: any(pid != run for pid, _ in runs_under(out)))
        assert run not in [pid for pid, _ in runs_under(out)]
        run_dir = job_status(job).run_dir
        assert run_dir is not None
        wait_until(lambda: len(read_json(run_dir / "metadata.json").get("resumes", [])) == 1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 0
        end = time.monotonic() + 30
        while (left := processes_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.2)
        assert left == []
    finally:
        process.kill()
        reader.join(timeout=30)
    text = "".join(printed)
    assert "quick seed 1: its task was lost" in text
    assert "continues from its last checkpoint (retry 1 of 2)" in text
    assert "0 of 1 runs are finished" in text
    assert runs_under(out) == []
    assert read_json(run_dir / "summary.json")["status"] == "interrupted"
    assert main(["zoo", "run", str(path), "--output-dir", str(out)]) == 0
    resumes = read_json(run_dir / "metadata.json")["resumes"]
    assert [one["resume"] for one in resumes] == ["exact", "exact"]
    assert main(["zoo", "run", str(path), "--output-dir", str(tmp_path / "whole")]) == 0
    (whole,) = jobs_of(path, tmp_path / "whole")
    whole_run = job_status(whole).run_dir
    assert whole_run is not None
    assert_same_run(whole_run, run_dir)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpus-per-run", "2"], "--cpus-per-run needs --engine ray"),
        (["--retries", "1"], "--retries needs --engine ray"),
        (["--engine", "ray", "--cpus-per-run", "0"], "--cpus-per-run must be above 0; got 0"),
        (["--engine", "ray", "--retries", "-1"], "--retries must not be negative; got -1"),
    ],
)
def test_settings_of_ray_are_checked(
    words: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    path = manifest(tmp_path / "small")
    assert main(["zoo", "run", str(path), "--output-dir", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
