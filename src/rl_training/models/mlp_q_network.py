"""Action values over vectors, plain or dueling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.action_heads import CategoricalHead
from rl_training.models.mlp_actor_critic import MLP, NUMPY_ACTIVATIONS, FlattenEncoder
from rl_training.types import ACTION_MASK, ActionSpec, Array, ObsSpec


class MLPQNetwork(nn.Module):
    """One value per discrete action.

    Dueling (Wang et al. 2016, arXiv:1511.06581): Q = V + A - mean(A), each a network of its own.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        dueling: bool = False,
        encoder: type[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        (self.num_actions,) = action_spec.nvec
        self.head = CategoricalHead(action_spec.nvec, ())
        self.encoder = FlattenEncoder(obs_spec) if encoder is None else encoder(obs_spec)
        features = int(self.encoder.output_size)  # type: ignore[arg-type]
        self.advantage = MLP((features, *hidden_sizes, self.num_actions), activation)
        self.state_value = MLP((features, *hidden_sizes, 1), activation) if dueling else None

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """The values of all actions, and the mask of the legal ones."""
        mask = None
        if isinstance(obs, dict) and ACTION_MASK in obs:
            mask = obs[ACTION_MASK]
            obs = {key: leaf for key, leaf in obs.items() if key != ACTION_MASK}
        features = self.encoder(obs)
        values: Tensor = self.advantage(features)
        if self.state_value is not None:
            values = self.state_value(features) + values - values.mean(-1, keepdim=True)
        return values, mask

    def q_values(self, obs: Any) -> Tensor:
        """The values of all actions; those of illegal ones are the least float."""
        values, mask = self.policy(obs)
        if mask is None:
            return values
        return values.masked_fill(~mask, torch.finfo(values.dtype).min)

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Greedy actions in NumPy over the same weights, where that is possible.

        The value stream of a dueling network moves all actions alike: it has no say here.
        """
        plain = isinstance(self.encoder, FlattenEncoder) and self.encoder.single_vector
        on_cpu = next(self.parameters()).device.type == "cpu"
        choose = self.head.numpy_choice()
        if not (plain and on_cpu and self.advantage.activation in NUMPY_ACTIVATIONS and choose):
            return None
        forward = self.advantage.numpy_function()
        return lambda obs, noise: choose(forward(obs), noise)
