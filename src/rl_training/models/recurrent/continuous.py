"""Recurrent networks of replay learners: a policy and critics, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.models.action_heads import ActionHead, ReplayHead
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP
from rl_training.models.mlp_continuous import EnsembleMLP
from rl_training.models.observing import ObservingModule
from rl_training.models.recurrent.layers import make_layer
from rl_training.models.recurrent.lstm import NumpyActor
from rl_training.types import Array, ObsSpec


class Sequences(NamedTuple):
    """Observations (time, batch, ...), and the recurrent states before the first of them."""

    obs: Any
    state: Tensor
    """(batch, numbers): the policy's state, then that of the critics."""
    skipped: int
    """First steps that networks see, but of which they return nothing."""


def along(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of a `RecurrentReplayBuffer` with `Sequences` as ``obs`` and ``next_obs``.

    Its ``obs`` are one step longer than the rest: what followed a step is the step after it.
    """
    obs, state = batch["obs"], batch["state"]
    here = Sequences(tree_map(lambda leaf: leaf[:-1], obs), state, 0)
    return {**batch, "obs": here, "next_obs": Sequences(obs, state, 1)}


class RecurrentNetwork(ObservingModule):
    """An encoder and a recurrent layer."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        head: ReplayHead | None = None,
        *,
        memory: str,
        lstm_size: int,
        memory_span: int | None = None,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        self.memory = make_layer(memory, self.num_features, lstm_size, span=memory_span)
        self.state_size = self.memory.state_size

    def remember(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of one time step, and the next states."""
        features, _ = self.encode(obs)
        outputs, after = self.memory(features.unsqueeze(0), state)
        return outputs[0], after

    def _outputs(self, obs: Any, state: Tensor, skipped: int) -> Tensor:
        """Return the outputs along sequences, (time - skipped, batch, size)."""
        length, rows = tree_leaves(obs)[0].shape[:2]
        features, _ = self.encode(tree_map(lambda leaf: leaf.flatten(0, 1), obs))
        outputs: Tensor = self.memory(features.view(length, rows, -1), state)[0]
        return outputs[skipped:]


class RecurrentActor(RecurrentNetwork):
    """Maps all observations of an episode so far to the parameters of an action in [-1, 1]."""

    head: ReplayHead

    def __init__(
        self,
        obs_spec: ObsSpec,
        head: ReplayHead,
        *,
        lstm_size: int,
        hidden_sizes: tuple[int, ...],
        activation: str,
        **settings: Any,
    ) -> None:
        super().__init__(obs_spec, head, lstm_size=lstm_size, **settings)
        self.net = MLP((lstm_size, *hidden_sizes, head.param_size), activation)

    def initial_state(self, rows: int) -> Tensor:
        """Return the states at the start of an episode: zeros."""
        return torch.zeros(rows, self.state_size, device=next(self.parameters()).device)

    def policy(self, seen: Sequences) -> tuple[Tensor, None]:
        """Return parameters of the actions along sequences, (time, batch, ...); and no mask."""
        state = seen.state[:, : self.state_size]
        return self.net(self._outputs(seen.obs, state, seen.skipped)), None

    def actions(self, seen: Sequences) -> Tensor:
        """Return the most likely actions along sequences."""
        return self.head.mode(*self.policy(seen))

    def policy_step(self, obs: Any, state: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return parameters of the actions, no mask, and the next states."""
        outputs, after = self.remember(obs, state)
        return self.net(outputs), None, after

    def act(
        self, obs: Any, state: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the actions that ``noise`` selects, the next states, and an empty dict."""
        params, _, after = self.policy_step(obs, state)
        if noise is None:
            return self.head.mode(params, None), after, {}
        return self.head.sample(params, noise, None), after, {}

    def numpy_actor(self) -> NumpyActor | None:
        """Return acting in NumPy; None where it is not possible (see `numpy_choice`)."""
        choose = self.numpy_choice(self.net.activation)
        if choose is None:
            return None
        step, forward, normalize = (
            self.memory.numpy_step(),
            self.net.numpy_function(),
            self.numpy_normalize(),
        )

        def act(obs: Array, state: Array, noise: Array | None) -> tuple[Array, Array]:
            outputs, after = step(obs if normalize is None else normalize(obs), state)
            return choose(forward(outputs), noise), after

        return act


class RecurrentCritics(RecurrentNetwork):
    """Values of continuous actions, given all observations of an episode so far.

    The critics of the ensemble share encoder and memory. The memory sees observations alone, so
    that values of several actions at a step need one pass.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_size: int,
        *,
        num_critics: int,
        lstm_size: int,
        hidden_sizes: tuple[int, ...],
        activation: str,
        layer_norm: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(obs_spec, lstm_size=lstm_size, **settings)
        sizes = (lstm_size + action_size, *hidden_sizes, 1)
        self.net = EnsembleMLP(num_critics, sizes, activation, layer_norm)

    def forward(self, seen: Sequences, actions: Tensor, members: int | None = None) -> Tensor:
        """Return values (critics, time, batch) of actions in [-1, 1] along sequences."""
        state = seen.state[:, -self.state_size :]
        outputs = self._outputs(seen.obs, state, seen.skipped)
        rows = torch.cat([outputs, actions.flatten(2)], 2)
        values: Tensor = self.net(rows.flatten(0, 1), members).squeeze(-1)
        return values.view(-1, *rows.shape[:2])


def acting_state_size(networks: Any) -> int:
    """Return the numbers of a state of `ActingMemories` of a policy and critics."""
    return int(networks.actor.state_size) + int(networks.critics.state_size)


class ActingMemories:
    """A policy that acts, and the critics' memory, which sees what the policy sees.

    A state is the policy's, then that of the critics: what a replay stores with its sequences.
    """

    def __init__(self, actor: RecurrentActor, critics: RecurrentCritics) -> None:
        self._actor, self._critics = actor, critics
        self.head: ActionHead = actor.head
        self._split = actor.state_size
        self.state_size = actor.state_size + critics.state_size

    def policy_step(self, obs: Any, state: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return parameters of the actions, no mask, and the next states."""
        params, _, own = self._actor.policy_step(obs, state[:, : self._split])
        return params, None, self._joined(obs, state, own)

    def act(
        self, obs: Any, state: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the actions that ``noise`` selects, the next states, and an empty dict."""
        actions, own, _ = self._actor.act(obs, state[:, : self._split], noise)
        return actions, self._joined(obs, state, own), {}

    def _joined(self, obs: Any, state: Tensor, own: Tensor) -> Tensor:
        _, other = self._critics.remember(obs, state[:, self._split :])
        return torch.cat((own, other), -1)

    def numpy_actor(self) -> NumpyActor | None:
        """Return acting in NumPy, where the policy can."""
        policy = self._actor.numpy_actor()
        if policy is None:
            return None
        step, normalize = self._critics.memory.numpy_step(), self._critics.numpy_normalize()
        split = self._split

        def act(obs: Array, state: Array, noise: Array | None) -> tuple[Array, Array]:
            after = np.empty_like(state)
            actions, after[:, :split] = policy(obs, state[:, :split], noise)
            seen = obs if normalize is None else normalize(obs)
            _, after[:, split:] = step(seen, state[:, split:])
            return actions, after

        return act
