"""The interface of a vector environment on a device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rl_training.types import ActionSpec, ObsSpec


class DeviceStep(NamedTuple):
    """One step of all environments; every tensor is on their device, a row for each."""

    obs: Any
    """The next observations, a tensor or a dict of tensors; of ended episodes, of the reset."""
    final_obs: Any
    """The true next observations of all environments; None where they are not offered."""
    reward: Tensor
    terminated: Tensor
    """Boolean."""
    truncated: Tensor
    """Boolean; where both are true, the step counts as terminated."""


class DeviceEnv(Protocol):
    """Environments that are stepped together, without copies to the host.

    They reset within the step that ends an episode (SAME_STEP). ``reset`` and ``step`` must not
    wait for the device (no ``.item()``, no copy to the host, no shape that depends on values).
    Observations have the shapes and dtypes of ``obs_spec``. Actions are those of the environment:
    within the bounds of a Box, counted from ``start`` of a Discrete space.

    Optional: ``state_dict() -> dict`` and ``load_state_dict(state)``, tensors and plain values that
    restore everything bit for bit; without them a resume begins new episodes. ``capturable = True``
    states that a step can be part of a CUDA graph: it changes its tensors in place and depends on
    no other state. ``close()``; ``name``.
    """

    num_envs: int
    device: torch.device
    obs_spec: ObsSpec
    action_spec: ActionSpec

    def reset(self, seed: int) -> Any:
        """Begin the first episode of every environment; return observations.

        Everything random from here on follows from ``seed`` (63 bits).
        """
        ...

    def step(self, action: Tensor) -> DeviceStep:
        """Step every environment."""
        ...
