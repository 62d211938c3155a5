"""Episodes seeded by us, so that an environment's state is a number and the actions since."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rl_training.envs import checks
from rl_training.envs.action_masks import ActionMaskObservation, obs_form
from rl_training.envs.given import release
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.seeding import stream_seed
from rl_training.types import Array

_NEVER = 2**62
_CHUNK = 1024
"""Actions of an episode that are kept one by one before they are packed into an array."""
_RECORDED_ACTIONS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_ndarray = np.ndarray
_NO_RESULT = object()


class Restored(NamedTuple):
    """What restoring one environment gave."""

    obs: Any
    """The observation it shows; None if unknown."""
    exact: bool
    """Whether it continues bit for bit where the snapshot was taken."""
    new_episode: bool = False
    """Whether another episode was begun in place of the saved one."""


class SeededEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Seeds every episode from (seed, index, episode), records it, and can replay it.

    It also adds ``info["episode"] = {"r": return, "l": length}`` at an episode's end, and raises
    `EnvironmentFailure` where the environment raises, exits or returns what it must not.
    An environment may offer ``get_state()`` and ``set_state(state)`` (plain values and arrays);
    they then take the place of the replay, for episodes too slow to play again. What ``set_state``
    returns, if anything, is the observation to be compared with the saved one.
    Of an episode longer than ``max_recorded_steps`` nothing is recorded: a restore begins the next
    one instead.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        seed: int,
        index: int,
        max_recorded_steps: int | None = None,
    ) -> None:
        super().__init__(env)
        self._step: Callable[[Any], Any] = _refuse_step
        self._seed = seed
        self._index = index
        self._episode = -1
        self._return = 0.0
        self._length = 0
        self._name = checks.name_of(env)
        self.metadata = {**self.metadata, "rl_training/name": self._name}
        self._form = obs_form(env)
        self._float_shape = self._form.float_shape
        self._float_dtype = self._form.float_dtype
        self._has_own_state = _offers_its_state(env)
        self._can_record = not self._has_own_state and isinstance(
            env.action_space, _RECORDED_ACTIONS
        )
        self._max_recorded = _NEVER if max_recorded_steps is None else max_recorded_steps
        self._records = self._can_record
        self._chunks: list[Array] = []
        self._actions: list[Any] = []
        self._pack_at = min(_CHUNK, self._max_recorded)
        if self._can_record and max_recorded_steps is not None:
            limit = {"rl_training/max_recorded_steps": max_recorded_steps}
            self.metadata = {**self.metadata, **limit}
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
        self._chunks.clear()
        self._records = self._can_record
        self._pack_at = min(_CHUNK, self._max_recorded)
        self._step = self.env.step
        try:
            result = self.env.reset(seed=self._episode_seed(), options=options)
            obs, info = checks.unpacked_reset(result)
            obs = self._form.fitted(obs)
        except (EnvironmentFailure, UserError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an environment raises
            error = checks.misunderstanding(error, "reset") or error
            raise self._failure("failed in reset", error) from _cause(error)
        return obs, info

    def _episode_seed(self) -> int:
        # 31 bits: some environments keep the seed in an int32.
        return stream_seed(self._seed, "environment", self._index, self._episode) >> 32

    def _failure(self, doing: str, error: BaseException, note: str = "") -> EnvironmentFailure:
        if self._episode >= 0:
            doing = f"{doing} of its episode {self._episode} (seed {self._episode_seed()})"
        return checks.failure(self._index, doing, error, note, self._name)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step and record."""
        length = self._length
        if self._records:
            if length == self._pack_at:
                self._pack_actions()
            # A Box action is a view of the caller's array, which may be written again.
            self._actions.append(action.copy() if type(action) is _ndarray else action)
        result: Any = _NO_RESULT
        try:
            result = self._step(action)
            obs, reward, terminated, truncated, info = result
            if (
                type(obs) is not _ndarray
                or obs.shape != self._float_shape
                or obs.dtype is not self._float_dtype
            ):
                obs = self._form.fitted(obs)
            if not isinstance(reward, float):
                reward = checks.number(reward)
            if type(info) is not dict:
                checks.check_info(info)
            self._return += reward
            self._length = length + 1
            if terminated is not False or truncated is not False:
                terminated, truncated = checks.flags(terminated, truncated)
                if terminated or truncated:
                    # The reset that follows may write into the same array.
                    obs = obs.copy() if type(obs) is _ndarray else copy.deepcopy(obs)
                    info = {**info, "episode": {"r": float(self._return), "l": self._length}}
        except (EnvironmentFailure, UserError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an environment raises
            raise self._step_failure(length + 1, action, result, error) from _cause(error)
        return obs, reward, terminated, truncated, info

    def _step_failure(
        self, number: int, action: Any, result: Any, error: BaseException
    ) -> EnvironmentFailure:
        note = checks.step_note(action)
        if result is _NO_RESULT:
            error = checks.misunderstanding(error, "step") or error
        elif not isinstance(error, checks.WrongResult):
            try:
                checks.check_step_result(result)
            except checks.WrongResult as wrong:
                error, note = wrong, ""
        return self._failure(f"failed in step {number}", error, note)

    def _pack_actions(self) -> None:
        """Pack the newest actions into an array, or stop recording an episode that is too long."""
        if self._length >= self._max_recorded:
            self._records = False
            self._chunks.clear()
        else:
            self._chunks.append(np.asarray(self._actions))
            self._pack_at = min(self._length + _CHUNK, self._max_recorded)
        self._actions.clear()

    def close(self) -> None:
        """Close the environment."""
        release(self.env)
        try:
            super().close()
        except (EnvironmentFailure, UserError):
            raise
        except (Exception, SystemExit) as error:
            raise checks.failure(self._index, "failed in close", error, "", self._name) from error

    def is_replayable(self) -> bool:
        """Whether a snapshot holds all: no known layer keeps state from episode to episode."""
        return self._has_own_state or (self._can_record and not self._carries_over)

    def snapshot(self) -> dict[str, Any]:
        """What restores this environment: plain values and arrays."""
        state: dict[str, Any] = {
            "seed": self._seed,
            "episode": self._episode,
            "return": float(self._return),
            "length": self._length,
        }
        if self._episode < 0:
            return state
        if self._has_own_state:
            state["own"] = self._own_state("get_state")
        elif self._records:
            newest = [np.asarray(self._actions)] if self._actions or not self._chunks else []
            state["actions"] = np.concatenate([*self._chunks, *newest])
        else:
            state["unrecorded"] = True
        return state

    def restore(self, state: dict[str, Any]) -> Restored:
        """Restore a snapshot.

        It is not exact if the episode was too long to be recorded, or if the replayed episode ends
        early or earns another return: something then depends on more than its seed and actions.
        """
        self._seed = int(state["seed"])
        self._episode = int(state["episode"])
        if self._episode < 0:
            return Restored(None, exact=True)
        if "own" in state:
            self._begin()
            obs = self._own_state("set_state", state["own"])
            self._return = float(state["return"])
            self._length = int(state["length"])
            self._restore_time_limits()
            if obs is not None and isinstance(self.env, ActionMaskObservation):
                obs = self.env.with_mask(obs)
            return Restored(obs, exact=True)
        if state.get("unrecorded", False):
            return Restored(self.reset()[0], exact=False, new_episode=True)
        obs, _ = self._begin()
        actions: Array = np.asarray(state["actions"])
        for action in actions:
            obs, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                return Restored(self.reset()[0], exact=False, new_episode=True)
        return Restored(obs, exact=bool(float(self._return) == float(state["return"])))

    def _own_state(self, method: str, *given: Any) -> Any:
        try:
            return self.env.get_wrapper_attr(method)(*given)
        except (EnvironmentFailure, UserError):
            raise
        except (Exception, SystemExit) as error:
            doing = f"failed in {method}"
            raise checks.failure(self._index, doing, error, "", self._name) from error

    def _restore_time_limits(self) -> None:
        for layer in _layers(self.env):
            if isinstance(layer, TimeLimit):
                layer._elapsed_steps = self._length  # type: ignore[assignment]


def _refuse_step(action: Any) -> Any:
    raise gym.error.ResetNeeded(f"step({action!r}) was called before reset()")


def _cause(error: BaseException) -> BaseException | None:
    """What a failure is raised from: nothing where the environment raised nothing."""
    return None if isinstance(error, checks.WrongResult) else error


_RESTORED_LAYERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker, ActionMaskObservation)
"""Wrappers around an environment's own state that hold nothing, or a count that is restored."""
_CARRY_OVER = {"NormalizeObservation", "NormalizeReward"}
"""Wrappers whose state outlives an episode: replaying an episode does not restore it."""


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
        if not isinstance(layer, _RESTORED_LAYERS):
            return False
    return False
