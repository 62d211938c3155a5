"""Action values that remember: an MLP, an LSTM, and values of all actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError
from rl_training.models.action_heads import CategoricalHead
from rl_training.models.encoders import FlattenEncoder
from rl_training.models.mlp_actor_critic import ACTIVATIONS, MLP, NUMPY_ACTIVATIONS
from rl_training.models.recurrent.lstm import LSTM, NumpyActor
from rl_training.types import ActionSpec, Array, ObsSpec


class LSTMQNetwork(nn.Module):
    """One value per discrete action, of vectors and what was seen before them."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        lstm_size: int,
    ) -> None:
        super().__init__()
        if obs_spec.is_dict or obs_spec.has_images:
            kind = "images" if obs_spec.has_images else "dict observations"
            raise ConfigError(f"drqn takes vector observations, not {kind}; recurrent_ppo can")
        self.head = CategoricalHead(action_spec.nvec, ())
        self.flatten = FlattenEncoder(obs_spec)
        # The last width is that of what the LSTM is shown, so its layer is activated too.
        self.encoder = MLP((self.flatten.output_size, *hidden_sizes), activation)
        self.lstm = LSTM(hidden_sizes[-1], lstm_size)
        self.values = nn.Linear(lstm_size, self.head.param_size)
        self.state_size = self.lstm.state_size

    def initial_state(self, rows: int) -> Tensor:
        """What is remembered at the start of an episode: nothing."""
        return torch.zeros(rows, self.state_size, device=next(self.parameters()).device)

    def reset_state(self, state: Tensor, done: Tensor) -> Tensor:
        """The state with the rows forgotten whose episode is over."""
        return torch.where(done.unsqueeze(-1), 0.0, state)

    def act(
        self, obs: Tensor, state: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The most valued actions (once ``noise`` is added), the next state, nothing besides."""
        values, after = self._sequence(obs.unsqueeze(0), state)
        if noise is None:
            return self.head.mode(values[0], None), after, {}
        return self.head.sample(values[0], noise, None), after, {}

    def q_values_sequence(self, obs: Tensor, state: Tensor) -> Tensor:
        """Values of all actions, (time, batch, actions), of sequences that begin in ``state``."""
        return self._sequence(obs, state)[0]

    def _sequence(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        length, rows = obs.shape[:2]
        features = self.encoder(self.flatten(obs.flatten(0, 1)))
        shown = ACTIVATIONS[self.encoder.activation](features).view(length, rows, -1)
        outputs, after = self.lstm(shown, state)
        return self.values(outputs), after

    def numpy_actor(self) -> NumpyActor | None:
        """The most valued actions in NumPy over the same weights, where that is possible."""
        on_cpu = self.values.weight.device.type == "cpu"
        known = self.encoder.activation in NUMPY_ACTIVATIONS
        choose = self.head.numpy_choice()
        if choose is None or not (self.flatten.single_vector and on_cpu and known):
            return None
        activate = NUMPY_ACTIVATIONS[self.encoder.activation]
        encode, remember = self.encoder.numpy_function(), self.lstm.numpy_step()
        weight, bias = self.values.weight.detach().numpy().T, self.values.bias.detach().numpy()

        def act(obs: Array, state: Array, noise: Array | None) -> tuple[Array, Array]:
            outputs, after = remember(activate(encode(obs)), state)
            return choose(outputs @ weight + bias, noise), after

        return act
