"""Episodes seeded by us, so that an environment's state is a number and the actions since."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rl_training.seeding import stream_seed
from rl_training.types import Array


class SeededEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Seeds every episode from (seed, index, episode), records it, and can replay it.

    It also adds ``info["episode"] = {"r": return, "l": length}`` at an episode's end.
    An environment may offer ``get_state()`` and ``set_state(state)`` (plain values and arrays);
    they then take the place of the replay, for episodes too slow to play again. What ``set_state``
    returns, if anything, is the observation to be compared with the saved one.
    """

    def __init__(self, env: gym.Env[Any, Any], seed: int, index: int) -> None:
        super().__init__(env)
        self._seed = seed
        self._index = index
        self._episode = -1
        self._return = 0.0
        self._length = 0
        self._actions: list[Any] = []
        self._has_own_state = _offers_its_state(env)
        # What seeds itself only now and then cannot be replayed from an episode's seed.
        self._carries_over = any(
            type(layer).__name__ in _CARRY_OVER or hasattr(type(layer), "on_reseed")
            for layer in _layers(env)
        )

    def reseed(self, seed: int) -> None:
        """Start the sequence of episodes of ``seed`` at the next reset."""
        self._seed = seed
        self._episode = -1
        for layer in _layers(self.env):
            if hasattr(type(layer), "on_reseed"):
                layer.on_reseed()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode; an explicit ``seed`` starts a new sequence of them."""
        if seed is not None:
            self.reseed(seed)
        self._episode += 1
        return self._begin(options)

    def _begin(self, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._return = 0.0
        self._length = 0
        self._actions.clear()
        # 31 bits: some environments keep the seed in an int32.
        episode_seed = stream_seed(self._seed, "environment", self._index, self._episode) >> 32
        return self.env.reset(seed=episode_seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step and record."""
        if not self._has_own_state:
            # A Box action is a view of the caller's array, which may be written again.
            self._actions.append(action.copy() if isinstance(action, np.ndarray) else action)
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += reward  # type: ignore[operator]
        self._length += 1
        if terminated or truncated:
            # The reset that follows may write into the same array.
            obs = copy.deepcopy(obs)
            info = {**info, "episode": {"r": float(self._return), "l": self._length}}
        return obs, reward, terminated, truncated, info

    def is_replayable(self) -> bool:
        """Whether a snapshot holds all: no known layer keeps state from episode to episode."""
        return self._has_own_state or not self._carries_over

    def snapshot(self) -> dict[str, Any]:
        """What brings this environment back: plain values and arrays."""
        state: dict[str, Any] = {
            "seed": self._seed,
            "episode": self._episode,
            "return": float(self._return),
            "length": self._length,
        }
        if self._episode < 0:
            return state
        if self._has_own_state:
            state["own"] = self.env.get_wrapper_attr("get_state")()
        else:
            state["actions"] = np.asarray(self._actions)
        return state

    def restore(self, state: dict[str, Any]) -> tuple[Any, bool]:
        """Bring a snapshot back: the observation (None if unknown), and whether it is exact.

        It is not if the replayed episode ends early or earns another return: something then
        depends on more than the episode's seed and actions.
        """
        self._seed = int(state["seed"])
        self._episode = int(state["episode"])
        if self._episode < 0:
            return None, True
        obs, _ = self._begin()
        if "own" in state:
            obs = self.env.get_wrapper_attr("set_state")(state["own"])
            self._return = float(state["return"])
            self._length = int(state["length"])
            self._restore_time_limits()
            return obs, True
        actions: Array = np.asarray(state["actions"])
        for action in actions:
            obs, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                return self.reset()[0], False
        return obs, bool(float(self._return) == float(state["return"]))

    def _restore_time_limits(self) -> None:
        for layer in _layers(self.env):
            if isinstance(layer, TimeLimit):
                layer._elapsed_steps = self._length  # type: ignore[assignment]


_CARRY_OVER = {"NormalizeObservation", "NormalizeReward"}
"""Wrappers whose state outlives an episode: replaying one does not bring them back."""


def _layers(env: Any) -> Iterator[Any]:
    """The environment and its wrappers, outermost first."""
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env


def _offers_its_state(env: Any) -> bool:
    """Whether ``get_state`` and ``set_state`` are there, under wrappers we can restore alone."""
    for layer in _layers(env):
        if hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state"):
            return True
        if not isinstance(layer, (TimeLimit, OrderEnforcing, PassiveEnvChecker)):
            return False
    return False
