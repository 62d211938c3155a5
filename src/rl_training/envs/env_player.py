"""Random play of one environment, with checks of everything that it returns."""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from rl_training._internal.tree import tree_leaves
from rl_training.envs import checks, spaces
from rl_training.envs.action_masks import in_own_words, obs_form, own_name
from rl_training.envs.env_report import Played, Severity
from rl_training.terminal import say
from rl_training.types import ACTION_MASK, Episode, ObsSpec, OutsideSpaceError

MAX_SECONDS = 15.0
"""Time after which a slow environment is played no further."""
_SLOW_AFTER = 2.0
"""Time after which a line on standard error names an environment as slow."""


class AddFinding(Protocol):
    """Adds a finding to a report."""

    def __call__(
        self, severity: Severity, check: str, expected: str, found: str = "", advice: str = ""
    ) -> None:
        """Add it, unless the same check found something before."""
        ...


class EnvPlayer:
    """Plays random actions and checks everything that comes back."""

    def __init__(self, env: gym.Env[Any, Any], spec: ObsSpec, seed: int, add: AddFinding) -> None:
        self._env = env
        self._spec = spec
        self._seed = seed
        self._add = add
        self._form = obs_form(env)
        # A copy: an environment may make a new action space, not seeded, in every reset.
        self._actions = copy.deepcopy(env.action_space)
        self._spent = 0.0
        self.doing = "reset"
        """What the environment was called for last."""
        self.played = Played()
        self.steps = 0
        """Steps taken by the last `play`."""
        self.truncations = 0
        self.has_reward = False
        self.largest = 0.0

    def reset(self, seed: int | None) -> Any:
        """Begin an episode; raises `WrongResult` for anything that it must not return."""
        self.doing = "reset"
        call = functools.partial(self._env.reset, seed=seed, options=None)
        obs, _ = checks.unpacked_reset(self._call(call))
        return self._checked(obs)

    def play(
        self, steps: int, max_seconds: float = MAX_SECONDS, *, announce: bool = False
    ) -> list[bytes]:
        """Return a digest of every step; raises `WrongResult` as `reset` does.

        It stops after ``max_seconds`` in the environment. With ``announce``, a line on standard
        error names an environment that is slow.
        """
        self._actions.seed(self._seed)
        obs = self.reset(self._seed)
        trace, episodes = [self.digest(obs)], [Episode(0, 0.0, 0)]
        self._spent = 0.0
        for self.steps in range(1, steps + 1):
            obs, reward, ended, truncated = self._step(obs)
            trace.append(self.digest(obs) + repr((reward, ended, truncated)).encode())
            _, total, length = episodes[-1]
            episodes[-1] = Episode(0, total + reward, length + 1)
            if ended or truncated:
                self.truncations += truncated
                obs = self.reset(None)
                trace[-1] += self.digest(obs)
                episodes.append(Episode(0, 0.0, 0))
            if self._spent > max_seconds:
                break
            if announce and self._spent > _SLOW_AFTER:
                announce = False
                self._name_slow(steps, max_seconds)
        ended_ones = episodes[:-1]
        self.played = Played(
            self.steps,
            tuple(one.length for one in ended_ones),
            tuple(one.ret for one in ended_ones),
            self.steps / max(self._spent, 1e-9),
        )
        return trace

    def _name_slow(self, steps: int, max_seconds: float) -> None:
        name = checks.name_of(self._env)
        say(
            f"{name} is slow: {self.steps:,} of {steps:,} steps took {self._spent:.0f} s; playing"
            f" stops after {max_seconds:.0f} s"
        )

    def _step(self, obs: Any) -> tuple[Any, float, bool, bool]:
        self.doing = "step"
        result = self._call(functools.partial(self._env.step, self._action(obs)))
        checks.check_step_result(result)
        return self._checked_step(result)

    def digest(self, obs: Any) -> bytes:
        """Return a few bytes that differ where observations differ."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._spec.parts(obs).values():
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.digest()

    def _call(self, function: Any) -> Any:
        """Call the environment; what it raises is a wrong result, too."""
        begun = time.perf_counter()
        try:
            return function()
        except checks.WrongResult:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an environment raises
            wrong = checks.misunderstanding(error, self.doing)
            where = checks.users_place(error)
            text = checks.summary(error).removeprefix("it called ")
            placed = f"{text} ({where})" if where and where not in text else text
            raise wrong or checks.WrongResult(f"no exception; got {placed}") from None
        finally:
            self._spent += time.perf_counter() - begun

    def _action(self, obs: Any) -> Any:
        space = self._actions
        if not self._spec.has_mask:
            return space.sample()
        mask = np.asarray(obs[ACTION_MASK], np.int8)
        if isinstance(space, gym.spaces.MultiDiscrete):
            parts = np.split(mask, np.cumsum(space.nvec.reshape(-1))[:-1])
            return (
                np.array([self._choice(part) for part in parts]).reshape(space.shape) + space.start
            )
        self._choice(mask)
        return space.sample(mask)

    def _choice(self, mask: Any) -> int:
        if not mask.any():
            raise checks.WrongResult(f"an action mask that allows an action; got {mask.tolist()}")
        return int(self._actions.np_random.choice(np.flatnonzero(mask)))

    def _checked_step(self, result: Any) -> tuple[Any, float, bool, bool]:
        obs, reward, terminated, truncated, info = result
        obs = self._checked(obs)
        number = float(checks.number(reward))
        if not np.isfinite(number):
            raise checks.WrongResult(f"a reward that is finite; got {number}")
        self.has_reward = self.has_reward or number != 0
        ended, cut = checks.flags(terminated, truncated)
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, (bool, np.bool_)):
                self._add(
                    "warning",
                    name,
                    f"{name} as True or False",
                    checks.described(value),
                    f"Return bool({name}).",
                )
        if not np.isscalar(reward):
            self._add(
                "warning",
                "reward type",
                "a float",
                checks.described(reward),
                "Return float(reward).",
            )
        checks.check_info(info)
        return obs, number, ended, cut

    def _checked(self, obs: Any) -> Any:
        fitted = self._form.fitted(obs)
        try:
            stored = self._spec.cast(fitted)
        except OutsideSpaceError as error:
            raise checks.WrongResult(in_own_words(self._env, str(error))) from None
        for leaf in tree_leaves(stored):
            if leaf.dtype.kind == "f" and leaf.size:
                if not np.isfinite(leaf).all():
                    raise checks.WrongResult("an observation that is finite; got NaN or infinity")
                self.largest = max(self.largest, float(np.abs(leaf).max()))
        self._check_form(obs)
        return fitted

    def _check_form(self, obs: Any) -> None:
        """Warn of values that are converted, or outside the bounds of their space."""
        for path, space in spaces.observed(self._env.observation_space):
            if not isinstance(space, gym.spaces.Box):
                continue
            part: Any = functools.reduce(lambda value, key: value[key], path, obs)
            name = own_name(self._env, path)
            if not isinstance(part, np.ndarray) or part.dtype != space.dtype:
                self._add(
                    "warning",
                    "dtype",
                    f"{name} as an array of {space.dtype}",
                    checks.described(part),
                    f"Return np.asarray(..., np.{space.dtype}); otherwise it is converted in every"
                    " step.",
                )
            array = np.asarray(part)
            outside = (array < space.low) | (array > space.high)
            if outside.any():
                where = tuple(int(i) for i in np.argwhere(outside)[0])
                self._add(
                    "warning",
                    "bounds",
                    f"{name} between low and high of its space",
                    f"{array[where]} at index {where}, with bounds {space.low[where]} and"
                    f" {space.high[where]}",
                    "Widen the bounds of the space, or clip the observation.",
                )
