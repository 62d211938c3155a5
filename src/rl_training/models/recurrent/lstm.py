"""Recurrent layers whose state is a plain row of numbers: their base, and the LSTM."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.types import Array

NumpyStep: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]
"""Inputs and states of one time step to outputs and next states."""


class NumpyActor(Protocol):
    """Observations, states and noise (None: greedy) to actions and next states."""

    def __call__(self, obs: Array, state: Array, noise: Array | None) -> tuple[Array, Array]:
        """Return actions and states after one step of every row."""
        ...


@contextlib.contextmanager
def cudnn_without_warning(inputs: Tensor) -> Iterator[None]:
    """Silence cuDNN's warning that it copies weights which are views of one flat tensor."""
    if not inputs.is_cuda:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of")
        yield


class RecurrentLayer(nn.Module, ABC):
    """One recurrent layer of torch, from inputs over (time, batch, ...) and a row of state.

    Whole sequences go through torch's fused kernels; they must not hold a reset: buffers split
    them there.
    """

    def __init__(self, layer: nn.RNNBase, size: int, *, state_size: int, orthogonal: bool) -> None:
        super().__init__()
        self.size = size
        self.state_size = state_size
        self.layer = layer
        if orthogonal:
            for name, parameter in self.layer.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter)
                else:
                    nn.init.zeros_(parameter)

    @abstractmethod
    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs over (time, batch, ...) and the last states, from states (batch, ...)."""

    @torch.no_grad()
    def keep_for(self, span: int) -> None:
        """Draw biases of gates so that cells keep their state for 1 to ``span`` - 1 steps.

        A gate that keeps sigmoid(b) of the state per step forgets it in about 1 + e^b steps
        (Tallec and Ollivier 2018, arXiv:1804.11188): b = log(u), u uniform in [1, span - 1].
        The gates of new inputs get the opposite where they are others.
        """
        keep = torch.empty(self.size).uniform_(1, span - 1).log()
        biases = dict(self.layer.named_parameters())
        for gate, values in self.gates_with(keep).items():
            part = slice(gate * self.size, (gate + 1) * self.size)
            biases["bias_ih_l0"][part] = values
            biases["bias_hh_l0"][part] = 0.0

    @abstractmethod
    def gates_with(self, keep: Tensor) -> dict[int, Tensor]:
        """Return biases by the place of their gate, given those of the gate that keeps."""

    @abstractmethod
    def numpy_step(self) -> NumpyStep:
        """Return one time step in NumPy, over views of the weights."""

    def numpy_weights(self) -> tuple[Array, Array, Array, Array]:
        """Return views of the weights of inputs and state, and of their biases."""
        arrays = {name: p.detach().numpy() for name, p in self.layer.named_parameters()}
        w, u = arrays["weight_ih_l0"].T, arrays["weight_hh_l0"].T
        return w, u, arrays["bias_ih_l0"], arrays["bias_hh_l0"]


class LSTM(RecurrentLayer):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; forget gates of Gers et al. 2000).

        i, f, o = sigmoid(W x + U h + b) each,  g = tanh(W x + U h + b)
        c' = f c + i g,  h' = o tanh(c')

    A state is the row (h, c), zeros at the start of an episode.
    """

    def __init__(self, inputs: int, size: int, *, orthogonal: bool = False) -> None:
        super().__init__(nn.LSTM(inputs, size), size, state_size=2 * size, orthogonal=orthogonal)

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs over (time, batch, ...) and the last states, from states (batch, ...)."""
        h, c = (part.unsqueeze(0).contiguous() for part in state.chunk(2, -1))
        with cudnn_without_warning(inputs):
            outputs, (h, c) = self.layer(inputs, (h, c))
        return outputs, torch.cat((h[0], c[0]), -1)

    def gates_with(self, keep: Tensor) -> dict[int, Tensor]:
        """Return the biases of the gates i and f."""
        return {0: -keep, 1: keep}

    def numpy_step(self) -> NumpyStep:
        """Return one time step in NumPy, over views of the weights: several times faster."""
        size = self.size
        w, u, b1, b2 = self.numpy_weights()
        # sigmoid(x) = (1 + tanh(x / 2)) / 2: one tanh serves all gates.
        slope = np.full(4 * size, 0.5, np.float32)
        slope[2 * size : 3 * size] = 1.0
        shift = 1 - slope

        def step(inputs: Array, state: Array) -> tuple[Array, Array]:
            gates = inputs @ w
            gates += state[:, :size] @ u
            gates += b1
            gates += b2
            gates *= slope
            np.tanh(gates, out=gates)
            gates *= slope
            gates += shift
            after = np.empty_like(state)
            h, c = after[:, :size], after[:, size:]
            np.multiply(gates[:, size : 2 * size], state[:, size:], out=c)
            c += gates[:, :size] * gates[:, 2 * size : 3 * size]
            np.tanh(c, out=h)
            h *= gates[:, 3 * size :]
            return h, after

        return step
