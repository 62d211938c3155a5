"""Actors: they choose actions, and own exploration and its random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import NonFiniteError
from rl_training.models.action_heads import ActionHead
from rl_training.tree import tree_map
from rl_training.types import ACTION_MASK, Array, Obs, Progress


class Actor(Protocol):
    """What the collector and the evaluator need."""

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        """Choose actions; also what the buffer should store beside them."""
        ...

    def reset(self, done: Array) -> None:
        """Episodes ended where ``done``: forget what belongs to them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a saved state back."""
        ...


class Policy(Protocol):
    """What an actor needs of a model."""

    head: ActionHead

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Distribution parameters and action mask."""
        ...

    def numpy_policy(self) -> Callable[[Array], Array] | None:
        """The same parameters by NumPy, where that is possible (and there is no mask)."""
        ...


class _Forward:
    """A model's distribution parameters, by the fastest way there is."""

    def __init__(self, model: Policy, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._numpy = model.numpy_policy()

    def __call__(self, obs: Obs) -> tuple[Tensor, Tensor | None]:
        if self._numpy is not None:
            return torch.from_numpy(self._numpy(obs)), None  # type: ignore[arg-type]
        return self._model.policy(to_device(obs, self._device))


class PolicyActor:
    """Samples from a policy. Noise is drawn a block of steps at a time, then read row by row."""

    def __init__(
        self,
        model: Policy,
        num_envs: int,
        block: int,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self._model = model
        self._num_envs = num_envs
        self._block = block
        self._generator = generator
        self._device = device
        self._noise: Tensor | None = None
        self._position = 0
        self._block_start = generator.get_state()
        self._forward = _Forward(model, device)

    @torch.inference_mode()
    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        """Sample one action per environment."""
        del progress
        if self._noise is None or self._position == self._block:
            self._draw()
        noise = self._noise
        assert noise is not None  # noqa: S101 - narrows the type
        params, mask = self._forward(obs)
        action = self._model.head.sample(params, noise[self._position], mask)
        self._position += 1
        return action.cpu().numpy(), {}

    def _draw(self) -> None:
        self._block_start = self._generator.get_state()
        shape = (self._block, self._num_envs)
        self._noise = self._model.head.draw_noise(shape, self._generator).to(self._device)
        self._position = 0
        self._forward = _Forward(self._model, self._device)

    def reset(self, done: Array) -> None:
        """A feed-forward policy remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Where the noise stands: the generator before this block, and how much of it is used."""
        used_up = self._noise is None or self._position == self._block
        if used_up:
            return {"rng": self._generator.get_state(), "position": 0}
        return {"rng": self._block_start, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there again."""
        self._generator.set_state(state["rng"])
        self._noise = None
        if state["position"]:
            self._draw()
            self._position = int(state["position"])


class GreedyActor:
    """Takes the most likely action, or samples with a stream of its own; for evaluation."""

    def __init__(
        self,
        model: Policy,
        device: torch.device,
        sampling: torch.Generator | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._sampling = sampling
        self._forward = _Forward(model, device)

    @torch.inference_mode()
    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        """Choose one action per row."""
        del progress
        params, mask = self._forward(obs)
        if not torch.isfinite(params).all():
            raise NonFiniteError(
                "the policy's output is not finite: the observation or the"
                " weights hold a NaN or an infinity"
            )
        if self._sampling is None:
            return self._model.head.mode(params, mask).cpu().numpy(), {}
        noise = self._model.head.draw_noise(params.shape[:-1], self._sampling).to(self._device)
        return self._model.head.sample(params, noise, mask).cpu().numpy(), {}

    def reset(self, done: Array) -> None:
        """A feed-forward policy remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing survives an evaluation."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to bring back."""


def to_device(obs: Obs, device: torch.device) -> Any:
    """Observations as tensors where the network is; a mask must leave something to choose."""
    if isinstance(obs, dict) and ACTION_MASK in obs:
        legal = np.asarray(obs[ACTION_MASK]).any(-1)
        if not legal.all():
            row = int(np.flatnonzero(~legal)[0])
            raise ValueError(f"'{ACTION_MASK}' of environment {row} allows no action at all")
    if device.type == "cpu":
        return tree_map(torch.from_numpy, obs)
    return tree_map(lambda leaf: torch.from_numpy(leaf).to(device), obs)
