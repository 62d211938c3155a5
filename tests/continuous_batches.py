"""Batches and replays of continuous actions, for the updates of SAC and TD3."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, VectorStep

OBS = ObsSpec({"": ArraySpec((3,), "float32")})
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, 0.0), high=(1.0, 5.0))
BATCH = 8


def make_batch(noise_shape: tuple[int, ...] | None, seed: int = 0) -> dict[str, Any]:
    """Random transitions, the last of which ended."""
    assert noise_shape is not None
    generator = torch.Generator().manual_seed(seed)
    normal = {
        name: torch.randn((BATCH, *shape), generator=generator)
        for name, shape in {"obs": (3,), "next_obs": (3,), "rewards": ()}.items()
    }
    discounts = torch.full((BATCH,), 0.9)
    discounts[-1] = 0.0
    return {
        **normal,
        "actions": 2 * torch.rand((BATCH, 2), generator=generator) - 1,
        "discounts": discounts,
        "noise": torch.randn(noise_shape, generator=generator),
    }


def replay(rows: int = 40) -> ReplayBuffer:
    """Random transitions of two environments."""
    buffer = ReplayBuffer(128, 2, OBS, BOX, gamma=0.9)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2, 3)).astype(np.float32)
    none = np.zeros(2, bool)
    for t in range(rows):
        following = rng.normal(size=(2, 3)).astype(np.float32)
        ended = np.array([t % 7 == 6, t % 5 == 4])
        step = VectorStep(following, following, obs[:, 0], ended, none, ~none, ())
        buffer.add(obs, rng.uniform(-1, 1, (2, 2)), {}, step)
        obs = following
    return buffer
