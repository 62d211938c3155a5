"""Trains named cases one after the other, in one process or on every rank of torchrun.

    python tests/sharded_runs.py FOLDER SHARDS CASE...
    python -m torch.distributed.run --nproc-per-node=2 tests/sharded_runs.py FOLDER SHARDS CASE...

The run of a case is FOLDER/CASE; where it exists, it is resumed. A case is ``NAME``, or
``NAME:KIND:RANK:ENV:AT`` with a fault of `sharded_child_env`, or ``NAME:stop:AT`` with a callback
that requests a stop at a step. Every rank writes how it ended to FOLDER/CASE.rankN.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import probe_envs  # noqa: F401 - registers environments
from conftest import MEMORY_KNOBS, QUICK_KNOBS, WITH_MEMORY, any_env
from rl_training.config import TrainConfig, WrapperConfig
from rl_training.launched import rank
from rl_training.registry import ALGORITHMS, TORCHRUN
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer
from sharded_child_env import NUM_ENVS, parse_fault, plan, start

TOTAL = 256

_INTERRUPTIBLE: dict[str, Any] = {
    "wrappers": (WrapperConfig("sharded_child_env:Interruptible"),),
    "log_info": ("height",),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "ppo_normalized": {
        "algo": "ppo",
        "normalize_obs": True,
        "normalize_reward": True,
        "env_kwargs": {"max_episode_steps": 9},
        "learning_rate": 3e-3,
        "target_kl": 0.004,
        "max_grad_norm": 0.05,
    },
    "ppo_native": {"algo": "ppo", "vectorization": "native", "normalize_obs": True},
    "ppo_masked": {
        "algo": "ppo",
        "env_id": "probe/MaskedActions-v0",
        "normalize_obs": True,
        "eval_deterministic": False,
    },
    "ppo_interruptible": {"algo": "ppo", **_INTERRUPTIBLE},
    "recurrent_ppo_native": {
        "algo": "recurrent_ppo",
        "vectorization": "native",
        "normalize_reward": True,
    },
    "ppg_truncating": {"algo": "ppg", "env_kwargs": {"max_episode_steps": 9}},
    "dqn_prioritized": {"algo": "dqn", "prioritized": True, "n_step": 3, "normalize_obs": True},
    "dqn_native": {"algo": "dqn", "vectorization": "native"},
    "dqn_async": {"algo": "dqn", "vectorization": "async"},
    "dqn_interruptible": {"algo": "dqn", "prioritized": True, **_INTERRUPTIBLE},
    "sac_normalized": {"algo": "sac", "normalize_obs": True, "eval_deterministic": False},
    **{name.replace("+", "_"): {"algo": name, "normalize_obs": True} for name in WITH_MEMORY},
}
"""Cases besides the algorithms themselves."""


def make_case(name: str, shards: int, folder: Path) -> TrainConfig[Any]:
    """Return the config of a case: every algorithm that can be sharded, and the variants."""
    chosen = dict(VARIANTS.get(name, {"algo": name}))
    algo, _, memory = str(chosen.pop("algo")).partition("+")
    base: TrainConfig[Any] = TrainConfig(
        algo=algo,
        env_id=any_env(algo),
        total_timesteps=TOTAL,
        num_envs=NUM_ENVS,
        shards=shards,
        seed=7,
        output_dir=folder,
        eval_episodes=3,
        eval_interval=128,
        progress=False,
        tensorboard=False,
    )
    knobs = dict(QUICK_KNOBS[algo])
    if "num_steps" in knobs:
        knobs["num_steps"] = 16
    if "buffer_size" in knobs:
        knobs["buffer_size"] = 320
    if algo == "recurrent_ppo":
        knobs |= {"sequence_length": 8, "num_minibatches": 2}
    if memory:
        knobs |= {"memory": memory, **MEMORY_KNOBS[algo]}
        if algo in ("ppo", "ppg"):
            knobs |= {"sequence_length": 8, "num_minibatches": 2}
        if algo == "ppg":
            knobs["num_aux_minibatches"] = 2
    return base.with_overrides(**{**knobs, **chosen})


def case_names() -> list[str]:
    """Return the cases: every entry that declares torchrun, and the variants."""
    declared = [name for name, entry in ALGORITHMS.items() if TORCHRUN in entry.engines]
    return [*declared, *VARIANTS]


class Recorder(Callback):
    """Keeps the steps at which it was called, and requests a stop at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[int] = []
        self._stop_at = stop_at

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        self.steps.append(event.step)
        if self._stop_at is not None and event.step >= self._stop_at:
            trainer.request_stop("far enough")


def run_case(name: str, shards: int, folder: Path, fault: str = "") -> None:
    """Train a case, or resume it where its folder exists; write how it ended."""
    kind, _, at = fault.partition(":")
    stop_at = int(at) if kind == "stop" else None
    plan(None if kind == "stop" else parse_fault(fault))
    run, recorder = folder / name, Recorder(stop_at)
    if (run / "checkpoints").is_dir():
        trainer = ExperimentManager.resume(run, callbacks=[recorder])
    else:
        config = make_case(name, shards, folder)
        trainer = ExperimentManager.setup(config, run_dir=run, callbacks=[recorder])
    start()
    result = trainer.train()
    about = {
        "global_step": trainer.global_step,
        "current_step": trainer.current_step(),
        "stop_reason": result.stop_reason,
        "interrupted": result.interrupted,
        "metrics": result.metrics,
        "callbacks": recorder.steps,
    }
    (folder / f"{name}.rank{rank()}.json").write_text(json.dumps(about))


def main(folder: str, shards: str, *cases: str) -> None:
    """Train or resume each case."""
    for case in cases:
        name, _, fault = case.partition(":")
        run_case(name, int(shards), Path(folder), fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
