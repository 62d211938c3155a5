"""An encoder that computes something else in train than in eval mode."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rl_training.types import ObsSpec


class ModeEncoder(nn.Module):
    """A layer with batch normalisation and dropout."""

    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__()
        self.output_size = 8
        self.linear = nn.Linear(obs_spec.leaves[""].size, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, obs: Tensor) -> Tensor:
        return cast("Tensor", self.dropout(self.norm(self.linear(obs))).tanh())
