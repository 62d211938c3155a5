"""PPG with memory: the same phases, over sequences instead of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.algorithms.ppg import PPG, PPGConfig
from rl_training.data.sequences import joined_sequences, shuffled_sequences
from rl_training.models.mlp_ppg import Joint
from rl_training.models.recurrent.lstm_ppg import LSTMPPGModel

_IMAGES_AT_ONCE = 1024


class RecurrentPPG(PPG):
    """PPG on a model that remembers.

    The auxiliary phase trains whole sequences of the rollouts since the last one, from the states
    that were stored when they were collected.
    """

    _shuffled = staticmethod(shuffled_sequences)
    _rows_dim = 1

    def __init__(self, model: LSTMPPGModel, config: PPGConfig, **rest: Any) -> None:
        super().__init__(model, config, **rest)
        self._recurrent = model

    def _joined(self, kept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return rollouts as one batch of sequences, padded to the length of the longest."""
        return joined_sequences(kept)

    def _pieces(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield parts of a batch whose policies are computed at once."""
        length, count = batch["returns"].shape
        most = max(1, _IMAGES_AT_ONCE // length) if self._recurrent.sees_images else count
        for i in range(0, count, most):
            part = slice(i, i + most)

            def of_part(leaf: Tensor, part: slice = part) -> Tensor:
                return leaf[:, part]

            yield {"obs": tree_map(of_part, batch["obs"]), "state": batch["state"][part]}

    def _joint(self, batch: Mapping[str, Any]) -> Joint:
        """Return what the network computes of a batch, (time, batch, ...)."""
        return self._recurrent.joint(batch["obs"], batch["state"])
