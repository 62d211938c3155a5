"""Device environments by the id of the Gymnasium environment that they equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from rl_training._internal.lazy import resolve
from rl_training.device_envs.protocol import DeviceEnv
from rl_training.errors import ConfigError, did_you_mean

DeviceEnvFn: TypeAlias = Callable[..., Any]
"""Takes the number of environments and the device, and returns a `DeviceEnv`."""

_CLASSIC = "rl_training.device_envs.classic"
_TABLE: dict[str, str | DeviceEnvFn] = {
    "CartPole-v1": f"{_CLASSIC}:CartPole",
    "Pendulum-v1": f"{_CLASSIC}:Pendulum",
    "Acrobot-v1": f"{_CLASSIC}:Acrobot",
    "MountainCar-v0": f"{_CLASSIC}:MountainCar",
    "MountainCarContinuous-v0": f"{_CLASSIC}:MountainCarContinuous",
}


def register_device_env(env_id: str, make: DeviceEnvFn) -> None:
    """Make ``vectorization: device`` use ``make(num_envs, device, **env_kwargs)`` for an id.

    The policy is evaluated on the Gymnasium environment of that id, which must be registered.
    """
    _TABLE[env_id] = make


def device_env_ids() -> list[str]:
    """Return the ids of all environments that there are on a device."""
    return list(_TABLE)


def make_device_env(
    env_id: str, num_envs: int, device: torch.device | str = "cpu", **env_kwargs: Any
) -> DeviceEnv:
    """Return the device environments of an id; raises `ConfigError` if there are none."""
    found = _TABLE.get(env_id)
    if found is None:
        raise ConfigError(
            f"no environment {env_id!r} on a device.{did_you_mean(env_id, device_env_ids())} Use"
            " vectorization: sync, or give device_env_fn=... in Python"
        )
    make: DeviceEnvFn = resolve(found) if isinstance(found, str) else found
    try:
        env: DeviceEnv = make(num_envs, torch.device(device), **env_kwargs)
    except TypeError as error:
        given = f" with env_kwargs {env_kwargs}" if env_kwargs else ""
        raise ConfigError(f"cannot make {env_id} on a device{given}: {error}") from error
    return env
