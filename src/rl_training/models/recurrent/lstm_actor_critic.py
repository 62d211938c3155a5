"""A recurrent policy and value function, each a recurrent layer and an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.models.action_heads import PolicyHead, make_action_head
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP
from rl_training.models.mlp_actor_critic import Evaluation
from rl_training.models.observing import ObservingModule
from rl_training.models.recurrent.layers import make_layer
from rl_training.models.recurrent.lstm import NumpyActor
from rl_training.types import ActionSpec, Array, ObsSpec, Remembered


class Along(NamedTuple):
    """What recurrent layers return along sequences, one row per step."""

    policy: Tensor
    value: Tensor
    mask: Tensor | None
    """The action mask, where there is one."""
    shape: tuple[int, int]
    """Time and batch."""


class LSTMActorCritic(ObservingModule):
    """Policy and value function, each with an LSTM of its own or with one (``shared_lstm``).

    They share the encoder. A state is a row of ``state_size`` numbers: that of the policy's LSTM,
    then that of the value function's. The value function's LSTM may see something else
    (`critic_features`, ``critic_inputs`` numbers). With ``memory="gru"`` both are GRUs.
    """

    head: PolicyHead

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        memory: str = "lstm",
        lstm_size: int = 64,
        memory_span: int | None = None,
        shared_lstm: bool = False,
        hidden_sizes: tuple[int, ...] = (64,),
        critic_hidden_sizes: tuple[int, ...] | None = None,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
        critic_inputs: int | None = None,
    ) -> None:
        head = make_action_head(action_spec, log_std_init)
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        settings: dict[str, Any] = {"span": memory_span, "orthogonal": True}
        self.actor_lstm = make_layer(memory, self.num_features, lstm_size, **settings)
        inputs = self.num_features if critic_inputs is None else critic_inputs
        self.critic_lstm = (
            None if shared_lstm else make_layer(memory, inputs, lstm_size, **settings)
        )
        self.actor = MLP((lstm_size, *hidden_sizes, head.param_size), activation, 0.01)
        critic_sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = MLP((lstm_size, *critic_sizes, 1), activation, 1.0)
        self._split = self.actor_lstm.state_size
        self.state_size = self._split if shared_lstm else 2 * self._split

    def initial_state(self, rows: int) -> Tensor:
        """Return the states at the start of an episode: zeros."""
        return torch.zeros(rows, self.state_size, device=next(self.parameters()).device)

    def policy_step(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return parameters of the action distribution, the action mask, and the next states."""
        features, mask = self.encode(obs)
        remembered, _, after = self._remember(*self._sequence_of_one(obs, features), state)
        return self.actor(remembered[0]), mask, after

    def act(
        self, obs: Any, state: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the actions that ``noise`` selects (None: the most likely) and the next states.

        Also their log-probabilities and the values, by the names of a rollout's fields.
        """
        features, mask = self.encode(obs)
        remembered, valued, after = self._remember(*self._sequence_of_one(obs, features), state)
        params = self.actor(remembered[0])
        if noise is None:
            actions = self.head.mode(params, mask)
        else:
            actions = self.head.sample(params, noise, mask)
        logprobs, _ = self.head.logprob_entropy(params, actions, mask)
        return actions, after, {"logprobs": logprobs, "values": self._values(valued[0])}

    def value(self, seen: Remembered) -> Tensor:
        """Return state values of single observations, one per row."""
        features, _ = self.encode(seen.obs)
        sequences = self._sequence_of_one(seen.obs, features)
        _, valued, _ = self._remember(*sequences, seen.state)
        return self._values(valued[0])

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """Return log-probability and entropy of actions, and values, over whole sequences.

        All are (time, batch, ...); ``batch["state"]`` holds the states before the first step.
        """
        along = self.along(batch["obs"], batch["state"])
        params = self.actor(along.policy)
        actions = batch["actions"].flatten(0, 1)
        logprob, entropy = self.head.logprob_entropy(params, actions, along.mask)
        value = self._values(along.value)
        return Evaluation(*(x.reshape(along.shape) for x in (logprob, entropy, value)))

    def along(self, obs: Any, state: Tensor) -> Along:
        """Return what both recurrent layers return along sequences (time, batch, ...)."""
        length, rows = tree_leaves(obs)[0].shape[:2]
        flat: Any = tree_map(lambda leaf: leaf.flatten(0, 1), obs)
        features, mask = self.encode(flat)
        critics = self.critic_features(flat, features)
        sequences = (features.view(length, rows, -1), critics.view(length, rows, -1))
        remembered, valued, _ = self._remember(*sequences, state)
        return Along(remembered.flatten(0, 1), valued.flatten(0, 1), mask, (length, rows))

    def critic_features(self, obs: Any, features: Tensor) -> Tensor:
        """Return what the value function's LSTM sees of flat rows: the same as the policy's."""
        del obs
        return features

    def _sequence_of_one(self, obs: Any, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of both LSTMs over one time step."""
        return features.unsqueeze(0), self.critic_features(obs, features).unsqueeze(0)

    def _values(self, outputs: Tensor) -> Tensor:
        """Return values, one per row, of outputs of the value function's LSTM."""
        values: Tensor = self.critic(outputs).squeeze(-1)
        return values

    def _remember(
        self, features: Tensor, critics: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return both LSTMs' outputs over (time, batch, features), and the last states."""
        if self.critic_lstm is None:
            outputs, after = self.actor_lstm(features, state)
            return outputs, outputs, after
        own, other = state[:, : self._split], state[:, self._split :]
        outputs, own = self.actor_lstm(features, own)
        valued, other = self.critic_lstm(critics, other)
        return outputs, valued, torch.cat((own, other), -1)

    def numpy_actor(self) -> NumpyActor | None:
        """Return acting in NumPy; None where that is not possible (see `numpy_choice`).

        Weights and normaliser are views; a Gaussian's deviation is read when this is called.
        """
        choose = self.numpy_choice(self.actor.activation)
        if choose is None:
            return None
        remember, forward = self.actor_lstm.numpy_step(), self.actor.numpy_function()
        remember_value = self.critic_lstm.numpy_step() if self.critic_lstm is not None else None
        normalize, split = self.numpy_normalize(), self._split

        def act(obs: Array, state: Array, noise: Array | None) -> tuple[Array, Array]:
            if normalize is not None:
                obs = normalize(obs)
            if remember_value is None:
                outputs, after = remember(obs, state)
            else:
                after = np.empty_like(state)
                outputs, after[:, :split] = remember(obs, state[:, :split])
                _, after[:, split:] = remember_value(obs, state[:, split:])
            return choose(forward(outputs), noise), after

        return act
