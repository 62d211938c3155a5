"""Whether an environment limits the length of its episodes, and how to set a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

_HAS_LIMIT = "rl_training/has_time_limit"
_REGISTERED = "rl_training/registered"
_WHOLE_GAMES = "rl_training/whole_games"


def has_time_limit(env: gym.Env[Any, Any]) -> bool:
    """Return whether a limit is known: a TimeLimit wrapper, or the frame limit of an Atari game."""
    while isinstance(env, gym.Wrapper):
        if "TimeLimit" in type(env).__name__:
            return True
        env = env.env
    return env.spec is not None and "game" in env.spec.kwargs


def limit_metadata(env: gym.Env[Any, Any], *, registered: bool) -> dict[str, Any]:
    """Return the metadata that `vector_has_time_limit` and `vector_advice` read."""
    return {_HAS_LIMIT: has_time_limit(env), _REGISTERED: registered}


def vector_has_time_limit(env: VectorEnv[Any, Any, Any]) -> bool:
    """Return whether a limit of the episodes of a vector is known."""
    metadata: Mapping[str, Any] = env.metadata
    if metadata.get(_WHOLE_GAMES, False) or metadata.get(_HAS_LIMIT, False):
        return True
    spec = None if _HAS_LIMIT in metadata else env.spec  # a native vector applies its spec's limit
    return getattr(spec, "max_episode_steps", None) is not None


def vector_advice(env: VectorEnv[Any, Any, Any]) -> str:
    """Return the setting that limits the episodes of a vector."""
    return limit_advice(registered=bool(env.metadata.get(_REGISTERED, True)))


def limit_advice(*, registered: bool) -> str:
    """Return the setting that limits episodes of an environment, by its id or by ``env_fn``."""
    if registered:
        return "env_kwargs: {max_episode_steps: 1000}"
    return "wrappers: [{path: 'gymnasium.wrappers:TimeLimit', kwargs: {max_episode_steps: 1000}}]"
