"""Batches of which a fixed part comes from a dataset and the rest from a replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_training._internal.tree import tree_map
from rl_training.data.replay_buffer import ReplayBuffer


class MixedReplay:
    """Samples from a dataset and from a replay in a fixed ratio (Ball et al. 2023).

    Half of each is the symmetric sampling of RLPD (arXiv:2302.02948). ``fraction`` of every batch,
    rounded and at least one transition, comes from ``data``.
    """

    def __init__(self, replay: ReplayBuffer, data: ReplayBuffer, fraction: float) -> None:
        self.replay, self.data, self.fraction = replay, data, fraction

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Sample transitions with replacement; those of the dataset come first."""
        recorded = min(max(1, round(self.fraction * batch_size)), batch_size - 1)
        parts = (
            self.data.sample(recorded, generator, beta=beta),
            self.replay.sample(batch_size - recorded, generator, beta=beta),
        )
        cells = [part.pop("cells") for part in parts]
        first, second = parts
        mixed: dict[str, Any] = {
            name: tree_map(lambda a, b: torch.cat((a, b)), first[name], second[name])
            for name in first
        }
        return {**mixed, "cells": np.concatenate(cells)}
