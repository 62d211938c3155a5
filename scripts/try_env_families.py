"""Train, evaluate and resume on environments of other packages; print a table of what happened.

    python scripts/try_env_families.py [--steps 2048] [--only NAMES...] [--output-dir DIR]

Nothing is installed: an environment whose package cannot be imported is listed as not installed.
Each of the others is trained twice with the same seed: once without a break, and once up to half of
the steps and then resumed in a new process. The weights and optimizer states of the two must be
equal bit for bit. Exits with 1 if training fails anywhere or a resume is not exact. The packages do
not all work with the same version of MuJoCo (see docs/environments.md), so a table of all of them
needs several virtual environments.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_training.checkpointing import load_checkpoint, state_digest
from rl_training.config import config_from_mapping
from rl_training.runtime import evaluate_checkpoint
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.setup import ExperimentManager

SHARED: dict[str, Any] = {
    "seed": 1,
    "num_envs": 4,
    "device": "cpu",
    "torch_threads": 1,
    "eval_episodes": 0,
    "tensorboard": False,
    "progress": False,
}
_FLAT = [
    {
        "path": "gymnasium.wrappers:FilterObservation",
        "kwargs": {"filter_keys": ["direction", "image"]},
    },
    "gymnasium.wrappers:FlattenObservation",
]


@dataclasses.dataclass(frozen=True)
class Family:
    """One environment of a package, and the settings that train on it."""

    env_id: str
    algo: str
    packages: tuple[str, ...]
    """Distributions whose versions are printed."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `TrainConfig` besides `SHARED`."""

    @property
    def module(self) -> str:
        """Return the module that registers the environment."""
        return self.env_id.partition(":")[0]


_ROBOTICS = ("gymnasium-robotics", "mujoco")
_DM_CONTROL = ("shimmy", "dm-control", "mujoco")
FAMILIES = {
    "minigrid": Family("minigrid:MiniGrid-Empty-5x5-v0", "ppo", ("minigrid",), {"wrappers": _FLAT}),
    "highway": Family("highway_env:highway-fast-v0", "ppo", ("highway-env",)),
    "parking": Family("highway_env:parking-v0", "sac", ("highway-env",)),
    "fetch": Family("gymnasium_robotics:FetchReachDense-v4", "sac", _ROBOTICS),
    "maze": Family("gymnasium_robotics:PointMaze_UMazeDense-v3", "ppo", _ROBOTICS),
    "cartpole": Family("shimmy:dm_control/cartpole-balance-v0", "ppo", _DM_CONTROL),
    "walker": Family("shimmy:dm_control/walker-walk-v0", "sac", _DM_CONTROL),
}


@dataclasses.dataclass(frozen=True)
class Tried:
    """What happened on one environment."""

    steps_per_second: float
    mean_return: float
    resume: str
    """`exact`, or how the resumed run differs."""


class StopAt(Callback):
    """Stops a run at the end of the iteration that reaches a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_iteration(self, trainer: Any, event: Any) -> None:
        """Request the stop."""
        if event.step >= self._step:
            trainer.request_stop("halfway")


def main() -> int:
    """Try the families that are installed; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2048, help="steps of each run")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="try only these")
    parser.add_argument("--output-dir", type=Path, help="keep the runs here (default: delete them)")
    options = parser.parse_args()
    print(
        f"{'name':<10}{'algo':<6}{'steps/s':>8}{'return':>9}  {'resume':<12}environment, versions"
    )
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or FAMILIES:
            family = FAMILIES[name]
            if importlib.util.find_spec(family.module) is None:
                print(f"{name:<10}{family.algo:<6}{family.module} is not installed")
                continue
            try:
                tried = try_family(family, options.steps, options.output_dir or Path(scratch))
            except Exception as error:  # noqa: BLE001 - the other families are still tried
                print(f"{name:<10}{family.algo:<6}failed: {type(error).__name__}: {error}")
                failed = True
                continue
            print(row(name, family, tried), flush=True)
            failed = failed or tried.resume != "exact"
    return int(failed)


def try_family(family: Family, steps: int, folder: Path) -> Tried:
    """Train without a break and in two parts, compare, and evaluate five episodes."""
    named = {"env_id": family.env_id, "algo": family.algo, "output_dir": str(folder)}
    config = config_from_mapping({**SHARED, **family.settings, **named, "total_timesteps": steps})
    started = time.perf_counter()
    whole = ExperimentManager.setup(config).train()
    seconds = time.perf_counter() - started
    half = ExperimentManager.setup(config, callbacks=[StopAt(steps // 2)]).train()
    subprocess.run(  # noqa: S603 - this package's own command
        [sys.executable, "-m", "rl_training.cli", "resume", str(half.run_dir)],
        check=True,
        capture_output=True,
    )
    resume = compared(whole.run_dir, half.run_dir)
    mean_return = evaluate_checkpoint(whole.run_dir, 5).mean_return
    return Tried(steps / seconds, mean_return, resume)


def compared(whole: Path, resumed: Path) -> str:
    """Return `exact` if both runs ended with the same bits and the resume was recorded as exact."""
    ends = [load_checkpoint(run / "checkpoints" / "last.pt") for run in (whole, resumed)]
    digests = {state_digest(end["algorithm"]) for end in ends}
    if len(digests) != 1:
        return "differs"
    metadata = json.loads((resumed / "metadata.json").read_text(encoding="utf-8"))
    recorded: str = metadata["resumes"][-1]["resume"]
    return recorded


def row(name: str, family: Family, tried: Tried) -> str:
    """Return a line of the table."""
    versions = ", ".join(f"{package} {version(package)}" for package in family.packages)
    return (
        f"{name:<10}{family.algo:<6}{tried.steps_per_second:>8.0f}{tried.mean_return:>9.2f}"
        f"  {tried.resume:<12}{family.env_id}, {versions}"
    )


if __name__ == "__main__":
    sys.exit(main())
