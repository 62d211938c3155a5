"""Actors: they choose actions, and own exploration and its random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.models.action_heads import ActionHead
from rl_training.tree import tree_leaves, tree_map
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

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Observations and noise to actions in NumPy, where the model can."""
        ...


class _Chooser:
    """Actions of a model as it stands now, by the fastest way there is."""

    def __init__(self, model: Policy, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._numpy = model.numpy_actor()

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        """Noise for a block of actions, where it will be used."""
        noise = self._model.head.draw_noise(shape, generator)
        return noise.numpy() if self._numpy is not None else noise.to(self._device)

    def __call__(self, obs: Obs, noise: Any) -> Array:
        """The actions that ``noise`` selects; the most likely ones without."""
        if self._numpy is not None and not isinstance(obs, dict):
            return self._numpy(obs, noise)
        return self._by_torch(obs, noise)

    @torch.inference_mode()
    def _by_torch(self, obs: Obs, noise: Any) -> Array:
        head = self._model.head
        params, mask = self._model.policy(to_device(obs, self._device))
        action = head.mode(params, mask) if noise is None else head.sample(params, noise, mask)
        return action.cpu().numpy()


class PolicyActor:
    """Samples from a policy. Noise is drawn a block of steps at a time, then read row by row.

    A block is one rollout, so the policy does not change within it.
    """

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
        self._position = block
        self._block_start = generator.get_state()
        self._choose: _Chooser
        self._noise: Any

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        """Sample one action per environment."""
        del progress
        if self._position == self._block:
            self._draw()
        noise = self._noise[self._position]
        self._position += 1
        return self._choose(obs, noise), {}

    def _draw(self) -> None:
        self._block_start = self._generator.get_state()
        self._choose = _Chooser(self._model, self._device)
        self._noise = self._choose.noise((self._block, self._num_envs), self._generator)
        self._position = 0

    def reset(self, done: Array) -> None:
        """A feed-forward policy remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Where the noise stands: the generator before this block, and how much of it is used."""
        if self._position == self._block:
            return {"rng": self._generator.get_state(), "position": 0}
        return {"rng": self._block_start, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there again."""
        self._generator.set_state(state["rng"])
        self._position = self._block
        if state["position"]:
            self._draw()
            self._position = int(state["position"])


class EpsilonGreedyActor:
    """A random legal action with probability epsilon(progress), else the most valued one.

    Random numbers are drawn a block of steps at a time, for as many rows as there are.
    """

    _BLOCK = 256

    def __init__(
        self,
        model: Policy,
        epsilon: Callable[[Progress], float],
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self._num_actions = model.head.param_size
        self._epsilon = epsilon
        self._generator = generator
        self._choose = _Chooser(model, device)
        self._position = self._BLOCK
        self._block_start = generator.get_state()
        self._uniform: Array = np.empty((0, 0, 0), np.float32)

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        """Choose one action per row."""
        rows = len(tree_leaves(obs)[0])
        if self._position == self._BLOCK or self._uniform.shape[1] != rows:
            self._draw(rows)
        uniform = self._uniform[self._position]
        self._position += 1
        random = uniform[:, 0] < self._epsilon(progress)
        if not random.any():
            return self._choose(obs, None), {}
        scores = uniform[:, 1:]
        if isinstance(obs, dict) and ACTION_MASK in obs:
            scores = np.where(obs[ACTION_MASK], scores, -1.0)
        anything = scores.argmax(-1)
        if random.all():
            return anything, {}
        return np.where(random, anything, self._choose(obs, None)), {}

    def _draw(self, rows: int) -> None:
        self._block_start = self._generator.get_state()
        shape = (self._BLOCK, rows, 1 + self._num_actions)
        self._uniform = torch.rand(shape, generator=self._generator).numpy()
        self._position = 0

    def reset(self, done: Array) -> None:
        """Nothing is remembered."""

    def state_dict(self) -> dict[str, Any]:
        """The generator before this block, and how much of it is used."""
        if self._position == self._BLOCK:
            return {"rng": self._generator.get_state(), "position": 0, "rows": 0}
        rows = self._uniform.shape[1]
        return {"rng": self._block_start, "position": self._position, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there again."""
        self._generator.set_state(state["rng"])
        self._position = self._BLOCK
        if state["position"]:
            self._draw(int(state["rows"]))
            self._position = int(state["position"])


class GreedyActor:
    """Takes the most likely action, or samples with a stream of its own; for evaluation."""

    def __init__(
        self,
        model: Policy,
        device: torch.device,
        sampling: torch.Generator | None = None,
    ) -> None:
        self._choose = _Chooser(model, device)
        self._sampling = sampling

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        """Choose one action per row."""
        del progress
        if self._sampling is None:
            return self._choose(obs, None), {}
        rows = len(tree_leaves(obs)[0])
        return self._choose(obs, self._choose.noise((rows,), self._sampling)), {}

    def reset(self, done: Array) -> None:
        """A feed-forward policy remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing survives an evaluation."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to bring back."""


def to_device(obs: Obs, device: torch.device) -> Any:
    """Observations as tensors where the network is."""
    if device.type == "cpu":
        return tree_map(torch.from_numpy, obs)
    return tree_map(lambda leaf: torch.from_numpy(leaf).to(device), obs)
