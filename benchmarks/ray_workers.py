"""Ray workers over a long time: killed at random moments, and their memory.

    python benchmarks/ray_workers.py kills [--lag 0] [--kills 10]
    python benchmarks/ray_workers.py memory [--lag 1] [--iterations 10000]

``kills`` trains twice with the same settings. In the second run a worker chosen at random is
killed by SIGKILL at random moments. Both runs must end with the same digest of learner and
environments, and after every kill a new worker must take a step within ten seconds.

``memory`` trains so many iterations and prints the memory of the driver, of the workers and of
Ray's object store on the way. Between a tenth of the iterations and the end none of them may grow
by more than a tenth.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.checkpointing import load_checkpoint, state_digest, to_storable
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.callbacks import Callback, IterationEnd

MOST_SECONDS = 10.0
"""Time after which a new worker must have taken a step."""
MOST_GROWTH = 1.1


class TrackedEnv(gym.Env[Any, Any]):
    """Random observations; the file named after its process appears with its first step."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, folder: str, seconds: float) -> None:
        self._file, self._seconds = Path(folder) / str(os.getpid()), seconds
        self._is_new = True
        self._count = 0

    def _observed(self) -> Any:
        return self.np_random.uniform(-1, 1, 8).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._count = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._is_new:
            self._file.touch()
            self._is_new = False
        if self._seconds:
            time.sleep(self._seconds)
        self._count += 1
        obs = self._observed()
        return obs, float(obs[int(action)]), False, self._count == 50, {}


def processes(folder: Path) -> list[int]:
    """Return the processes that have stepped an environment and still run."""
    found = []
    for file in folder.iterdir():
        status = Path("/proc") / file.name / "status"
        if status.exists() and "\nState:\tZ" not in status.read_text(encoding="utf-8"):
            found.append(int(file.name))
    return found


class Killer(threading.Thread):
    """Kills workers at random moments, each after the one before has been replaced."""

    def __init__(self, folder: Path, kills: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._kills = folder, kills
        self._random = random.Random(1)
        self.seconds: list[float] = []
        """From each kill to the first step of the new worker."""

    def run(self) -> None:
        while len(self.seconds) < self._kills:
            time.sleep(self._random.uniform(0.5, 3.0))
            running = processes(self._folder)
            if not running:
                continue
            known = set(self._folder.iterdir())
            killed = time.time()
            os.kill(self._random.choice(running), signal.SIGKILL)
            while not (new := set(self._folder.iterdir()) - known):
                time.sleep(0.02)
            self.seconds.append(new.pop().stat().st_mtime - killed)
            print(f"kill {len(self.seconds)}: replaced after {self.seconds[-1]:.1f} s", flush=True)


class StopAfterKills(Callback):
    """Ends the run at the first iteration after the last kill, and remembers its step."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer
        self.step = 0

    def on_iteration(self, trainer: Any, event: IterationEnd) -> bool:
        del trainer
        self.step = event.step
        return self._killer.is_alive()


def config_of(folder: Path, lag: Any, total: int, **settings: Any) -> TrainConfig[Any]:
    return TrainConfig(
        algo="appo" if lag == "async" else "ppo",
        engine="ray",
        lag=lag,
        shards=2,
        num_envs=4,
        total_timesteps=total,
        eval_episodes=0,
        output_dir=folder,
        progress=False,
        tensorboard=False,
        **settings,
    )


def digest_of(run: Path) -> str:
    state = load_checkpoint(run / "checkpoints" / "last.pt")
    kept = {"algorithm": state["algorithm"], "source": state["training"]["source"]}
    if kept["source"].get("flight"):  # the total of the run that is compared is another one
        del kept["source"]["flight"]["progress"]
    return state_digest(to_storable(kept))


def run_kills(args: argparse.Namespace) -> int:
    settings = {"algo_kwargs": {"num_steps": 64, "anneal_lr": False}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        seen = folder / "killed"
        seen.mkdir()
        killer = Killer(seen, args.kills)
        watch = StopAfterKills(killer)
        config = config_of(folder / "runs", args.lag, 10_000_000, **settings)
        env_fn = functools.partial(TrackedEnv, str(seen), 2e-3)
        trainer = ExperimentManager.setup(config, env_fn=env_fn, callbacks=[watch])
        killer.start()
        killed = trainer.train().run_dir
        whole = folder / "whole"
        whole.mkdir()
        config = config.with_overrides(total_timesteps=watch.step)
        env_fn = functools.partial(TrackedEnv, str(whole), 0.0)
        reference = ExperimentManager.setup(config, env_fn=env_fn).train().run_dir
        same = digest_of(killed) == digest_of(reference)
    slowest = max(killer.seconds)
    print(
        f"lag {args.lag}: {len(killer.seconds)} kills in {watch.step:,} steps; slowest replacement"
        f" {slowest:.1f} s (at most {MOST_SECONDS:g}); digests {'equal' if same else 'DIFFER'}"
    )
    return 0 if same and slowest <= MOST_SECONDS else 1


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no memory")


def stored_mib() -> float:
    """Return the memory in use of Ray's object store."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    reply: Any = get_memory_info_reply(state)
    return float(reply.store_stats.object_store_bytes_used) / 2**20


class Memory(Callback):
    """Measures memory ten times."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self._folder, self._every = folder, iterations // 10
        self._count = 0
        self.rows: list[dict[str, float]] = []

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        del trainer, event
        self._count += 1
        if self._count < self._every * (len(self.rows) + 1):
            return
        workers = processes(self._folder)
        row = {
            "driver": resident(os.getpid()),
            "workers": sum(resident(pid) for pid in workers) / len(workers),
            "object store": stored_mib(),
        }
        self.rows.append(row)
        text = ", ".join(f"{name} {value:,.1f} MiB" for name, value in row.items())
        print(f"iteration {self._count:,}: {text}", flush=True)


def run_memory(args: argparse.Namespace) -> int:
    settings = {
        "algo_kwargs": {
            "num_steps": 8,
            "num_minibatches": 1,
            "update_epochs": 1,
            "hidden_sizes": (256, 256),
        },
        "log_interval_steps": 10_000,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        seen = folder / "seen"
        seen.mkdir()
        config = config_of(folder / "runs", args.lag, args.iterations * 32, **settings)
        env_fn = functools.partial(TrackedEnv, str(seen), 0.0)
        memory = Memory(seen, args.iterations)
        ExperimentManager.setup(config, env_fn=env_fn, callbacks=[memory]).train()
    first, last = memory.rows[0], memory.rows[-1]
    grown = [name for name in first if last[name] > MOST_GROWTH * first[name] + 1]
    print(f"lag {args.lag}: " + (f"GREW: {', '.join(grown)}" if grown else "flat"))
    return 1 if grown else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True)
    for name, run, lag in (("kills", run_kills, "0"), ("memory", run_memory, "1")):
        command = commands.add_parser(name)
        command.add_argument("--lag", default=lag, type=lambda x: x if x == "async" else int(x))
        command.set_defaults(run=run)
        if name == "kills":
            command.add_argument("--kills", type=int, default=10)
        else:
            command.add_argument("--iterations", type=int, default=10_000)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
