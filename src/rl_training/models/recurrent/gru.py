"""One GRU layer whose state is a plain row of numbers."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from rl_training.models.recurrent.lstm import NumpyStep, RecurrentLayer, cudnn_without_warning
from rl_training.types import Array


class GRU(RecurrentLayer):
    """Gated recurrent unit (Cho et al. 2014, arXiv:1406.1078), as in torch.

        r, z = sigmoid(W x + b + U h + d) each
        n    = tanh(W x + b + r (U h + d))
        h'   = (1 - z) n + z h

    A state is the row h, zeros at the start of an episode.
    """

    def __init__(self, inputs: int, size: int, *, orthogonal: bool = False) -> None:
        super().__init__(nn.GRU(inputs, size), size, state_size=size, orthogonal=orthogonal)

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs over (time, batch, ...) and the last states, from states (batch, ...)."""
        with cudnn_without_warning(inputs):
            outputs, after = self.layer(inputs, state.unsqueeze(0).contiguous())
        return outputs, after[0]

    def gates_with(self, keep: Tensor) -> dict[int, Tensor]:
        """Return the bias of the gate z."""
        return {1: keep}

    def numpy_step(self) -> NumpyStep:
        """Return one time step in NumPy, over views of the weights: several times faster."""
        size = self.size
        w, u, b, d = self.numpy_weights()
        half = np.float32(0.5)

        def step(inputs: Array, state: Array) -> tuple[Array, Array]:
            given, own = inputs @ w, state @ u
            given += b
            own += d
            gates = given[:, : 2 * size] + own[:, : 2 * size]
            gates *= half  # sigmoid(x) = (1 + tanh(x / 2)) / 2
            np.tanh(gates, out=gates)
            gates += 1
            gates *= half
            reset, keep = gates[:, :size], gates[:, size:]
            new = own[:, 2 * size :] * reset
            new += given[:, 2 * size :]
            np.tanh(new, out=new)
            after: Array = new + keep * (state - new)
            return after, after

        return step
