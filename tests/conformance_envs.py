"""Environments whose every number is known beforehand, and the little that drives them.

Imports no torch: workers import this module.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_training.envs.episodes import SeededEpisodes
from rl_training.types import Array, Obs, Progress, VectorStep

if TYPE_CHECKING:
    from torch import Tensor

Step = tuple[Any, float, bool, bool, dict[str, Any]]
Reset = tuple[Any, dict[str, Any]]

TERM = 12
"""Position at which a chain's episode terminates."""
TRUNC = 5
"""Steps after which it is truncated."""


def chain_start(index: int, episode: int) -> int:
    """Where an episode begins: some terminate, some are truncated, some are both at once."""
    return (5 * index + 7 * episode + 1) % TERM


def chain_action(position: int, episode: int) -> int:
    """The action a chain wants: only an actor that sees the current observation can know it."""
    return (position + episode) % 2


class Transition(NamedTuple):
    """One step of a chain, by the book."""

    position: int
    episode: int
    terminated: bool
    truncated: bool


def chain_transitions(index: int, count: int) -> list[Transition]:
    """The first transitions of chain number ``index``, worked out without any environment."""
    result: list[Transition] = []
    episode = 0
    while True:
        start = chain_start(index, episode)
        for elapsed in range(TRUNC):
            if len(result) == count:
                return result
            terminated = start + elapsed + 1 == TERM
            truncated = elapsed + 1 == TRUNC
            result.append(Transition(start + elapsed, episode, terminated, truncated))
            if terminated:
                break
        episode += 1


class Chain(gym.Env[Any, Any]):
    """Walks one position a step for a reward of 1; shows its position and episode number.

    ``form``: ``box``; ``dict``; or ``reused``, one array that every observation is written into.
    """

    action_space: gym.Space[Any] = spaces.Discrete(2)

    def __init__(self, index: int = 0, form: str = "box") -> None:
        self.index = index
        self.form = form
        self.episode = -1
        self.buffer = np.zeros(2, np.float32)
        box = spaces.Box(0, 1e6, (2,), np.float32)
        number = spaces.Box(0, 1e6, (1,), np.float32)
        self.observation_space: gym.Space[Any] = (
            spaces.Dict({"position": number, "episode": number}) if form == "dict" else box
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.episode += 1
        self.position = chain_start(self.index, self.episode)
        self.elapsed = 0
        return self.observe(), {}

    def observe(self) -> Any:
        if self.form == "dict":
            return {
                "position": np.array([self.position], np.float32),
                "episode": np.array([self.episode], np.float32),
            }
        if self.form == "reused":
            self.buffer[:] = (self.position, self.episode)
            return self.buffer
        return np.array([self.position, self.episode], np.float32)

    def step(self, action: Any) -> Step:
        right = int(action) == chain_action(self.position, self.episode)
        self.position += 1
        self.elapsed += 1
        terminated = self.position == TERM
        reward = 1.0 if right else -100.0
        return self.observe(), reward, terminated, self.elapsed == TRUNC, {}


def chain_makers(
    num_envs: int, form: str, *, seeded: bool = False
) -> list[Callable[[], gym.Env[Any, Any]]]:
    """What a vector of chains is made of; ``seeded``: as the package makes environments."""
    if seeded:
        return [functools.partial(_seeded_chain, i, form) for i in range(num_envs)]
    return [functools.partial(Chain, i, form) for i in range(num_envs)]


def _seeded_chain(index: int, form: str) -> gym.Env[Any, Any]:
    return SeededEpisodes(Chain(index, form), seed=0, index=index)


class NativeChain(VectorEnv[Any, Any, Any]):
    """Chains as one vector of its own, NEXT_STEP as Gymnasium's native vectors are."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int, reset_reward: float = 0.0) -> None:
        self.num_envs = num_envs
        self.reset_reward = reset_reward
        self.single_observation_space = spaces.Box(0, 1e6, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.episode = np.full(num_envs, -1)
        self.position = np.zeros(num_envs, np.int64)
        self.elapsed = np.zeros(num_envs, np.int64)
        self.over = np.zeros(num_envs, bool)

    def _begin(self, rows: Array) -> None:
        self.episode[rows] += 1
        self.elapsed[rows] = 0
        for i in np.flatnonzero(rows):
            self.position[i] = chain_start(int(i), int(self.episode[i]))

    def _observe(self) -> Array:
        return np.stack([self.position, self.episode], axis=1).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self._begin(np.ones(self.num_envs, bool))
        self.over[:] = False
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        right = np.asarray(actions) == (self.position + self.episode) % 2
        again = self.over
        self.position[~again] += 1
        self.elapsed[~again] += 1
        self._begin(again)
        terminated = (self.position == TERM) & ~again
        truncated = (self.elapsed == TRUNC) & ~again
        reward = np.where(again, self.reset_reward, np.where(right, 1.0, -100.0))
        self.over = terminated | truncated
        return self._observe(), reward, terminated, truncated, {}


class FixedLength(gym.Env[Any, Any]):
    """Terminates after ``length`` steps, each worth 1."""

    observation_space: gym.Space[Any] = spaces.Box(0, 1e6, (1,), np.float32)
    action_space: gym.Space[Any] = spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Step:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.length, False, {}


class Dataless(gym.Env[Any, Any]):
    """Any spaces: observations are samples (seeded), actions must belong to the action space."""

    def __init__(
        self,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
    ) -> None:
        self.observation_space = observation_space or spaces.Dict(
            {
                "a": spaces.Box(-1.0, 1.0, (3,), np.float64),
                "b": spaces.Box(0, 255, (2, 2), np.uint8),
            }
        )
        self.action_space = action_space or spaces.Discrete(2)
        self.actions: list[Any] = []
        self.shown: list[Any] = []

    def observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Step:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        self.actions.append(action)
        self.t += 1
        chance = self.np_random.random()
        return self.observe(), chance, chance < 0.1, self.t == 15, {"t": self.t}


class OwnState(gym.Env[Any, Any]):
    """A random walk that offers its state; ``slow_steps`` counts what a replay would cost."""

    observation_space: gym.Space[Any] = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: gym.Space[Any] = spaces.Discrete(2)

    def __init__(self) -> None:
        self.slow_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> Step:
        self.slow_steps += 1
        self.place = self.place + self.np_random.normal(size=2) + float(action)
        return self.place.astype(np.float32), float(self.place[0]), False, False, {}

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.np_random.bit_generator.state = state["rng"]


class OutsideSeed(FixedLength):
    """Shows noise that no seed governs; refuses to be stepped after its end."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    shorter: ClassVar[int] = 0
    """How much shorter episodes are than they should be."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        return self.noise(), {}

    def noise(self) -> Any:
        return np.random.default_rng().normal(size=1).astype(np.float32)

    def step(self, action: Any) -> Step:
        last = self.length - self.shorter
        if self.t >= last:
            raise RuntimeError("this episode is over")
        self.t += 1
        return self.noise(), 1.0, self.t == last, False, {}


class Worker(FixedLength):
    """Tells about the process it runs in; misbehaves at will, but only in a worker."""

    def __init__(self, length: int = 3, trouble: str = "") -> None:
        super().__init__(length)
        self.trouble = trouble
        self.in_worker = mp.parent_process() is not None
        if trouble == "init" and self.in_worker:
            raise RuntimeError("no licence left for the simulator")
        self.dawdle("slow init")

    def dawdle(self, trouble: str) -> None:
        if self.trouble == trouble and self.in_worker:
            time.sleep(20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.dawdle("slow reset")
        return super().reset(seed=seed)

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self.trouble == "close" and self.in_worker:
            time.sleep(3600)


class ScaleReward(gym.Wrapper[Any, Any, Any, Any]):
    """Multiplies rewards."""

    def __init__(self, env: gym.Env[Any, Any], factor: float) -> None:
        super().__init__(env)
        self.factor = factor

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, float(reward) * self.factor, *rest


class ShiftReward(gym.Wrapper[Any, Any, Any, Any]):
    """Adds to rewards."""

    def __init__(self, env: gym.Env[Any, Any], amount: float = 1.0) -> None:
        super().__init__(env)
        self.amount = amount

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, float(reward) + self.amount, *rest


for _name in ("Chain", "FixedLength", "Dataless", "OutsideSeed", "Worker"):
    gym.register(f"conform/{_name}-v0", f"conformance_envs:{_name}")
gym.register("conform/OwnState-v0", "conformance_envs:OwnState", max_episode_steps=20)


class ScriptedActor:
    """Acts as ``choose(obs, call)`` says."""

    def __init__(self, choose: Callable[[Obs, int], Array]) -> None:
        self.choose = choose
        self.calls = 0
        self.ended: list[Array] = []

    def act(self, obs: Obs, progress: Progress) -> tuple[Array, Mapping[str, Tensor]]:
        self.calls += 1
        return self.choose(obs, self.calls - 1), {}

    def reset(self, done: Array) -> None:
        self.ended.append(done.copy())

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = int(state["calls"])


def chain_actor() -> ScriptedActor:
    """Does what chains want, from their observations alone."""

    def choose(obs: Obs, call: int) -> Array:
        if isinstance(obs, dict):
            obs = np.concatenate([obs["position"], obs["episode"]], axis=1)
        wanted: Array = obs.sum(axis=1).astype(np.int64) % 2
        return wanted

    return ScriptedActor(choose)


class Recorder:
    """A buffer that keeps everything."""

    def __init__(self) -> None:
        self.rows: list[tuple[Obs, Array, VectorStep]] = []

    def add(self, obs: Obs, action: Array, record: Mapping[str, Tensor], step: VectorStep) -> None:
        self.rows.append((obs, action, step))
