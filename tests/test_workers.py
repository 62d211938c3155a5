"""Worker processes that raise, hang and die for real, and what is left of a run then."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import conformance_envs
import rl_training
from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint, state_digest
from rl_training.config import TrainConfig
from rl_training.envs import VectorAdapter, make_vector_env
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import WorkerError
from rl_training.runtime.callbacks import Callback, CheckpointSaved
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import Trainer
from rl_training.runtime.workflows import load_policy, resume_training

BROKEN = "probe_envs:probe/Broken-v0"
WORKER = "conformance_envs:conform/Worker-v0"
PROMPT = 10.0
"""Seconds that are few for a person and many for a busy machine."""
IDLE = np.zeros(2, np.int64)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(pids: list[int]) -> None:
    """No process of these is left (one that just ended may take a moment to be reaped)."""
    deadline = time.monotonic() + PROMPT
    while any(_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if _exists(pid)] == []


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """However it ends, it ends soon."""
    started = time.monotonic()
    try:
        yield
    finally:
        assert time.monotonic() - started < seconds


@contextlib.contextmanager
def workers(config: TrainConfig[Any]) -> Iterator[WorkerVectorEnv]:
    """Running workers; whatever happens, they are gone soon after."""
    env = make_vector_env(config)
    assert isinstance(env, WorkerVectorEnv)
    pids = worker_pids(env)
    try:
        yield env
    finally:
        with within(PROMPT):
            env.close()
        assert_gone(pids)


def worker_pids(env: WorkerVectorEnv) -> list[int]:
    pids = [process.pid for process in env.processes]
    assert all(pid is not None and _exists(pid) for pid in pids)
    return [pid for pid in pids if pid is not None]


@pytest.fixture
def async_config(make_config: MakeConfig) -> MakeConfig:
    def make(**overrides: Any) -> TrainConfig[Any]:
        return make_config(**{"vectorization": "async", "eval_episodes": 0, **overrides})

    return make


def step_many(env: WorkerVectorEnv, count: int = 1000) -> None:
    for _ in range(count):
        env.step(IDLE)


# -- failures of a vector --------------------------------------------------------------------------


def test_a_worker_that_raises_shows_its_traceback(async_config: MakeConfig) -> None:
    config = async_config(env_id=BROKEN, env_kwargs={"how": "raise", "at": 10})
    with workers(config) as env:
        env.reset()
        step_many(env, 9)
        with pytest.raises(WorkerError) as caught, within(PROMPT):
            env.step(IDLE)
    message = str(caught.value)
    assert re.match(
        r"environment [01] \(\S+\) failed in step 5 of its episode 1 .*\nTraceback", message
    )
    assert "RuntimeError: the pole fell on my foot" in message
    assert "probe_envs.py" in message


def test_a_worker_that_hangs_is_named_and_stopped_after_the_timeout(
    async_config: MakeConfig,
) -> None:
    config = async_config(
        env_id=BROKEN, env_kwargs={"how": "hang", "at": 10**9}, worker_timeout=1.0, num_envs=3
    )
    with workers(config) as env:
        env.reset()
        env.set_attr("at", [10**9, 5, 10**9])
        actions = np.zeros(3, np.int64)
        for _ in range(4):
            env.step(actions)
        with pytest.raises(WorkerError) as caught, within(PROMPT):
            env.step(actions)
    assert "worker [1] did not answer within 1 s (worker_timeout)" in str(caught.value)


def test_a_worker_killed_between_two_steps_is_named_with_its_signal(
    async_config: MakeConfig,
) -> None:
    with workers(async_config()) as env:
        env.reset()
        step_many(env, 3)
        os.kill(worker_pids(env)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="worker 1 was killed by signal 9"), within(PROMPT):
            step_many(env)


def test_a_worker_killed_in_the_middle_of_a_step_is_named_with_its_signal(
    async_config: MakeConfig,
) -> None:
    config = async_config(env_id=BROKEN, env_kwargs={"how": "hang", "at": 10**9})
    with workers(config) as env:
        env.reset()
        env.set_attr("at", [10**9, 3])
        step_many(env, 2)
        killer = threading.Timer(0.5, os.kill, (worker_pids(env)[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerError, match="worker 1 was killed by signal 9"), within(PROMPT):
            env.step(IDLE)
        killer.join()


def test_a_dead_worker_is_noticed_when_its_state_is_asked_for(async_config: MakeConfig) -> None:
    config = async_config()
    with workers(config) as env:
        adapter = VectorAdapter(env, config.seed)
        adapter.reset()
        os.kill(worker_pids(env)[1], signal.SIGKILL)
        assert_gone([pid for pid in (env.processes[1].pid,) if pid is not None])
        with pytest.raises(WorkerError, match="worker 1 was killed by signal 9"), within(PROMPT):
            adapter.state_dict()


def test_an_environment_that_cannot_be_made_in_a_worker_says_why(async_config: MakeConfig) -> None:
    config = async_config(env_id=WORKER, env_kwargs={"trouble": "init"})
    with pytest.raises(WorkerError, match="no licence left for the simulator"), within(PROMPT):
        make_vector_env(config)


def test_an_environment_that_takes_forever_to_make_is_given_up(
    async_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.envs.workers._START_TIMEOUT", 1.0)
    config = async_config(env_id=WORKER, env_kwargs={"trouble": "slow init"})
    with pytest.raises(WorkerError, match=r"did not answer within 1 s"), within(PROMPT):
        make_vector_env(config).close()


def test_a_worker_that_hangs_in_a_reset_is_stopped_after_the_timeout(
    async_config: MakeConfig,
) -> None:
    config = async_config(env_id=WORKER, env_kwargs={"trouble": "slow reset"}, worker_timeout=1.0)
    message = "did not answer within 1 s"
    with workers(config) as env, pytest.raises(WorkerError, match=message), within(PROMPT):
        env.reset()


def test_closing_does_not_wait_for_an_environment_that_never_closes(
    async_config: MakeConfig,
) -> None:
    env = make_vector_env(async_config(env_id=WORKER, env_kwargs={"trouble": "close"}))
    assert isinstance(env, WorkerVectorEnv)
    pids = worker_pids(env)
    closing = threading.Thread(target=env.close, daemon=True)
    closing.start()
    closing.join(2 * PROMPT)
    hung = closing.is_alive() or any(_exists(pid) for pid in pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not hung


def test_closing_twice_is_harmless(async_config: MakeConfig) -> None:
    with workers(async_config()) as env:
        env.reset()
        env.close()
        assert_gone([process.pid for process in env.processes if process.pid is not None])


# -- what workers are ------------------------------------------------------------------------------


def test_workers_are_light_processes_of_their_own(async_config: MakeConfig) -> None:
    assert "torch" in sys.modules
    with workers(async_config(env_id=WORKER)) as env:
        pids = env.call("pid")
        assert list(pids) == worker_pids(env)
        assert os.getpid() not in pids
        for modules in env.call("modules"):
            assert "gymnasium" in modules
            assert not {"torch", "tensorboard", "tyro", "yaml"} & set(modules)


def test_workers_leave_ctrl_c_to_the_main_process(async_config: MakeConfig) -> None:
    with workers(async_config()) as env:
        env.reset()
        for pid in worker_pids(env):
            os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
        step_many(env, 20)
        assert all(process.is_alive() for process in env.processes)


def test_the_main_process_keeps_its_own_ctrl_c(async_config: MakeConfig) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with workers(async_config()):
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_can_be_started_from_a_thread(async_config: MakeConfig) -> None:
    outcome: list[Any] = []

    def start() -> None:
        try:
            with workers(async_config()) as env:
                env.reset()
                outcome.append(env.step(IDLE)[1].tolist())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(2 * PROMPT)
    assert outcome == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "entry_point",
    ["conformance_envs:FixedLength", conformance_envs.FixedLength],
    ids=["path", "class"],
)
def test_an_id_registered_by_the_main_process_alone_is_known_to_the_workers(
    entry_point: Any, async_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymnasium.envs.registration.registry", dict(gym.registry))
    gym.register("OnlyHere-v0", entry_point, kwargs={"length": 2})
    with workers(async_config(env_id="OnlyHere-v0")) as env:
        env.reset()
        step_many(env, 1)
        assert env.step(IDLE)[2].tolist() == [True, True]


# -- failures of a run -----------------------------------------------------------------------------


class Watch(Callback):
    """Notes the workers, and does something to them once the first checkpoint is written."""

    def __init__(self, act: Callable[[list[int]], None] | None = None) -> None:
        self.act = act
        self.pids: list[int] = []
        self.run_dir = Path()

    def on_start(self, trainer: Trainer) -> None:
        source: Any = trainer.source
        vector = source.env.env
        assert isinstance(vector, WorkerVectorEnv)
        self.pids = worker_pids(vector)
        self.run_dir = trainer.run_dir

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:
        if event.step == 128 and self.act is not None:
            self.act(self.pids)


def assert_failed_run_is_intact(watch: Watch, message: str) -> None:
    """It says what happened; its last checkpoint is whole and of the iteration before."""
    assert_gone(watch.pids)
    summary = json.loads((watch.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert message in summary["reason"]
    assert "WorkerError" in summary["reason"]
    assert summary["global_step"] == 128
    state = load_checkpoint(watch.run_dir / "checkpoints" / "last.pt")
    assert state["training"]["counters"]["global_step"] == 128
    policy = load_policy(watch.run_dir)
    (leaf,) = policy.obs_spec.leaves.values()
    assert policy.act(np.zeros(leaf.shape, np.float32)) in (0, 1)
    rows = (watch.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 128


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", "the pole fell on my foot"), ("hang", "did not answer within 1 s")],
)
def test_a_run_whose_worker_fails_stops_with_the_reason_and_an_intact_checkpoint(
    how: str, message: str, async_config: MakeConfig
) -> None:
    config = async_config(
        env_id=BROKEN,
        env_kwargs={"how": how, "at": 100},
        worker_timeout=1.0,
        checkpoint_interval=128,
    )
    watch = Watch()
    with pytest.raises(WorkerError, match=message), within(2 * PROMPT):
        train_ppo(config, callbacks=[watch])
    assert_failed_run_is_intact(watch, message)


def test_a_run_whose_worker_was_killed_stops_and_can_be_resumed_to_the_same_end(
    async_config: MakeConfig,
) -> None:
    config = async_config(env_id="CartPole-v1", checkpoint_interval=128)
    watch = Watch(lambda pids: os.kill(pids[0], signal.SIGKILL))
    with pytest.raises(WorkerError, match="killed by signal 9"), within(2 * PROMPT):
        train_ppo(config, callbacks=[watch])
    assert_failed_run_is_intact(watch, "killed by signal 9")
    resumed = resume_training(watch.run_dir)
    whole = train_ppo(config)
    assert _essence(resumed.run_dir) == _essence(whole.run_dir)


def test_a_finished_run_leaves_no_workers_of_training_or_evaluation(
    async_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WorkerVectorEnv] = []  # held, so that collecting garbage cannot close them
    make = WorkerVectorEnv.__init__

    def noting(self: WorkerVectorEnv, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(WorkerVectorEnv, "__init__", noting)
    train_ppo(async_config(eval_episodes=2))
    pids = [process.pid for env in made for process in env.processes]
    assert len(pids) >= 4
    assert_gone([pid for pid in pids if pid is not None])


# -- whole programs --------------------------------------------------------------------------------


def start_script(folder: Path, text: str, **variables: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    sources = [Path(rl_training.__file__).parents[1], Path(__file__).parent]
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_without_a_main_guard_trains_with_workers_on_its_own_environment(
    tmp_path: Path,
) -> None:
    script = start_script(
        tmp_path,
        """
        from pathlib import Path

        with Path("ran.txt").open("a") as file:
            file.write("once ")

        import gymnasium as gym
        import numpy as np
        import torch
        from rl_training import PPO, TrainConfig

        LENGTH = 5

        class Mine(gym.Env):
            observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
            action_space = gym.spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.t = 0
                return np.zeros(1, np.float32), {}

            def step(self, action):
                self.t += 1
                return np.zeros(1, np.float32), float(action), self.t == LENGTH, False, {}

        config = TrainConfig(
            total_timesteps=128, num_envs=2, vectorization="async", output_dir=Path("runs"),
            eval_episodes=2, progress=False, tensorboard=False, algo_kwargs={"num_steps": 32},
        )
        by_id = PPO(config).learn()
        by_class = PPO(config, env_fn=Mine).learn()
        print(by_id.stop_reason, by_class.metrics["eval/length_mean"], sep="; ")
        """,
    )
    out, err = script.communicate(timeout=60)
    assert script.returncode == 0, err
    assert out.strip() == "total_timesteps reached; 5.0"
    assert (tmp_path / "ran.txt").read_text() == "once "


@pytest.fixture
def own_temporary_folder() -> Iterator[str]:
    """For a process that cannot clean up; short, as it is to hold a socket."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder


def test_workers_end_when_the_main_process_is_killed(
    tmp_path: Path, own_temporary_folder: str
) -> None:
    script = start_script(
        tmp_path,
        """
        import json, time
        import numpy as np
        from rl_training import TrainConfig, make_vector_env

        env = make_vector_env(TrainConfig(num_envs=3, vectorization="async"))
        env.reset()
        env.step(np.zeros(3, np.int64))
        pids = [process.pid for process in env.processes]
        print(json.dumps(pids), flush=True)
        time.sleep(600)
        """,
        TMPDIR=own_temporary_folder,
    )
    try:
        assert script.stdout is not None
        pids = json.loads(script.stdout.readline())
        assert len(pids) == 3
        assert all(_exists(pid) for pid in pids)
    finally:
        script.kill()
        script.communicate(timeout=PROMPT)
    assert_gone(pids)


# -- workers change nothing ------------------------------------------------------------------------


def _essence(run_dir: Path) -> tuple[str, list[dict[str, float]]]:
    """All that a run is, but for the clock: its final state and its metrics."""
    state = load_checkpoint(run_dir / "checkpoints" / "last.pt")
    kept = {key: state["training"][key] for key in ("source", "metrics")}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    ]
    return state_digest([state["algorithm"], kept]), metrics


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "probe_envs:probe/MaskedActions-v0"]
)
def test_sync_and_async_runs_are_bit_identical(env_id: str, make_config: MakeConfig) -> None:
    runs = [
        train_ppo(make_config(env_id=env_id, vectorization=kind, eval_interval=256))
        for kind in ("sync", "async")
    ]
    (sync_state, sync_metrics), (async_state, async_metrics) = (_essence(r.run_dir) for r in runs)
    assert len(sync_metrics) > 4
    assert sync_metrics == async_metrics
    assert sync_state == async_state


class GlobalNoise(gym.Env[Any, Any]):
    """Random outside its seed: draws from NumPy's global generator."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.random.random(1), {}  # noqa: NPY002 - the point of it

    def step(self, action: Any) -> Any:
        return np.random.random(1), 0.0, False, False, {}  # noqa: NPY002


def test_workers_draw_different_numbers_and_the_same_ones_in_each_run(
    async_config: MakeConfig,
) -> None:
    def first_observations() -> list[float]:
        env = make_vector_env(async_config(num_envs=3), env_fn=GlobalNoise)
        try:
            return [float(x) for x in env.reset()[0].ravel()]
        finally:
            env.close()

    once = first_observations()
    assert len(set(once)) == 3
    assert first_observations() == once


def test_sigterm_to_the_whole_group_saves_and_leaves_nobody_behind(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "rl_training.cli", "train", "ppo/cartpole"),
        *("--vectorization", "async", "--num-envs", "2", "--total-timesteps", "10_000_000"),
        *("--output-dir", str(tmp_path), "--eval-episodes", "0", "--no-tensorboard"),
    ]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = list(tmp_path.glob("*/metrics.jsonl"))
        if logs and len(logs[0].read_text().splitlines()) > 3:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    state = load_checkpoint(next(tmp_path.glob("*/checkpoints/last.pt")))
    assert state["training"]["counters"]["global_step"] > 0
    deadline = time.monotonic() + 10  # the server that forked the workers ends after us
    while _group_exists(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_exists(process.pid)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_script_that_never_closes_its_workers_still_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from rl_training import TrainConfig, make_vector_env\n"
        "env = make_vector_env(TrainConfig(num_envs=2, vectorization='async'))\n"
        "env.reset()\n"
    )
    done = subprocess.run([sys.executable, str(script)], timeout=60, check=False)
    assert done.returncode == 0
