"""Trackers: MLflow for real, read back with its own client, and trackers that fail."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from rl_training import PPO
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runs import read_json
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.workflows import resume_training
from rl_training.tracking import Status, TrackedRun, opening
from rl_training.tracking import mlflow as mlflow_tracking
from state_compare import metric_rows

TRAIN = """
import sys
from rl_training.config import config_from_file
from rl_training.experiment.manager import ExperimentManager
ExperimentManager.setup(config_from_file(sys.argv[1])).train()
"""


def logged_rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step" in row]


# -- MLflow ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Files: a database takes seconds to create."""
    return f"file://{tmp_path / 'mlruns'}"


@pytest.fixture
def client(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store of the test's own, which runs use, too."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.replace("DATABASE", str(tmp_path)))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return mlflow.MlflowClient()


def only_run(client: Any, experiment: str = "rl_training") -> Any:
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def require_same_rows(client: Any, run: Any, rows: list[dict[str, Any]]) -> None:
    """Every value of the log is in MLflow, once and at its step."""
    expected: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name != "step":
                expected[name].append((row["step"], value))
    assert set(run.data.metrics) == set(expected)
    for name, values in expected.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in history] == values, name


@pytest.mark.full
@pytest.mark.parametrize("store", ["sqlite:///DATABASE/ml.db"])
def test_a_killed_and_resumed_run_is_one_run_in_mlflow(
    make_config: MakeConfig, tmp_path: Path, client: Any
) -> None:
    config = make_config(
        total_timesteps=200_000,
        mlflow=True,
        mlflow_experiment="mine",
        checkpoint_interval=1024,
        eval_interval=1024,
        anneal_lr=False,
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    process = subprocess.Popen([sys.executable, "-c", TRAIN, str(file)])
    try:
        end = time.monotonic() + 90
        while True:
            found = list(config.output_dir.glob("*/metrics.jsonl"))
            ids = found and read_json(found[0].parent / "trackers.json").get("mlflow")
            if ids and client.get_run(ids["run_id"]).data.metrics.get("eval/episodes"):
                seen = client.get_metric_history(ids["run_id"], "losses/loss")[-1].step
                if seen > 2500:
                    break
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    run_dir = found[0].parent
    run = only_run(client, "mine")
    assert run.info.status == "RUNNING"
    killed_at = logged_rows(run_dir)[-1]["step"]
    resume_training(run_dir, total_timesteps=killed_at + 2048)
    run = only_run(client, "mine")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == run_dir.name
    assert run.data.params["env_id"] == "CartPole-v1"
    rows = logged_rows(run_dir)
    # The clock of the steps that were lost is that of the process that was killed.
    for row in rows:
        row.pop("time/elapsed", None)
        row.pop("time/steps_per_second", None)
    for name in ("time/elapsed", "time/steps_per_second"):
        steps = [one.step for one in client.get_metric_history(run.info.run_id, name)]
        assert steps == sorted({row["step"] for row in rows})
        del run.data.metrics[name]
    require_same_rows(client, run, rows)


def test_rows_that_were_not_sent_are_sent_by_the_resumed_run(
    make_config: MakeConfig, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.log_batch
    calls = []

    def fails_later(self: Any, *args: Any, **given: Any) -> Any:
        calls.append(given)
        if len(calls) > 2:
            raise ConnectionError("gone")
        return real(*args, **given)

    monkeypatch.setattr(mlflow_tracking, "_MOST_METRICS", 10)
    with monkeypatch.context() as patch:
        patch.setattr(type(client), "log_batch", fails_later)
        with pytest.warns(UserWarning, match="ConnectionError: gone"):
            result = ExperimentManager.setup(make_config(mlflow=True)).train()
    resume_training(result.run_dir, total_timesteps=1024)
    run = only_run(client)
    assert run.info.status == "FINISHED"
    require_same_rows(client, run, logged_rows(result.run_dir))


def test_steps_that_are_taken_again_are_not_sent_again(
    make_config: MakeConfig, client: Any
) -> None:
    config = make_config(
        mlflow=True, checkpoint_interval=256, keep_checkpoints=9, anneal_lr=False, eval_episodes=0
    )
    result = ExperimentManager.setup(config).train()
    before = only_run(client).data.metrics
    (older,) = result.run_dir.glob("checkpoints/*256.pt")
    with pytest.warns(UserWarning, match="already trained up to"):
        resume_training(older)
    run = only_run(client)
    assert run.data.metrics == before
    history = client.get_metric_history(run.info.run_id, "losses/loss")
    rows = logged_rows(result.run_dir)
    assert [(m.step, m.value) for m in history] == [(r["step"], r["losses/loss"]) for r in rows]


def test_an_interrupted_run_is_killed_in_mlflow_until_it_is_resumed(
    make_config: MakeConfig, client: Any
) -> None:
    class Stop(Callback):
        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    result = ExperimentManager.setup(make_config(mlflow=True), callbacks=[Stop()]).train()
    assert only_run(client).info.status == "KILLED"
    resume_training(result.run_dir)
    run = only_run(client)
    assert run.info.status == "FINISHED"
    require_same_rows(client, run, logged_rows(result.run_dir))


def test_a_failed_run_is_failed_in_mlflow(make_config: MakeConfig, client: Any) -> None:
    def fail(trainer: Any, event: IterationEnd) -> None:
        raise RuntimeError("as it happens")

    with pytest.raises(RuntimeError, match="as it happens"):
        ExperimentManager.setup(make_config(mlflow=True), callbacks=[fail]).train()
    assert only_run(client).info.status == "FAILED"


def test_a_run_in_memory_is_one_run_in_mlflow(client: Any) -> None:
    model = PPO(
        "CartPole-v1",
        num_envs=2,
        num_steps=16,
        eval_episodes=1,
        mlflow=True,
        progress=False,
    )
    model.learn(64, run_dir=None)
    assert only_run(client).info.status == "FINISHED"
    model.learn(64, run_dir=None)
    run = only_run(client)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "ppo__CartPole-v1__seed1")
    history = client.get_metric_history(run.info.run_id, "time/elapsed")
    assert [one.step for one in history] == [32, 64, 96, 128]


@pytest.mark.parametrize("name", ["a/b", "a b.c-d_1", "a:b", "%$", "../a", "/a", "a//b", ".", "é"])
def test_names_of_metrics_are_ones_that_mlflow_allows(name: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    changed = mlflow_tracking.metric_name(name)
    validation._validate_metric_name(changed)
    if name in ("a/b", "a b.c-d_1"):
        assert changed == name


def test_a_server_that_does_not_answer_holds_nothing_up(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr(mlflow_tracking, "CLOSE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.warns(UserWarning, match="mlflow failed.*took more than"):
            result = ExperimentManager.setup(make_config(mlflow=True)).train()
        assert time.monotonic() - started < 20
    assert result.stop_reason == "total_timesteps reached"


def test_retries_draw_no_random_numbers_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment may use the global generator, which a checkpoint holds."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # refuses connections
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", raising=False)
    config: TrainConfig[Any] = TrainConfig(algo="ppo", env_id="CartPole-v1", mlflow=True)
    before = random.getstate()
    tracker = mlflow_tracking.MlflowTracker(TrackedRun("x", config, None, list, {}, lambda _: None))
    with pytest.raises(Exception, match="Max retries exceeded"):
        tracker.close("finished")
    assert random.getstate() == before


# -- trackers that fail ----------------------------------------------------------------------------


class Recorder:
    """Keeps rows, and fails in the method that `fails_in` names."""

    made: list[Recorder]
    fails_in: str = ""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.earlier = list(run.earlier_rows())
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.status: Status | None = None
        type(self).made.append(self)
        run.save_identity({"id": "seven"})
        self._fail_in("init")

    def _fail_in(self, place: str) -> None:
        if self.fails_in == place:
            raise OSError("no space left, no network")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if len(self.rows) == 2:
            self._fail_in("write")
        self.rows.append((step, dict(metrics)))

    def close(self, status: Status) -> None:
        self.status = status
        self._fail_in("close")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """A fresh tracker, registered as ``recorder``."""

    class Fresh(Recorder):
        made = []

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "Registered", Fresh, raising=False)
    point = EntryPoint("recorder", f"{__name__}:Registered", opening.ENTRY_POINTS)
    broken = EntryPoint("broken", "no_such_module:Tracker", opening.ENTRY_POINTS)
    points = {"recorder": point, "broken": broken}
    monkeypatch.setattr(opening, "installed_points", lambda *_: points)
    return Fresh


def test_a_tracker_gets_every_row_and_what_it_saved(
    make_config: MakeConfig, recorder: type[Recorder]
) -> None:
    config = make_config(trackers=["recorder"])
    result = ExperimentManager.setup(config).train()
    (first,) = recorder.made
    rows = [(row.pop("step"), row) for row in logged_rows(result.run_dir)]
    assert first.rows == rows
    assert (first.status, first.earlier, first.run.identity) == ("finished", [], {})
    assert first.run.resumed_at is None
    assert first.run.settings()["env_id"] == "CartPole-v1"
    resume_training(result.run_dir, total_timesteps=config.total_timesteps + 256)
    again = recorder.made[1]
    assert again.run.identity == {"id": "seven"}
    assert again.run.resumed_at == config.total_timesteps
    assert again.earlier == rows
    assert again.rows[0][0] > config.total_timesteps


@pytest.mark.parametrize("place", ["init", "write", "close"])
def test_a_tracker_that_fails_warns_once_and_training_ends_the_same(
    make_config: MakeConfig, recorder: type[Recorder], place: str
) -> None:
    whole = ExperimentManager.setup(make_config()).train()
    recorder.fails_in = place
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = ExperimentManager.setup(make_config(trackers=["recorder"])).train()
    ours = [str(one.message) for one in seen if "recorder" in str(one.message)]
    assert len(ours) == 1
    assert "no space left" in ours[0]
    assert metric_rows(result.run_dir) == metric_rows(whole.run_dir)


def test_tensorboard_that_cannot_write_does_not_end_training(make_config: MakeConfig) -> None:
    result = ExperimentManager.setup(make_config(tensorboard=True)).train()
    shutil.rmtree(result.run_dir / "tensorboard")
    (result.run_dir / "tensorboard").write_text("not a folder")
    with pytest.warns(UserWarning, match="tensorboard failed"):
        resume_training(result.run_dir, total_timesteps=1024)
    assert logged_rows(result.run_dir)[-1]["step"] == 1024


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trackers": ["recodrer"]}, "Did you mean 'recorder'"),
        ({"trackers": ["broken"]}, "no_such_module"),
        ({"trackers": ["mlflow"]}, "set mlflow: true"),
    ],
)
def test_trackers_that_cannot_be_used_are_refused_before_the_run(
    make_config: MakeConfig,
    recorder: type[Recorder],
    settings: dict[str, Any],
    message: str,
) -> None:
    config = make_config(**settings)
    with pytest.raises(ConfigError, match=message):
        ExperimentManager.setup(config)
    assert not list(config.output_dir.glob("*"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_extra_is_refused_before_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else real(n))
    with pytest.raises(ConfigError, match=rf"in the clone: pip install '.\[{name}\]'"):
        ExperimentManager.setup(make_config(**{name: True}))


def test_a_hostile_file_of_trackers_is_ignored(
    make_config: MakeConfig, recorder: type[Recorder]
) -> None:
    result = ExperimentManager.setup(make_config(trackers=["recorder"])).train()
    hostile = {"recorder": {"id": ["x"], "other": "y"}, "wandb": 3}
    (result.run_dir / "trackers.json").write_text(json.dumps(hostile))
    resume_training(result.run_dir, total_timesteps=1024)
    assert recorder.made[1].run.identity == {"other": "y"}
