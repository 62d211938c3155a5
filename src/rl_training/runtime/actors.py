"""Actors choose actions; exploration and its random numbers are part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.algorithms.acceleration import Acceleration, CudaGraph, accelerate, graphed
from rl_training.errors import ConfigError
from rl_training.models.action_heads import ActionHead
from rl_training.seeding import restore_generator
from rl_training.types import ACTION_MASK, Array, Obs, Progress, VectorStep


class Actor(Protocol):
    """The interface that collection and evaluation use."""

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Return actions, and further values that the buffer must store before the next call."""
        ...

    def reset(self, done: Array) -> None:
        """Reset the state of environments whose episode ended (``done``)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        ...


@runtime_checkable
class HoldingActor(Protocol):
    """An actor whose rows have recurrent states that may have to stay as they were."""

    def hold(self, rows: Array) -> None:
        """Set the recurrent state of ``rows`` to what it was before the last action."""
        ...


def after_step(actor: Actor, step: VectorStep) -> None:
    """Reset the state of rows whose episode ended; rows that did not act keep theirs."""
    if step.held is not None and isinstance(actor, HoldingActor):
        actor.hold(step.held)
    # Not only where an episode is counted: a lost life ends the agent's own.
    cut = step.cut
    if cut.any():
        actor.reset(cut)


class Policy(Protocol):
    """The interface of a model that an actor uses."""

    head: ActionHead
    sees_images: bool

    def policy(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Return distribution parameters and the action mask."""
        ...

    def numpy_actor(self) -> Callable[[Array, Array | None], Array] | None:
        """Return a NumPy function from observations and noise to actions, if the model has one."""
        ...


class EvaluatingPolicy(Policy, Protocol):
    """A policy with a value function, which may share its network."""

    def act(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, their log-probabilities, and values."""
        ...

    def evaluate_actions(self, obs: Any, actions: Tensor) -> Any:
        """Return an `Evaluation` of actions."""
        ...


def noise_size(model: Any) -> int:
    """Return how many numbers of noise a row of a model's network takes; 0: none."""
    return getattr(model, "noise_size", 0)


class _Chooser:
    """Chooses actions with the current weights of a model, in NumPy or torch."""

    def __init__(
        self, model: Policy, device: torch.device, acceleration: Acceleration = "eager"
    ) -> None:
        self._model = model
        self._device = device
        self._numpy = model.numpy_actor()
        # A CUDA graph copies its inputs from the host.
        self._moves_inputs = device.type != "cpu" and acceleration != "cudagraph"
        # Compiling is worth it only for more than a few small layers.
        forward = accelerate(self._forward, acceleration if model.sees_images else "eager")
        self._by_torch = graphed(forward, acceleration, device, copies=False)
        self._greedy_by_torch = graphed(forward, acceleration, device, copies=False)

    def refresh(self) -> None:
        """Update what was copied from the model: a Gaussian's deviation, a normaliser."""
        self._numpy = self._model.numpy_actor()

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        """Return noise for a block of actions, on the device where it is used."""
        noise = self._model.head.draw_noise(shape, generator)
        if self._numpy is not None:
            return noise.numpy()
        return noise.to(self._device) if self._moves_inputs else noise

    def sent(self, obs: Obs) -> Any:
        """Return observations on the accelerator, without waiting for the copy.

        Each array is copied from separate pinned memory, which torch reuses only after the copy.
        """
        pinned = self._device.type == "cuda"

        def send(leaf: Array) -> Tensor:
            tensor = torch.from_numpy(leaf)
            return (tensor.pin_memory() if pinned else tensor).to(self._device, non_blocking=True)

        return tree_map(send, obs)

    def __call__(self, obs: Any, noise: Any) -> Array:
        """Return the actions that ``noise`` selects; without noise the most likely ones."""
        if self._numpy is not None:
            return self._numpy(obs, noise)
        tensors: Any = tree_map(torch.as_tensor, obs)
        if self._moves_inputs:
            tensors = tree_map(lambda leaf: leaf.to(self._device), tensors)
        if noise is None:
            return self._greedy_by_torch(tensors).cpu().numpy()
        noise = torch.as_tensor(noise)
        if self._moves_inputs:
            noise = noise.to(self._device)
        return self._by_torch(tensors, noise).cpu().numpy()

    @torch.no_grad()
    def _forward(self, obs: Any, noise: Tensor | None = None) -> Tensor:
        head = self._model.head
        if noise is not None and noise_size(self._model):
            model: Any = self._model
            return head.mode(*model.policy(obs, noise))
        params, mask = self._model.policy(obs)
        return head.mode(params, mask) if noise is None else head.sample(params, noise, mask)


class NoiseBlock:
    """Noise that is drawn for a block of steps at a time and read step by step."""

    def __init__(self, length: int, generator: torch.Generator, draw: Callable[..., Any]) -> None:
        self._length = length
        self._generator = generator
        self._draw = draw
        self._position = length
        self._rows = 0
        self._start = generator.get_state()
        self._noise: Any = None

    def take(self, rows: int) -> Any:
        """Return the noise of the next step for ``rows`` rows."""
        if self._position == self._length or self._rows != rows:
            self._refill(rows)
        noise = self._noise[self._position]
        self._position += 1
        return noise

    def take_block(self, rows: int) -> Any:
        """Return the noise of a whole block of steps, none of which may be in use."""
        if self._position != self._length:
            raise RuntimeError("a block of noise is in use")
        self._refill(rows)
        self._position = self._length
        return self._noise

    def _refill(self, rows: int) -> None:
        self._start = self._generator.get_state()
        self._noise = self._draw((self._length, rows), self._generator)
        self._rows, self._position = rows, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state before this block, and the position in the block."""
        if self._position == self._length:
            return {"rng": self._generator.get_state(), "position": 0, "rows": 0}
        return {"rng": self._start, "position": self._position, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        restore_generator(self._generator, state["rng"])
        self._position = self._length
        if state["position"]:
            self._refill(int(state["rows"]))
            self._position = int(state["position"])


class _NoisyActor:
    """Base of exploring actors, whose state is their noise."""

    _noise: NoiseBlock

    def reset(self, done: Array) -> None:
        """Do nothing: a feed-forward policy has no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the noise."""
        return self._noise.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._noise.load_state_dict(state)


BLOCK = 256
"""Steps of noise drawn at once if the policy may change at any step."""


class PolicyActor(_NoisyActor):
    """Samples from a policy that does not change within a block, which is one rollout."""

    def __init__(
        self,
        model: EvaluatingPolicy,
        block: int,
        generator: torch.Generator,
        device: torch.device,
        acceleration: Acceleration = "eager",
    ) -> None:
        self._model = model
        self._device = device
        self._records: frozenset[str] = frozenset()
        self._choose = _Chooser(model, device, acceleration)
        self._noise = NoiseBlock(block, generator, self._draw)
        self._on_accelerator = device.type != "cpu"
        self._sees_images = model.sees_images
        act = torch.no_grad()(accelerate(model.act, acceleration))
        self._evaluate = graphed(act, acceleration, device, copies=False)

    def record(self, names: frozenset[str]) -> None:
        """Record these ("logprobs", "values") with every step from now on."""
        if unknown := names - {"logprobs", "values"}:
            raise ConfigError(f"an actor cannot record {', '.join(sorted(unknown))}")
        self._records = names

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Sample one action per environment.

        Also return the record of the step: what `record` requested, observations that were copied
        to an accelerator and, for images, log-probabilities and values.
        """
        del progress
        noise = self._noise.take(len(tree_leaves(obs)[0]))
        if not self._sees_images:
            if not self._on_accelerator:
                actions = self._choose(obs, noise)
                return actions, self._recorded(obs, actions) if self._records else {}
            sent = self._choose.sent(obs)
            actions = self._choose(sent, noise)
            recorded = self._recorded(sent, actions) if self._records else {}
            return actions, {"obs": sent, **recorded}
        evaluate: Any = self._evaluate
        is_graph = isinstance(evaluate, CudaGraph)  # copies its inputs from the host
        sends = self._on_accelerator and not is_graph
        shown: Any = self._choose.sent(obs) if sends else tree_map(torch.from_numpy, obs)
        actions, logprobs, values = evaluate(shown, noise)
        record = {"logprobs": logprobs, "values": values}
        if self._on_accelerator:
            record["obs"] = evaluate.inputs[0] if is_graph else shown
        return actions.cpu().numpy(), record

    @torch.no_grad()
    def _recorded(self, obs: Any, actions: Array) -> dict[str, Tensor]:
        """Return the log-probabilities and values that were requested."""
        shown = tree_map(torch.as_tensor, obs)
        taken = torch.as_tensor(actions).to(self._device)
        evaluation = self._model.evaluate_actions(shown, taken)
        found = {"logprobs": evaluation.logprob, "values": evaluation.value}
        return {name: found[name] for name in sorted(self._records)}

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        self._choose.refresh()
        return self._choose.noise(shape, generator)


def random_choice(obs: Obs, numbers: Array) -> Array:
    """Return a legal action per row, from an independent random number for each action."""
    if isinstance(obs, dict) and ACTION_MASK in obs:
        numbers = np.where(obs[ACTION_MASK], numbers, -np.inf)
    chosen: Array = numbers.argmax(-1)
    return chosen


class ExploringActor(_NoisyActor):
    """Takes uniform actions for ``warm_up`` steps, then the policy's with its noise.

    Both use the same noise. Normal numbers z become actions in [-1, 1]: 2 Phi(z) - 1 =
    erf(z / sqrt 2) is uniform. Of discrete actions the legal one with the largest number is taken.
    """

    def __init__(
        self,
        model: Policy,
        warm_up: int,
        generator: torch.Generator,
        device: torch.device,
        acceleration: Acceleration = "eager",
    ) -> None:
        self._choose = _Chooser(model, device, acceleration)
        self._warm_up = warm_up
        self._normal = model.head.noise_source == "normal"
        self._noise = NoiseBlock(BLOCK, generator, self._choose.noise)

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row."""
        noise = self._noise.take(len(tree_leaves(obs)[0]))
        if progress.step >= self._warm_up:
            return self._choose(obs, noise), {}
        if self._normal:
            return uniform_actions(noise), {}
        return random_choice(obs, torch.as_tensor(noise).cpu().numpy()), {}


def uniform_actions(noise: Any) -> Array:
    """Return uniform actions in [-1, 1] from normal noise z: erf(z / sqrt 2)."""
    actions: Array = torch.erf(torch.as_tensor(noise) / math.sqrt(2)).cpu().numpy()
    return actions


class EpsilonGreedyActor(_NoisyActor):
    """Takes a random legal action with probability epsilon(progress), else the greedy one.

    The greedy action of a noisy network is that with noise in its weights, new at every step and
    another for each row, unless ``perturbed`` is False.
    """

    def __init__(
        self,
        model: Policy,
        epsilon: Callable[[Progress], float],
        generator: torch.Generator,
        device: torch.device,
        acceleration: Acceleration = "eager",
        *,
        perturbed: bool = True,
    ) -> None:
        self.model = model
        self.epsilon = epsilon
        self._numbers = 1 + model.head.param_size
        self._noise_size = noise_size(model) if perturbed else 0
        self._choose = _Chooser(model, device, acceleration)
        self._noise = NoiseBlock(BLOCK, generator, self._draw)

    def _draw(self, shape: tuple[int, ...], source: torch.Generator) -> Array:
        """Return uniform numbers, and after them the normal ones of the network."""
        uniform = torch.rand((*shape, self._numbers), generator=source)
        if not self._noise_size:
            return uniform.numpy()
        normal = torch.randn((*shape, self._noise_size), generator=source)
        return torch.cat((uniform, normal), -1).numpy()

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row."""
        numbers = self._noise.take(len(tree_leaves(obs)[0]))
        uniform = numbers[:, : self._numbers]
        noise = numbers[:, self._numbers :] if self._noise_size else None
        random = uniform[:, 0] < self.epsilon(progress)
        if not random.any():
            return self._choose(obs, noise), {}
        anything = random_choice(obs, uniform[:, 1:])
        if random.all():
            return anything, {}
        return np.where(random, anything, self._choose(obs, noise)), {}


class EvaluationActor:
    """Takes the most likely action, or samples with a given generator; for evaluation."""

    def __init__(
        self,
        model: Policy,
        device: torch.device,
        sampling: torch.Generator | None = None,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self._choose = _Chooser(model, device)

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Any]]:
        """Choose one action per row."""
        del progress
        if self.sampling is None:
            return self._choose(obs, None), {}
        rows = len(tree_leaves(obs)[0])
        return self._choose(obs, self._choose.noise((rows,), self.sampling)), {}

    def reset(self, done: Array) -> None:
        """Do nothing: a feed-forward policy has no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state to restore."""
