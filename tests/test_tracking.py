"""TensorBoard and Weights & Biases: what they show is what the run logged, resumed or not."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.runs import read_json
from rl_training.runtime.callbacks import CheckpointCallback
from rl_training.runtime.workflows import resume_training
from state_compare import metric_rows


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step" in row]


# -- resumed curves --------------------------------------------------------------------------------


def test_a_finished_run_that_is_extended_keeps_its_final_evaluation(
    make_config: MakeConfig,
) -> None:
    """Also where it was not the best: what was logged after the last save would be cut off."""
    trainer = ExperimentManager.setup(make_config())
    (saving,) = [c for c in trainer.callbacks if isinstance(c, CheckpointCallback)]
    saving.best = 1e9
    run = trainer.train()
    before = metric_rows(run.run_dir)
    assert "eval/return_mean" in before[-1]
    resume_training(run.run_dir, total_timesteps=1024)
    assert metric_rows(run.run_dir)[: len(before)] == before
    assert not list(run.run_dir.glob("metrics.after-*"))


def test_the_clock_of_a_resumed_run_goes_on(make_config: MakeConfig) -> None:
    run = ExperimentManager.setup(make_config(total_timesteps=512)).train()
    stood_at = rows_of(run.run_dir)[-2]["time/elapsed"]
    assert stood_at > 0
    resume_training(run.run_dir, total_timesteps=1024)
    times = [row["time/elapsed"] for row in rows_of(run.run_dir) if "time/elapsed" in row]
    assert times == sorted(times)
    assert times[4] > stood_at


# -- TensorBoard -----------------------------------------------------------------------------------


def test_tensorboard_shows_hyperparameters_and_one_curve(make_config: MakeConfig) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = make_config(tensorboard=True, learning_rate=1e-3, hidden_sizes=[32, 16])
    run = ExperimentManager.setup(config).train()
    resume_training(run.run_dir, total_timesteps=1024)
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    plugin = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    shown = HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert shown["learning_rate"].number_value == 1e-3
    assert shown["hidden_sizes"].string_value == "[32, 16]"
    assert shown["env_id"].string_value == "CartPole-v1"
    assert shown["anneal_lr"].bool_value is True
    assert "noop_max" not in shown
    steps = [event.step for event in events.Tensors("rollout/return_mean")]
    logged = [row["step"] for row in rows_of(run.run_dir) if "rollout/return_mean" in row]
    assert steps == logged


# -- Weights & Biases ------------------------------------------------------------------------------

TRAIN = """
import sys
from rl_training.config import config_from_file
from rl_training.experiment.manager import ExperimentManager
ExperimentManager.setup(config_from_file(sys.argv[1])).train()
"""


def offline_files(run_dir: Path) -> list[Path]:
    """In the order they were begun; a killed run's is still written to when the next begins."""
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


def records(path: Path) -> Iterator[Any]:
    """An offline run's records: LevelDB's log format (32 KiB blocks) behind a header of 7 bytes.

    A last record that is only half in the file yet is left out: the process that writes it outlives
    a killed run, and may be writing.
    """
    from wandb.proto import wandb_internal_pb2

    content, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32_768 - position % 32_768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        if position + 7 + length > len(content):
            return
        part += content[position + 7 : position + 7 + length]
        position += 7 + length
        whole, last = 1, 4
        if kind in (whole, last):
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def history(path: Path) -> list[tuple[int, dict[str, float]]]:
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            found.append((int(items.pop("_step")), items))
    return found


@pytest.mark.full
def test_a_killed_and_resumed_run_is_one_curve_in_wandb(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, for real: the last part holds the metric log, each row once."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config(
        total_timesteps=80_000, wandb=True, checkpoint_interval=2048, eval_episodes=0
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    process = subprocess.Popen([sys.executable, "-c", TRAIN, str(file)])
    try:
        end = time.monotonic() + 90
        while True:
            runs = list(config.output_dir.glob("*/metrics.jsonl"))
            if runs and rows_of(runs[0].parent) and rows_of(runs[0].parent)[-1]["step"] > 5000:
                break
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    run_dir = runs[0].parent
    killed_at = rows_of(run_dir)[-1]["step"]
    resume_training(run_dir, total_timesteps=killed_at + 4096)
    resumed_from = read_json(run_dir / "metadata.json")["resumes"][0]["step"]
    assert resumed_from <= killed_at
    parts = offline_files(run_dir)
    assert len(parts) == 2
    (run,) = {r.run.run_id for path in parts for r in records(path) if r.run.run_id}
    assert run == run_dir.name
    logged = rows_of(run_dir)
    end = time.monotonic() + 20  # its own process may still be writing
    while len(told := history(parts[-1])) < len(logged) and time.monotonic() < end:
        time.sleep(0.2)
    assert [step for step, _ in told] == [row["step"] for row in logged], "no gap, no overlap"
    assert [row["losses/loss"] for _, row in told] == [row["losses/loss"] for row in logged]
