"""Trains PPO, DQN and SAC on a GPU, in one process or on every rank of torchrun.

    python tests/cuda_ranks.py FOLDER SHARDS ACCELERATION

Writes the weights of each to FOLDER/ALGO.pt, and how tensors were sent to FOLDER/sent.txt.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from conftest import QUICK_KNOBS, any_env
from rl_training.config import TrainConfig
from rl_training.launched import rank
from rl_training.runtime.setup import ExperimentManager


def main(folder: str, shards: str, acceleration: str) -> None:
    """Train each algorithm for a few updates."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    sent = "nothing is sent"
    for algo in ("ppo", "dqn", "sac"):
        config: TrainConfig[Any] = TrainConfig(
            algo=algo,
            env_id=any_env(algo),
            total_timesteps=256,
            num_envs=4,
            shards=int(shards),
            seed=7,
            device="cuda",
            acceleration=acceleration,  # type: ignore[arg-type]
            normalize_obs=True,
            eval_episodes=0,
            progress=False,
            tensorboard=False,
        ).with_overrides(**{**QUICK_KNOBS[algo], "learning_starts": 64} if algo != "ppo" else {})
        trainer = ExperimentManager.setup(config, run_dir=None)
        trainer.train()
        group: Any = trainer.communicator
        if hasattr(group, "use_device"):
            sent = "nccl" if group._on_device is not None else "gloo"
        if rank() == 0:
            state = {k: v.cpu() for k, v in trainer.learner.module.state_dict().items()}
            torch.save(state, Path(folder) / f"{algo}.pt")
        trainer.close()
    if rank() == 0:
        (Path(folder) / "sent.txt").write_text(sent)


if __name__ == "__main__":
    main(*sys.argv[1:])
