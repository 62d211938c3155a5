"""A replay's memory: the limits of machines, containers and processes, and taking it at once."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime import memory
from rl_training.runtime.memory import Limit, available_memory, cgroup_limits, make_claimed
from rl_training.types import ActionSpec, ArraySpec, ObsSpec

MB, GB = 2**20, 2**30
UNLIMITED_V1 = 9223372036854771712
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapFree: 1048576 kB\n"
needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="no /proc")


def fake(root: Path, files: dict[str, object]) -> Path:
    """Files of a system, by their paths."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="utf-8")
    return root


CGROUPS: dict[str, tuple[dict[str, object], int | None]] = {
    "none": ({}, None),
    "v2, unlimited": (
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "max"},
        None,
    ),
    "v2, its own": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": 4 * GB,
            "sys/fs/cgroup/a/b/memory.current": GB,
            "sys/fs/cgroup/a/memory.max": "max",
        },
        3 * GB,
    ),
    "v2, of an ancestor that others use too": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": 4 * GB,
            "sys/fs/cgroup/a/b/memory.current": GB,
            "sys/fs/cgroup/a/memory.max": 5 * GB,
            "sys/fs/cgroup/a/memory.current": 3 * GB,
        },
        2 * GB,
    ),
    "v2, where file pages can be dropped": (
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 4 * GB,
            "sys/fs/cgroup/memory.current": 3 * GB,
            "sys/fs/cgroup/memory.stat": f"anon {GB}\ninactive_file {GB}\nactive_file {MB}",
        },
        2 * GB + MB,
    ),
    "v2, from outside its namespace": (
        {"proc/self/cgroup": "0::/../x", "sys/fs/cgroup/memory.max": GB},
        GB,
    ),
    "v2, exceeded": (
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GB,
            "sys/fs/cgroup/memory.current": 2 * GB,
        },
        0,
    ),
    "v1": (
        {
            "proc/self/cgroup": "3:cpu:/\n2:memory,hugetlb:/a\n0::/",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 4 * GB,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 2 * GB,
            "sys/fs/cgroup/memory/a/memory.stat": f"cache {GB}\ntotal_inactive_file {GB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        },
        3 * GB,
    ),
    "v1, of a container that sees its own as the root": (
        {
            "proc/self/cgroup": "2:memory:/docker/0123",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GB,
        },
        GB,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CGROUPS.values(), ids=CGROUPS)
def test_the_tightest_cgroup_limits(
    files: dict[str, object], expected: int | None, tmp_path: Path
) -> None:
    found = min(cgroup_limits(fake(tmp_path, files)), default=None)
    assert (found.available if found else None) == expected
    limit = available_memory(fake(tmp_path, {"proc/meminfo": MEMINFO}))
    assert limit is not None
    if expected is None:
        assert limit == Limit(33 * GB, "memory of this machine")
    else:
        assert limit.available == expected
        is_first = any("limit_in_bytes" in name for name in files)
        assert f"cgroup {'memory.limit_in_bytes' if is_first else 'memory.max'}" in limit.name
        assert str(tmp_path) in limit.name


def test_without_proc_the_machine_is_as_large_as_it_is(tmp_path: Path) -> None:
    limit = available_memory(tmp_path)
    assert limit is not None
    assert limit.available > 256 * MB


def test_a_replay_beyond_a_limit_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: Limit(GB, "cgroup memory.max 2 GiB"))
    memory.check_host_memory(GB, 1, quiet=True)
    with pytest.raises(ConfigError, match=r"1\.00 GiB .*cgroup memory\.max 2 GiB.*buffer_size"):
        memory.check_host_memory(GB + 1, 1, quiet=True)


CHILD = """
import resource
import numpy as np
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.memory import make_claimed

config = TrainConfig(algo="dqn", output_dir={output!r}, progress=False)
config = config.with_overrides(buffer_size=5 * 10**6, eval_episodes=0, total_timesteps=10**5)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
    kind, used = getattr(resource, name), int(status[field].split()[0]) * 1024
    _, hard = resource.getrlimit(kind)
    for room in (120, 450):
        resource.setrlimit(kind, (used + room * 2**20, hard))
        try:
            trainer = ExperimentManager.setup(config)
            print(name, "made", len(trainer.replay))
            trainer.close()
            del trainer
        except ConfigError as error:
            print(name, error)
        try:
            make_claimed(lambda: np.zeros(500 * 2**20, np.uint8), 1.0)
        except ConfigError as error:
            print(name, error)
    resource.setrlimit(kind, (hard, hard))
"""


@needs_proc
def test_a_process_with_too_little_room_refuses_at_the_start(tmp_path: Path) -> None:
    """In a process of its own, under real limits of its address space and of its data."""
    code = CHILD.format(output=str(tmp_path / "runs"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name, printed in (("RLIMIT_AS", lines[:4]), ("RLIMIT_DATA", lines[4:])):
        small, refused, made, again = printed
        assert "33 bytes = 157.4 MiB" in small
        assert made == f"{name} made 0"
        for line in (small, refused, again):
            assert line.startswith(name)
            assert f"limit: {name}" in line
            assert "lower buffer_size" in line
    assert len(list((tmp_path / "runs").iterdir())) == 2  # none of a refused run


MEASURED = """
import mmap, sys
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.runtime.memory import make_claimed
from rl_training.types import ActionSpec, ArraySpec, ObsSpec

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

obs = ObsSpec({"": ArraySpec((2048,), "float32")})
action = ActionSpec("discrete", (), "int64", nvec=(5,), start=(0,))
before = resident()
replay = make_claimed(lambda: ReplayBuffer(32_768, 1, obs, action, frame_stack=2), %s)
print((resident() - before) / replay.nbytes)
"""


@needs_proc
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_memory_is_taken_at_once(share: float) -> None:
    """In a process of its own: this one may give the replay memory that other tests freed."""
    code = MEASURED % share
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - share) < 0.1


def test_taking_memory_keeps_what_it_holds() -> None:
    obs = ObsSpec({"": ArraySpec((4,), "float32")})
    action = ActionSpec("discrete", (), "int64", nvec=(5,), start=(0,))
    make = partial(ReplayBuffer, 4096, 1, obs, action)
    replay, fresh = make_claimed(make, 1.0), make()
    for name, array in fresh.chunk_state(0).items():
        held: Any = replay.chunk_state(0)[name]
        np.testing.assert_equal(held, array)


@pytest.mark.parametrize("vectorization", ["sync", "device"])
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_memory_is_freed_with_the_last_reference_to_a_trainer(
    algo: str, vectorization: str, make_config: MakeConfig
) -> None:
    """At once: runs one after another must not wait for the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        trainer: Any = ExperimentManager.setup(make_config(algo=algo, vectorization=vectorization))
        trainer.train()
        stored = weakref.ref(trainer.replay if algo == "dqn" else trainer.buffer)
        del trainer
        assert stored() is None
    finally:
        gc.enable()


TAKES = """
import mmap
from pathlib import Path
import gymnasium as gym
import numpy as np
from rl_training.config import TrainConfig
from rl_training.runtime.setup import ExperimentManager

class Wide(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (256,), np.float32)
    action_space = gym.spaces.Discrete(2)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

for total in (1000, 60_000):
    config = TrainConfig(algo="dqn", num_envs=1, total_timesteps=total, eval_episodes=0,
        progress=False, tensorboard=False, output_dir={output!r},
        algo_kwargs=dict(buffer_size=60_000))
    before = resident()
    trainer = ExperimentManager.setup(config, env_fn=Wide)
    print((resident() - before) / trainer.replay.nbytes)
    trainer.close()
"""


@needs_proc
def test_a_run_takes_the_memory_that_it_will_fill(tmp_path: Path) -> None:
    """In a process of its own: this one may have freed memory, which is used first."""
    code = TAKES.replace("{output!r}", repr(str(tmp_path / "runs")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    short, whole = map(float, done.stdout.split())
    assert short == pytest.approx(0, abs=0.3)
    assert whole == pytest.approx(1, abs=0.3)
