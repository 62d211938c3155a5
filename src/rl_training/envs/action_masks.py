"""Environments with a method ``action_masks()``, as sb3-contrib's MaskablePPO uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs import checks
from rl_training.envs.hybrid_actions import HybridSpace
from rl_training.errors import ConfigError
from rl_training.registry import ALGORITHMS, find_entry
from rl_training.types import ACTION_MASK, Array

METHOD = "action_masks"
OBSERVATION = "observation"
"""Key of an observation that was not a Dict before the mask was added."""
_IGNORE = "wrappers: ['rl_training.envs.wrappers:IgnoreActionMasks']"


class ActionMaskObservation(gym.Wrapper[Any, Any, Any, Any]):
    """Adds what the method ``action_masks()`` returns to the observation, as ``action_mask``.

    A Dict observation gets one more key; any other becomes ``{"observation": ..., "action_mask":
    ...}``. After the last step of a terminated episode the method is not called: no action follows.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        actions, observations = env.action_space, env.observation_space
        if isinstance(actions, spaces.Discrete):
            self._size = int(actions.n)
        elif isinstance(actions, spaces.MultiDiscrete):
            self._size = int(actions.nvec.sum())
        elif isinstance(actions, HybridSpace) and actions.spec.nvec:
            self._size = sum(actions.spec.nvec)
        else:
            raise ConfigError(
                f"{METHOD}() works with Discrete and MultiDiscrete actions, not with {actions}. To"
                f" train without masks, set {_IGNORE}"
            )
        self.is_dict = isinstance(observations, spaces.Dict)
        """Whether the environment's own observations are a Dict."""
        entries = dict(observations.items()) if self.is_dict else {OBSERVATION: observations}  # type: ignore[attr-defined]
        self.observation_space = spaces.Dict(
            {**entries, ACTION_MASK: spaces.MultiBinary(self._size)}
        )
        self._everything = np.ones(self._size, np.int8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and add the mask."""
        obs, info = checks.unpacked_reset(self.env.reset(seed=seed, options=options))
        return self.with_mask(obs), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step, and add the mask of the next step."""
        result = self.env.step(action)
        checks.check_step_result(result)
        obs, reward, terminated, truncated, info = result
        terminated, truncated = checks.flags(terminated, truncated)
        return self.with_mask(obs, terminated), reward, terminated, truncated, info

    def with_mask(self, obs: Any, terminated: bool = False) -> Any:
        """Return an observation of the environment with the mask of the environment's state."""
        mask = self._everything if terminated else self._mask()
        if not self.is_dict:
            return {OBSERVATION: obs, ACTION_MASK: mask}
        return {**obs, ACTION_MASK: mask} if isinstance(obs, Mapping) else obs

    def _mask(self) -> Array:
        returned = self.env.get_wrapper_attr(METHOD)()
        try:
            mask = _flat(returned)
        except ValueError:  # a ragged list
            mask = np.empty(0, object)
        if mask.size != self._size or mask.dtype.kind not in "biuf":
            raise checks.WrongResult(
                f"{METHOD}() must return {self._size} values, True for each action that is allowed;"
                f" got {checks.described(returned)}"
            )
        return mask


def _flat(mask: Any) -> Array:
    if isinstance(mask, (list, tuple)):  # one mask for each component
        return np.concatenate([np.atleast_1d(np.asarray(part)) for part in mask])
    return np.asarray(mask).reshape(-1)


def obs_form(env: gym.Env[Any, Any]) -> checks.ObsForm:
    """Return the form of an environment's observations, in the words of its own space."""
    return checks.ObsForm(env.observation_space, names=_own_names(env))


def in_own_words(env: gym.Env[Any, Any], message: str) -> str:
    """Return a message on an observation without a key that was added with the mask."""
    for key, name in _own_names(env).items():
        message = message.replace(f"observation[{key!r}]", name)
    return message


def own_name(env: gym.Env[Any, Any], path: tuple[str | int, ...]) -> str:
    """Return the name of an array of an observation, without a key that was added with the mask."""
    if _own_names(env) and path[:1] == (OBSERVATION,):
        path = path[1:]
    return f"observation{''.join(f'[{key!r}]' for key in path)}"


def _own_names(env: gym.Env[Any, Any]) -> dict[str, str]:
    if isinstance(env, ActionMaskObservation) and not env.is_dict:
        return {OBSERVATION: "the observation"}
    return {}


def masks_of(env: gym.Env[Any, Any]) -> bool:
    """Return whether an environment, or a wrapper of it, has a method ``action_masks()``.

    One whose observations contain a mask already has no need of it.
    """
    space = env.observation_space
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        return False
    return env.has_wrapper_attr(METHOD) and callable(env.get_wrapper_attr(METHOD))


def with_action_masks(env: gym.Env[Any, Any], algo: str) -> gym.Env[Any, Any]:
    """Return the environment with its masks in its observations, where it has ``action_masks()``.

    Raises `ConfigError` where the algorithm or the action space cannot be masked.
    """
    if not masks_of(env):
        return env
    if not find_entry(algo).masks:
        can = ", ".join(name for name, entry in ALGORITHMS.items() if entry.masks)
        raise ConfigError(
            f"it has a method {METHOD}(), and {algo} does not support action masks; {can} do. To"
            f" train without masks, set {_IGNORE}"
        )
    return ActionMaskObservation(env)
