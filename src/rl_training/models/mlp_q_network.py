"""DQN's network: values of actions or distributions of returns, plain, dueling or noisy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from rl_training.models.action_heads import CategoricalHead, NumpyChoice
from rl_training.models.encoders import DEFAULT_ENCODER, EncoderConfig
from rl_training.models.mlp import MLP, NoisyFunction
from rl_training.models.noisy_mlp import NoisyMLP, given
from rl_training.models.observing import ObservingModule
from rl_training.models.value_distributions import ValueDistribution
from rl_training.types import ActionSpec, Array, ObsSpec


def legal_values(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values of all actions; those of illegal ones are the least float.

    Where the mask allows nothing (as it may in the final observation of an episode) it is ignored.
    """
    if mask is None:
        return values
    mask = mask | ~mask.any(-1, keepdim=True)
    return values.masked_fill(~mask, torch.finfo(values.dtype).min)


class FeedForwardQNetwork(ObservingModule, ABC):
    """Values of discrete actions, without memory; subclasses compute `outputs`.

    With a ``distribution``, a network computes several numbers for each action, which describe the
    distribution of the return; the value is its mean. A noisy network takes ``noise_size`` normal
    numbers as its ``noise``, one vector for all rows or one for each; without, it uses the means
    of its weights.
    """

    head: CategoricalHead
    distribution: ValueDistribution | None
    noise_size = 0

    @abstractmethod
    def outputs(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the mask of legal actions, after the values of all actions, (rows, actions).

        With a ``distribution`` they are (rows, actions, size).
        """

    def policy(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions, and the mask of the legal ones."""
        outputs, mask = self.outputs(obs, noise)
        return (outputs if self.distribution is None else self.distribution.mean(outputs)), mask

    def q_values(self, obs: Any, noise: Tensor | None = None) -> Tensor:
        """Return the `legal_values` of all actions."""
        return legal_values(*self.policy(obs, noise))

    def returns(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs for all actions, (rows, actions, size), and their `legal_values`."""
        outputs, mask = self.outputs(obs, noise)
        assert self.distribution is not None  # noqa: S101 - narrows the type
        return outputs, legal_values(self.distribution.mean(outputs), mask)

    def value(self, obs: Any) -> Tensor:
        """Return the value of each observation: that of its best legal action."""
        return self.q_values(obs).amax(-1)


class MLPQNetwork(FeedForwardQNetwork):
    """Values of discrete actions, or distributions of returns, by MLPs.

    Dueling (Wang et al. 2016, arXiv:1511.06581): Q = V + A - mean(A), each a network of its own;
    of a distribution, each of its numbers is such a sum. With ``noisy`` the MLPs are noisy; with
    ``layer_norm`` every hidden layer is followed by layer normalisation.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...],
        activation: str,
        dueling: bool = False,
        layer_norm: bool = False,
        noisy: bool = False,
        distribution: ValueDistribution | None = None,
        encoder: EncoderConfig = DEFAULT_ENCODER,
        normalize_obs: bool = False,
        clip_obs: float = 10.0,
    ) -> None:
        head = CategoricalHead(action_spec.nvec, ())
        super().__init__(obs_spec, encoder, clip_obs if normalize_obs else None, head)
        (self.num_actions,) = action_spec.nvec
        self.distribution = distribution
        size = 1 if distribution is None else distribution.size
        self._shape = () if distribution is None else (self.num_actions, size)
        inner = (self.num_features, *hidden_sizes)

        def mlp(outputs: int) -> MLP:
            if noisy:
                return NoisyMLP((*inner, outputs), activation)
            return MLP((*inner, outputs), activation, layer_norm=layer_norm)

        self.advantage = mlp(self.num_actions * size)
        self.state_value = mlp(size) if dueling else None
        self._noise_sizes = [
            one.noise_size
            for one in (self.advantage, self.state_value)
            if isinstance(one, NoisyMLP)
        ]
        self.noise_size = sum(self._noise_sizes)

    def outputs(self, obs: Any, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the values of all actions or what describes their returns, and the mask."""
        features, mask = self.encode(obs)
        noises = (None, None) if noise is None else torch.split(noise, self._noise_sizes, -1)
        values: Tensor = self.advantage(features, *given(noises[0]))
        if self._shape:
            values = values.reshape(-1, *self._shape)
        if self.state_value is not None:
            actions = -1 if not self._shape else -2
            state_value: Tensor = self.state_value(features, *given(noises[1]))
            if self._shape:
                state_value = state_value.unsqueeze(-2)
            values = state_value + values - values.mean(actions, keepdim=True)
        return values, mask

    def numpy_actor(self) -> NumpyChoice | None:
        """Return acting in NumPy, where that is possible; its noise is the network's."""
        if self.distribution is None and not self.noise_size:
            # A state's value does not change which action is best.
            return self.numpy_policy(self.advantage)
        choose = self.numpy_choice(self.advantage.activation)
        if choose is None:
            return None
        values, normalize = self._numpy_values(), self.numpy_normalize()
        if normalize is None:
            return lambda obs, noise: choose(values(obs, noise), None)
        return lambda obs, noise: choose(values(normalize(obs), noise), None)

    def _numpy_values(self) -> NoisyFunction:
        """Return a function from features and noise to what orders actions as their values do."""
        advantage, distribution = self.advantage.numpy_noisy(), self.distribution
        first = self._noise_sizes[0] if self.noise_size else 0
        mean = None if distribution is None else distribution.numpy_mean()
        matters = distribution is not None and not distribution.is_linear
        use_state = self.state_value is not None and matters
        state_value = self.state_value.numpy_noisy() if self.state_value and use_state else None

        def values(x: Array, noise: Array | None) -> Array:
            parts = (None, None) if noise is None else (noise[..., :first], noise[..., first:])
            outputs = advantage(x, parts[0])
            if mean is None:
                return outputs
            outputs = outputs.reshape(len(x), *self._shape)
            if state_value is not None:
                outputs = outputs - outputs.mean(-2, keepdims=True)
                outputs += state_value(x, parts[1])[:, None]
            return mean(outputs)

        return values
