"""A network for board games whose actions are columns, with equal weights all over the board."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.errors import ConfigError
from rl_training.types import ObsSpec


class ColumnGameNetwork(nn.Module):
    """A policy and a value function for boards (rows, columns, planes), such as connect four's.

    Every window of ``window`` x ``window`` cells is mapped to features, and these to ``votes``
    numbers of each cell of the window. Votes of a cell from all windows are added up. The logit of
    a column is computed from the votes and pieces of its cells, the value from the features of all
    windows. The weights are those of every window and of every column: what is learnt of a line
    in one place holds in all others.

    For `algo_kwargs.network`: it is called with the observations' description and the number of
    actions.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        num_outputs: int,
        *,
        window: int = 4,
        features: int = 64,
        votes: int = 8,
        hidden_size: int = 32,
        value_hidden_size: int = 64,
    ) -> None:
        super().__init__()
        shapes = [leaf.shape for leaf in obs_spec.encoded.values()]
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][1] != num_outputs:
            raise ConfigError(
                "ColumnGameNetwork takes one board, (rows, columns, planes), and an action for each"
                f" column; got observations of shape {shapes} and {num_outputs} actions"
            )
        self.rows, self.columns, planes = shapes[0]
        sides = [side - window + 1 for side in (self.rows, self.columns)]
        if min(sides) < 1:
            raise ConfigError(
                f"window = {window} must be at most {min(self.rows, self.columns)}, the smaller"
                " side of the board"
            )
        self.window = window
        cells = window * window
        self.first = _linear(planes * cells, features)
        self.second = _linear(features, features)
        self.votes = _linear(features, votes * cells)
        self.of_column = _linear((votes + planes) * self.rows, hidden_size)
        self.logit = _linear(hidden_size, 1, 0.01)
        self.of_board = _linear(features * sides[0] * sides[1], value_hidden_size)
        self.value = _linear(value_hidden_size, 1, 1.0)

    def forward(self, obs: Tensor | dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits of all columns (batch, columns), and values (batch,)."""
        board = next(iter(obs.values())) if isinstance(obs, dict) else obs
        planes = board.permute(0, 3, 1, 2).float()
        windows = functional.unfold(planes, self.window).transpose(1, 2)
        features = self.second(self.first(windows).relu_()).relu_()
        votes = self.votes(features).transpose(1, 2)
        votes = functional.fold(votes, (self.rows, self.columns), self.window)
        columns = torch.cat([votes, planes], 1).permute(0, 3, 1, 2).flatten(2)
        logits = self.logit(self.of_column(columns).relu_()).squeeze(-1)
        values = self.value(self.of_board(features.flatten(1)).relu_()).squeeze(-1)
        return logits, values


def _linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Return an orthogonally initialised layer, as is usual for policy gradients."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
