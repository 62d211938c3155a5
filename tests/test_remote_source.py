"""Workers in other processes: the same run as in one process, whatever happens to them.

The first part exchanges messages with workers in this process, as bytes, so that every algorithm
can be tried; the second one uses Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import WITH_MEMORY, MakeConfig, plain
from direct_workers import DirectWorkers
from remote_env import LoggedEnv
from rl_training.errors import ConfigError, LostWorkerError, Paused
from rl_training.experiment.manager import ExperimentManager
from rl_training.registry import ALGORITHMS, RAY
from rl_training.runtime import ray_workers
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, differences, final_state, metric_rows

REMOTE = [name for name, entry in ALGORITHMS.items() if RAY in entry.engines] + WITH_MEMORY
LAGGING = [name for name, entry in ALGORITHMS.items() if 1 in entry.lags]


def state_of(run: Path) -> dict[str, Any]:
    """The last checkpoint without the settings that may differ."""
    state = final_state(run)
    for name in ("engine", "worker_timeout"):
        state["config"].pop(name)
    return state


def same(a: Path, b: Path) -> bool:
    return differences(state_of(a), state_of(b)) == [] and metric_rows(a) == metric_rows(b)


def config_of(algo: str, make_config: MakeConfig, **settings: Any) -> Any:
    on_policy = 1 in ALGORITHMS[plain(algo)].lags
    more: dict[str, Any] = {"normalize_reward": True} if on_policy else {}
    if algo in ("recurrent_ppo", "ppo+gru"):
        more["num_minibatches"] = 2
    total = 512 if on_policy else 160
    return make_config(
        algo=algo,
        **{"num_envs": 2, "normalize_obs": True, "total_timesteps": total, **more, **settings},
    )


@pytest.mark.parametrize("algo", REMOTE)
def test_without_lag_it_is_the_local_run(
    algo: str, make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    shards = 2 if algo in ("ppo", "sac") else 1
    config = config_of(algo, make_config, shards=shards)
    local = ExperimentManager.setup(config).train()
    remote = ExperimentManager.setup(config.with_overrides(engine="ray")).train()
    assert direct.started == shards
    assert same(local.run_dir, remote.run_dir)


@pytest.mark.parametrize("algo", LAGGING)
def test_with_lag_runs_repeat_and_differ(
    algo: str, make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    del direct
    config = config_of(algo, make_config, engine="ray")
    runs = [
        ExperimentManager.setup(config.with_overrides(lag=lag)).train().run_dir for lag in (0, 1, 1)
    ]
    assert_same_run(runs[1], runs[2])
    assert metric_rows(runs[0]) != metric_rows(runs[1])


class StopAfter(Callback):
    """Ends a run early, as an interruption does."""

    def __init__(self, iterations: int) -> None:
        self.left = iterations

    def on_iteration(self, trainer: Any, event: IterationEnd) -> bool:
        del trainer, event
        self.left -= 1
        return self.left > 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("algo", ["ppo", "recurrent_ppo"])
def test_it_resumes_exactly(
    algo: str, lag: int, make_config: MakeConfig, direct: type[DirectWorkers], tmp_path: Path
) -> None:
    """With lag 1 the checkpoint has the weights that the rollout under way began with."""
    del direct
    config = config_of(algo, make_config, engine="ray", lag=lag, shards=2, eval_episodes=0)
    whole = ExperimentManager.setup(config).train()
    part = config.with_overrides(output_dir=tmp_path / "part")
    stopped = ExperimentManager.setup(part, callbacks=[StopAfter(2)]).train()
    assert metric_rows(stopped.run_dir) != metric_rows(whole.run_dir)
    resume_training(stopped.run_dir, total_timesteps=512)
    assert same(whole.run_dir, stopped.run_dir)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_complete_rollout_is_not_collected_again(
    lag: int, make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    """A learning phase that a signal stopped begins again with the same rollout."""
    del direct
    config = config_of("ppo", make_config, engine="ray", lag=lag, eval_episodes=0)
    whole = ExperimentManager.setup(config).train()
    trainer: Any = ExperimentManager.setup(config)
    learn, stopped = trainer._learn, list[bool]()

    def stop_once(*arguments: Any) -> int:
        if not stopped:
            stopped.append(True)
            trainer._before_learning = trainer.learner.state_dict()
            raise Paused
        return int(learn(*arguments))

    trainer._learn = stop_once
    trainer.train()
    assert stopped
    assert same(whole.run_dir, trainer.run_dir)


@pytest.mark.parametrize("lag", [0, 1])
def test_steps_of_a_lost_worker_are_taken_again(
    lag: int, make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    config = config_of("ppo", make_config, engine="ray", lag=lag, shards=2)
    whole = ExperimentManager.setup(config).train()
    calls = iter(range(1000))
    direct.broken = staticmethod(lambda: next(calls) in (0, 3, 4))
    started = direct.started
    lost = ExperimentManager.setup(config).train()
    assert direct.started - started == 2 + 3
    assert same(whole.run_dir, lost.run_dir)


def test_after_too_many_failures_the_run_stops_with_a_checkpoint(
    make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    config = config_of("ppo", make_config, engine="ray", checkpoint_interval=10**6)
    whole = ExperimentManager.setup(config).train()
    calls = iter(range(1000))
    direct.broken = staticmethod(lambda: next(calls) >= 2)
    trainer = ExperimentManager.setup(config)
    with pytest.raises(LostWorkerError, match=r"shard 0 failed 3 times in a row .*: lost"):
        trainer.train()
    direct.broken = staticmethod(lambda: False)
    assert final_state(trainer.run_dir)["training"]["counters"]["global_step"] == 256
    resume_training(trainer.run_dir)
    assert same(whole.run_dir, trainer.run_dir)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_the_engine_may_change_in_between(
    engine: str, make_config: MakeConfig, direct: type[DirectWorkers], tmp_path: Path
) -> None:
    del direct
    other = "ray" if engine == "local" else "local"
    config = config_of("ppo", make_config, engine=engine, eval_episodes=0)
    whole = ExperimentManager.setup(config).train()
    part = config.with_overrides(output_dir=tmp_path / "part")
    run = ExperimentManager.setup(part, callbacks=[StopAfter(2)]).train().run_dir
    resume_training(run, total_timesteps=512, engine=other)
    assert same(whole.run_dir, run)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lag": 1}, "'lag' must be 0 with engine: local"),
        (
            {"algo": "dqn", "engine": "ray", "lag": 1},
            "'lag' must be 0 or async for dqn; got 1; use",
        ),
        ({"engine": "ray", "lag": "async"}, "'lag' must be 0 or 1 for ppo; got async; use impala"),
        ({"algo": "sac", "lag": "async"}, "'lag' must be 0 with engine: local"),
        ({"algo": "bc", "engine": "ray"}, "'engine' must be local for bc"),
        ({"engine": "ray", "worker_cpus": 0.0}, "'worker_cpus' must be above 0"),
        ({"engine": "ray", "max_worker_failures": 0}, "'max_worker_failures' must be at least 1"),
        ({"lag": 2}, "'lag' must be one of 0, 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**settings)


def test_steps_of_other_processes_cannot_be_watched(
    make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    del direct

    class Watches(Callback):
        def on_step(self, trainer: Any, event: Any) -> None:
            pass

    config = config_of("ppo", make_config, engine="ray")
    with pytest.raises(ConfigError, match="on_step needs environments of this process"):
        ExperimentManager.setup(config, callbacks=[Watches()]).train()


# -- with Ray --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One cluster for all tests of this file: starting one takes seconds."""
    pytest.importorskip("ray")
    guard = ray_workers.connect(6)
    assert guard is not None
    yield
    ray_workers.disconnect(guard)


def logged(folder: Path) -> Callable[[], Any]:
    return lambda: LoggedEnv(str(folder))


def logs(folder: Path) -> list[list[str]]:
    """The lines of each process, the process that began first first."""
    files = sorted(folder.glob("*.log"), key=lambda file: file.stat().st_ctime)
    return [file.read_text(encoding="utf-8").splitlines() for file in files]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.usefixtures("cluster")
def test_a_killed_failed_or_hanging_worker_changes_nothing(
    lag: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The lost attempt is a prefix of its repetition: every step is learnt from once."""
    config = make_config(
        engine="ray", lag=lag, num_envs=1, eval_episodes=0, total_timesteps=640, worker_timeout=4.0
    )
    folders = {name: tmp_path / name for name in ("whole", "lost")}
    for folder in folders.values():
        folder.mkdir()
    whole = ExperimentManager.setup(config, env_fn=logged(folders["whole"])).train()
    folder = folders["lost"]

    class Disturb(Callback):
        """One disturbance after another, while the next rollout is collected."""

        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            del trainer
            if event.step in (128, 384):
                (folder / ("fail" if event.step == 128 else "hang")).touch()
            if event.step == 256:
                newest = max(folder.glob("*.log"), key=lambda file: file.stat().st_mtime)
                os.kill(int(newest.stem), signal.SIGKILL)

    trainer = ExperimentManager.setup(config, callbacks=[Disturb()], env_fn=logged(folder))
    lost = trainer.train()
    assert same(whole.run_dir, lost.run_dir)
    (expected,) = logs(folders["whole"])
    assert len(logs(folder)) == 4  # three workers were replaced
    # Each is a part of the whole run; with a lag, the last rollout is under way when a run ends.
    for lines in logs(folder):
        first = expected.index(lines[0])
        known = expected[first : first + len(lines)]
        assert lines[: len(known)] == known


@pytest.mark.usefixtures("cluster")
def test_an_error_of_the_environment_is_shown(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "fail_always").touch()
    config = make_config(engine="ray", num_envs=1, max_worker_failures=2, eval_episodes=0)
    trainer = ExperimentManager.setup(config, env_fn=logged(tmp_path))
    with pytest.raises(LostWorkerError) as caught:
        trainer.train()
    text = str(caught.value)
    assert "failed 2 times in a row" in text
    assert "the sensor is broken" in text.partition("\n")[0]
    assert "remote_env.py" in text  # the traceback of the worker


def test_an_address_without_a_cluster_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # so that it is restored afterwards
    monkeypatch.delenv("RAY_AUTH_MODE")
    for has_token in (False, True):
        if has_token:
            (tmp_path / ".ray").mkdir()
            (tmp_path / ".ray" / "auth_token").write_text("secret")
        with pytest.raises(ConfigError, match=r"no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:1"):
            ExperimentManager.setup(make_config(engine="ray"))
        assert os.environ.get("RAY_AUTH_MODE") == ("token" if has_token else None)


@pytest.mark.usefixtures("cluster")
def test_an_env_fn_that_cannot_be_sent_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    lock = threading.Lock()
    env_fn = logged(tmp_path)
    with pytest.raises(ConfigError, match=r"env_fn cannot be sent to the workers: .*lock"):
        ExperimentManager.setup(
            make_config(engine="ray", env_kwargs={}), env_fn=lambda: (lock, env_fn())[1]
        )


def processes_of(session: int) -> list[str]:
    """The commands of the processes of a session that are still there."""
    found = subprocess.run(
        ["ps", "-s", str(session), "-o", "stat=,args="], capture_output=True, text=True, check=False
    )
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_a_cluster_of_its_own_ends_with_the_run(
    how: signal.Signals, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all processes; after it the run resumes exactly."""
    pytest.importorskip("ray")
    config = make_config(
        engine="ray", lag=1, shards=2, eval_episodes=0, checkpoint_interval=256,
        total_timesteps=200_000,
    )  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    command = [sys.executable, "-m", "rl_training.cli", "train", "--config", str(file)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    drained = threading.Thread(target=lambda: process.stderr and process.stderr.read())
    drained.start()
    try:
        end = time.monotonic() + 90
        while not [*config.output_dir.glob("*/checkpoints/step_*.pt")]:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        code = process.wait(timeout=30)
        assert code == (0 if how == signal.SIGINT else -how)
        end = time.monotonic() + 30
        while (left := processes_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.2)
        assert left == []
    finally:
        process.kill()
        drained.join(timeout=30)
    (run,) = config.output_dir.iterdir()
    step = final_state(run)["training"]["counters"]["global_step"]
    total = step + 256
    whole = make_config(
        engine="ray", lag=1, shards=2, eval_episodes=0, total_timesteps=total,
        output_dir=tmp_path / "whole",
    )  # fmt: skip
    expected = ExperimentManager.setup(whole).train()
    resume_training(run, total_timesteps=total)
    found, wanted = state_of(run), state_of(expected.run_dir)
    assert differences(found["algorithm"]["model"], wanted["algorithm"]["model"]) == []
