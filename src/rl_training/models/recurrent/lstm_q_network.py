"""DRQN's network: an encoder and an MLP, a recurrent layer, and values of all actions."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.models.action_heads import CategoricalHead
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import ACTIVATIONS, MLP, NUMPY_ACTIVATIONS
from rl_training.models.mlp_q_network import legal_values
from rl_training.models.observing import ObservingModule
from rl_training.models.recurrent.layers import make_layer
from rl_training.models.recurrent.lstm import NumpyActor
from rl_training.types import ActionSpec, Array, ObsSpec


class LSTMQNetwork(ObservingModule):
    """One value per discrete action, from observations and the state of an LSTM or a GRU.

    Without ``hidden_sizes`` the recurrent layer reads the encoder's features.
    """

    head: CategoricalHead

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        lstm_size: int,
        memory: str = "lstm",
        memory_span: int | None = None,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = CategoricalHead(action_spec.nvec, ())
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        # Its last layer feeds the recurrent one and is followed by an activation too.
        self.trunk = MLP((self.num_features, *hidden_sizes), activation)
        inputs = (self.num_features, *hidden_sizes)[-1]
        self.lstm = make_layer(memory, inputs, lstm_size, span=memory_span)
        self.values = nn.Linear(lstm_size, head.param_size)
        self.state_size = self.lstm.state_size

    def initial_state(self, rows: int) -> Tensor:
        """Return the states at the start of an episode: zeros."""
        return torch.zeros(rows, self.state_size, device=next(self.parameters()).device)

    def reset_state(self, state: Tensor, done: Tensor) -> Tensor:
        """Return the states with zeros in the rows that are ``done``."""
        return torch.where(done.unsqueeze(-1), 0.0, state)

    def policy_step(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return values of all actions, the action mask, and the next states."""
        features, mask = self.encode(obs)
        values, after = self._sequence(features.unsqueeze(0), state)
        return values[0], mask, after

    def act(
        self, obs: Any, state: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the actions of highest value plus ``noise``, the next states, an empty dict."""
        values, mask, after = self.policy_step(obs, state)
        if noise is None:
            return self.head.mode(values, mask), after, {}
        return self.head.sample(values, noise, mask), after, {}

    def q_values_sequence(self, obs: Any, state: Tensor) -> Tensor:
        """Return the `legal_values` of all actions along sequences, (time, batch, actions)."""
        length, rows = tree_leaves(obs)[0].shape[:2]
        features, mask = self.encode(tree_map(lambda leaf: leaf.flatten(0, 1), obs))
        values, _ = self._sequence(features.view(length, rows, -1), state)
        return legal_values(values, None if mask is None else mask.view(length, rows, -1))

    def _sequence(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return values of all actions from features (time, batch, ...), and the last states."""
        if len(self.trunk.layers):
            features = ACTIVATIONS[self.trunk.activation](self.trunk(features))
        outputs, after = self.lstm(features, state)
        return self.values(outputs), after

    def numpy_actor(self) -> NumpyActor | None:
        """Return greedy acting in NumPy; None where it is not possible (see `numpy_choice`)."""
        choose = self.numpy_choice(self.trunk.activation)
        if choose is None or not len(self.trunk.layers):
            return None
        activate = NUMPY_ACTIVATIONS[self.trunk.activation]
        trunk, step = self.trunk.numpy_function(), self.lstm.numpy_step()
        normalize = self.numpy_normalize()
        weight, bias = self.values.weight.detach().numpy().T, self.values.bias.detach().numpy()

        def act(obs: Array, state: Array, noise: Array | None) -> tuple[Array, Array]:
            if normalize is not None:
                obs = normalize(obs)
            outputs, after = step(activate(trunk(obs)), state)
            return choose(outputs @ weight + bias, noise), after

        return act

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any
    ) -> None:
        """Load; in older checkpoints, which have no ``trunk``, that is called ``encoder``."""
        old, new = f"{prefix}encoder.layers.", f"{prefix}trunk.layers."
        has_trunk = any(key.startswith(new) for key in state_dict)
        if len(self.trunk.layers) and not has_trunk:
            for key in [key for key in state_dict if key.startswith(old)]:
                state_dict[new + key.removeprefix(old)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)
