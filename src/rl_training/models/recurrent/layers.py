"""The recurrent layers by the names that configs use."""

from __future__ import annotations

from rl_training.models.recurrent.gru import GRU
from rl_training.models.recurrent.lstm import LSTM, RecurrentLayer

LAYERS: dict[str, type[LSTM | GRU]] = {"lstm": LSTM, "gru": GRU}


def make_layer(
    kind: str, inputs: int, size: int, *, span: int | None = None, orthogonal: bool = False
) -> RecurrentLayer:
    """Return a recurrent layer, 'lstm' or 'gru', whose gates keep its state for about ``span``."""
    layer = LAYERS[kind](inputs, size, orthogonal=orthogonal)
    if span is not None:
        layer.keep_for(span)
    return layer
