"""Actors of recurrent policies, with the recurrent state of every environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.errors import ConfigError
from rl_training.models.action_heads import ActionHead
from rl_training.models.recurrent.lstm import NumpyActor
from rl_training.runtime.actors import BLOCK, NoiseBlock, random_choice, uniform_actions
from rl_training.types import Array, Obs, Progress


class RecurrentPolicy(Protocol):
    """The interface of a model that these actors use."""

    head: ActionHead
    state_size: int

    def policy_step(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return distribution parameters, the action mask and the next states."""
        ...

    def act(
        self, obs: Any, state: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return actions, next states, and further values for the rollout."""
        ...

    def numpy_actor(self) -> NumpyActor | None:
        """Return the same function in NumPy, if the model has one."""
        ...


class _Memory:
    """Runs a recurrent policy in NumPy or torch, and holds its recurrent state.

    ``state`` is replaced, never changed in place, so that callers may keep a reference.
    """

    def __init__(self, model: RecurrentPolicy, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._by_torch = False
        self._numpy = model.numpy_actor()
        self.state: Any = None
        self._before: Any = None
        """The state before the last step."""

    def enable_evaluation(self) -> None:
        """Compute log-probabilities and values with every action, which needs torch."""
        self._by_torch = True
        self._numpy = None

    def refresh(self) -> None:
        """Update what was copied from the model: a Gaussian's deviation, a normaliser."""
        self._numpy = None if self._by_torch else self._model.numpy_actor()

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        """Return noise for a block of actions, on the device where it is used."""
        noise = self._model.head.draw_noise(shape, generator)
        return noise.numpy() if self._numpy is not None else noise.to(self._device)

    def before(self, rows: int) -> Any:
        """Return the current state, zeros before the first step."""
        if self.state is None or len(self.state) != rows:
            self.set(np.zeros((rows, self._model.state_size), np.float32))
        return self.state

    def set(self, state: Any) -> None:
        """Replace the state."""
        tensor = torch.as_tensor(state, dtype=torch.float32)
        self.state = tensor.cpu().numpy() if self._numpy is not None else tensor.to(self._device)

    def forget(self, done: Array) -> None:
        """Set the state to zero where ``done``: the episode ended."""
        if self.state is None:
            return
        if isinstance(self.state, Tensor):
            keep = torch.from_numpy(~done).to(self._device)
            self.state = torch.where(keep.unsqueeze(1), self.state, 0.0)
        else:
            self.state = np.where(done[:, None], np.float32(0), self.state)

    def hold(self, rows: Array) -> None:
        """Set the state of ``rows`` to what it was before the last step."""
        if isinstance(self.state, Tensor):
            held = torch.from_numpy(rows).to(self._device)
            self.state = torch.where(held.unsqueeze(1), self._before, self.state)
        else:
            self.state = np.where(rows[:, None], self._before, self.state)

    @torch.no_grad()
    def step(self, obs: Obs, noise: Any) -> tuple[Array, dict[str, Any]]:
        """Return actions, and a record with the states before and after the step."""
        self._before = before = self.before(len(tree_leaves(obs)[0]))
        kept: dict[str, Any] = {}
        actions: Any
        if self._numpy is not None and not isinstance(obs, dict):
            actions, self.state = self._numpy(obs, before, noise)
        else:
            shown: Any = tree_map(lambda leaf: torch.from_numpy(leaf).to(self._device), obs)
            actions, self.state, record = self._model.act(shown, before, noise)
            actions = actions.cpu().numpy()
            kept = {**record, "obs": shown} if self._device.type != "cpu" else dict(record)
        return actions, {**kept, "state": before, "next_state": self.state}

    def state_dict(self) -> dict[str, Any]:
        """Return the recurrent state."""
        return {"state": None if self.state is None else torch.as_tensor(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the recurrent state."""
        self.state = None
        if state["state"] is not None:
            self.set(state["state"])


class _NoisyRecurrentActor:
    """Base of exploring actors, whose state is their noise and recurrent state."""

    _noise: NoiseBlock
    memory: _Memory

    def reset(self, done: Array) -> None:
        """Set the recurrent state of ended episodes to zero."""
        self.memory.forget(done)

    def hold(self, rows: Array) -> None:
        """Set the recurrent state of ``rows`` to what it was before the last action."""
        self.memory.hold(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the noise and the recurrent states."""
        return {"noise": self._noise.state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._noise.load_state_dict(state["noise"])
        self.memory.load_state_dict(state["memory"])


class RecurrentPolicyActor(_NoisyRecurrentActor):
    """Samples from a policy that does not change within a block, which is one rollout."""

    def __init__(
        self, model: RecurrentPolicy, block: int, generator: torch.Generator, device: torch.device
    ) -> None:
        self.memory = _Memory(model, device)
        self._noise = NoiseBlock(block, generator, self._draw)

    def record(self, names: frozenset[str]) -> None:
        """Record these ("logprobs", "values") with every step from now on."""
        if unknown := names - {"logprobs", "values"}:
            raise ConfigError(f"an actor cannot record {', '.join(sorted(unknown))}")
        self.memory.enable_evaluation()

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Sample one action per environment."""
        del progress
        return self.memory.step(obs, self._noise.take(len(tree_leaves(obs)[0])))

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        self.memory.refresh()
        return self.memory.noise(shape, generator)


class RecurrentEpsilonGreedyActor(_NoisyRecurrentActor):
    """Takes a random legal action with probability epsilon(progress), else the greedy one.

    The network is run on every observation, since the recurrent state depends on all of them.
    """

    def __init__(
        self,
        model: RecurrentPolicy,
        epsilon: Callable[[Progress], float],
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        numbers = 1 + model.head.param_size
        self.model = model
        self.epsilon = epsilon
        self.memory = _Memory(model, device)
        self._noise = NoiseBlock(
            BLOCK,
            generator,
            lambda shape, source: torch.rand((*shape, numbers), generator=source).numpy(),
        )

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row; the state before it is recorded for the replay."""
        uniform = self._noise.take(len(tree_leaves(obs)[0]))
        greedy, record = self.memory.step(obs, None)
        random = uniform[:, 0] < self.epsilon(progress)
        anything = random_choice(obs, uniform[:, 1:])
        return np.where(random, anything, greedy), {"state": record["state"]}


class RecurrentExploringActor(_NoisyRecurrentActor):
    """Takes uniform actions in [-1, 1] for ``warm_up`` steps, then the policy's with its noise.

    The network is run on every observation, since the recurrent state depends on all of them.
    """

    def __init__(
        self,
        model: RecurrentPolicy,
        warm_up: int,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self.memory = _Memory(model, device)
        self._warm_up = warm_up
        self._noise = NoiseBlock(BLOCK, generator, self.memory.noise)

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row; the state before it is recorded for the replay."""
        noise = self._noise.take(len(tree_leaves(obs)[0]))
        actions, record = self.memory.step(obs, noise)
        if progress.step < self._warm_up:
            actions = uniform_actions(noise)
        return actions, {"state": record["state"]}


class RecurrentEvaluationActor:
    """Takes the most likely action, or samples with a given generator; for evaluation."""

    def __init__(
        self,
        model: RecurrentPolicy,
        device: torch.device,
        sampling: torch.Generator | None = None,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.memory = _Memory(model, device)

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row."""
        del progress
        rows = len(tree_leaves(obs)[0])
        noise = None
        if self.sampling is not None:
            noise = self.memory.noise((rows,), self.sampling)
        return self.memory.step(obs, noise)

    def reset(self, done: Array) -> None:
        """Set the recurrent state of ended episodes to zero."""
        self.memory.forget(done)

    def hold(self, rows: Array) -> None:
        """Set the recurrent state of ``rows`` to what it was before the last action."""
        self.memory.hold(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state to restore."""
