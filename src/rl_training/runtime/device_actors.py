"""Actors of environments on the device: pure functions of tensors, which a CUDA graph may contain.

Those of environments on the host are in `rl_training.runtime.actors`; each chooses from its noise
what the one here chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_training.runtime.actors import EvaluatingPolicy, Policy
from rl_training.types import ACTION_MASK, Progress

_NOISE_ROWS = 2**18
_MOST_STEPS = 256


def noise_steps(num_envs: int) -> int:
    """Return how many steps noise is drawn for at once, where the policy may change at any step."""
    return max(1, min(_MOST_STEPS, _NOISE_ROWS // num_envs))


class DeviceActor(Protocol):
    """Chooses actions from noise that is drawn beforehand, without waiting for the device."""

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return noise for a block of ``shape`` actions, on the generator's device."""
        ...

    def prepare(self, progress: Progress) -> None:
        """Set what depends on progress, on the device; called before steps are collected."""
        ...

    def __call__(self, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return actions, and what the buffer must store with them."""
        ...


class PolicyDeviceActor:
    """Samples from a policy; of images it also returns their evaluation, which is the work."""

    def __init__(self, model: EvaluatingPolicy) -> None:
        self._model = model
        self.draw_noise = model.head.draw_noise

    @classmethod
    def of(cls, learner: Any, config: Any) -> PolicyDeviceActor:
        """Return the actor of an on-policy learner."""
        del config
        return cls(learner.model)

    def prepare(self, progress: Progress) -> None:
        """Do nothing: it explores in the same way at all times."""

    def __call__(self, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return actions, and for images their log-probabilities and values."""
        model = self._model
        if model.sees_images:
            action, logprobs, values = model.act(obs, noise)
            return action, {"logprobs": logprobs, "values": values}
        params, mask = model.policy(obs)
        return model.head.sample(params, noise, mask), {}


class ExploringDeviceActor:
    """Takes uniform actions in [-1, 1] for ``warm_up`` steps, then the policy's with its noise."""

    def __init__(self, model: Policy, warm_up: int) -> None:
        self._model, self._warm_up = model, warm_up
        self.draw_noise = model.head.draw_noise
        self._explores = torch.zeros((), dtype=torch.bool, device=_device_of(model))

    def prepare(self, progress: Progress) -> None:
        """Set whether the next actions are uniform."""
        self._explores.fill_(progress.step < self._warm_up)

    def __call__(self, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return actions."""
        params, mask = self._model.policy(obs)
        chosen = self._model.head.sample(params, noise, mask)
        return torch.where(self._explores, torch.erf(noise / math.sqrt(2)), chosen), {}


class EpsilonGreedyDeviceActor:
    """Takes a random legal action with probability epsilon(progress), else the greedy one."""

    def __init__(self, model: Policy, epsilon: Callable[[Progress], float]) -> None:
        self._model, self._of = model, epsilon
        self._numbers = 1 + model.head.param_size
        self._epsilon = torch.zeros((), device=_device_of(model))

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return uniform numbers: one to decide, and one for each action."""
        numbers = (*shape, self._numbers)
        return torch.rand(numbers, generator=generator, device=generator.device)

    def prepare(self, progress: Progress) -> None:
        """Set epsilon."""
        self._epsilon.fill_(self._of(progress))

    def __call__(self, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return actions."""
        params, mask = self._model.policy(obs)
        uniform = noise[:, 1:]
        if isinstance(obs, dict) and ACTION_MASK in obs:
            uniform = torch.where(obs[ACTION_MASK], uniform, -1.0)
        greedy = self._model.head.mode(params, mask)
        return torch.where(noise[:, 0] < self._epsilon, uniform.argmax(-1), greedy), {}


def _device_of(model: Any) -> torch.device:
    return next(model.parameters()).device  # type: ignore[no-any-return]
