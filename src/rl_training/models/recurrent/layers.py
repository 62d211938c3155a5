"""The recurrent layers by the names that configs use."""

from __future__ import annotations

from rl_training.models.recurrent.gru import GRU
from rl_training.models.recurrent.lstm import LSTM, RecurrentLayer

LAYERS: dict[str, type[LSTM | GRU]] = {"lstm": LSTM, "gru": GRU}


def make_layer(kind: str, inputs: int, size: int, *, orthogonal: bool = False) -> RecurrentLayer:
    """Return a recurrent layer: 'lstm' or 'gru'."""
    return LAYERS[kind](inputs, size, orthogonal=orthogonal)
