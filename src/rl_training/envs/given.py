"""Environments that the user made: each may be stepped in one place at a time."""

from __future__ import annotations

import weakref
from typing import Any

import gymnasium as gym

from rl_training.errors import ConfigError

_IN_USE: weakref.WeakValueDictionary[int, gym.Env[Any, Any]] = weakref.WeakValueDictionary()
"""Environments that are being stepped, without their wrappers, by identity."""


def claim(env: gym.Env[Any, Any]) -> None:
    """Mark an environment as in use; raises `ConfigError` where it already is."""
    base = env.unwrapped
    if is_in_use(env):
        raise ConfigError(
            f"'env_fn' returned a {type(base).__name__} that is already in use: it must make a new"
            " environment with every call, as in env_fn=lambda: MyEnv()"
        )
    _IN_USE[id(base)] = base


def is_in_use(env: gym.Env[Any, Any]) -> bool:
    """Return whether an environment was claimed and not released."""
    return _IN_USE.get(id(env.unwrapped)) is env.unwrapped


def release(env: gym.Env[Any, Any]) -> None:
    """Mark an environment as free."""
    if is_in_use(env):
        del _IN_USE[id(env.unwrapped)]


class KeptOpen(gym.Wrapper[Any, Any, Any, Any]):
    """The user's own environment, which only the user closes."""

    def close(self) -> None:
        """Leave it open."""


class GivenEnvironment:
    """Makes environments from one: itself first, then copies from its spec."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env

    @property
    def name(self) -> str:
        """The id of the environment, or the name of its class."""
        return self.env.spec.id if self.env.spec else type(self.env.unwrapped).__name__

    @property
    def can_be_copied(self) -> bool:
        """Whether it has a spec from which it can be made again with all its wrappers."""
        spec = self.env.spec
        return spec is not None and all(
            wrapper.kwargs is not None for wrapper in spec.additional_wrappers
        )

    def __call__(self) -> gym.Env[Any, Any]:
        """Return the environment itself if it is free, else a copy."""
        if not is_in_use(self.env):
            return KeptOpen(self.env)
        if self.env.spec is None or not self.can_be_copied:
            raise ConfigError(
                f"{self.name} has no spec to make a second one from, with its wrappers: give"
                " env_fn=lambda: ... instead of an environment"
            )
        return gym.make(self.env.spec)
