"""What the scripts of all libraries share: the request, the clock, and playing with a policy.

`peers.py` runs each script in the environment of its library, with one argument: a request as
JSON. The last line that a script prints is its answer as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

EPISODE_SEED = 10_000
"""Seed of the first episode that a final policy plays; it is the same for every library."""
FOREVER = 10**8
"""Total number of steps of a run that the clock ends."""


class Request(NamedTuple):
    """What a script is asked for: training for ``seconds`` (speed), or for ``steps`` (returns)."""

    library: str
    algo: str
    env_id: str
    num_envs: int
    settings: dict[str, Any]
    threads: int
    """Threads of torch, or of JAX; 0: as the library would have it."""
    seed: int = 1
    warmup: int = 0
    """Steps before the clock starts."""
    seconds: float = 0.0
    """Measured time; 0: train for ``steps`` and play ``episodes`` with the final policy."""
    steps: int = FOREVER
    episodes: int = 0

    @property
    def period(self) -> int:
        """Steps of all environments from one learning phase to the next."""
        if "num_steps" in self.settings:
            return int(self.settings["num_steps"]) * self.num_envs
        return int(self.settings["train_freq"])

    @property
    def minibatch(self) -> int:
        """Rows of a minibatch of an on-policy algorithm."""
        return self.period // int(self.settings["num_minibatches"])


class TimeUpError(Exception):
    """The measured time is over."""


class Clock:
    """Measures from the first boundary after the warm-up to the first one after ``seconds``.

    A boundary is between a learning phase and the next step, so that each measured interval
    contains as much learning as belongs to its steps.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._begin: tuple[int, float, float] | None = None
        self.measured: dict[str, float] | None = None

    def is_over(self, steps: int) -> bool:
        """Return whether the time is up at the boundary after so many steps."""
        if not self._request.seconds:
            return False
        now, used = time.perf_counter(), time.process_time()
        if self._begin is None:
            if steps >= self._request.warmup:
                self._begin = (steps, now, used)
            return False
        first, begin, used_before = self._begin
        if now - begin < self._request.seconds:
            return False
        self.measured = {
            "steps_per_second": (steps - first) / (now - begin),
            "cores": (used - used_before) / (now - begin),
            "steps": steps - first,
        }
        return True


class TimedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """The first environment of a run; ends the run when the clock is over."""

    def __init__(self, env: gym.Env[Any, Any], clock: Clock, request: Request) -> None:
        super().__init__(env)
        self._clock = clock
        self._num_envs, self._period = request.num_envs, request.period
        self._steps = 0

    def step(self, action: Any) -> Any:
        if self._steps % self._period == 0 and self._clock.is_over(self._steps):
            raise TimeUpError
        self._steps += self._num_envs
        return self.env.step(action)


def env_functions(request: Request, clock: Clock) -> list[Callable[[], gym.Env[Any, Any]]]:
    """Return a function for each environment; the first one is timed."""

    def timed() -> gym.Env[Any, Any]:
        return TimedEnv(gym.make(request.env_id), clock, request)

    def plain() -> gym.Env[Any, Any]:
        return gym.make(request.env_id)

    return [timed, *[plain] * (request.num_envs - 1)]


def play(request: Request, begin: Callable[[], Callable[[Any], Any]]) -> list[float]:
    """Return the returns of the final policy, most likely actions, in environments of its own.

    ``begin`` starts an episode: it returns a function from an observation to an action.
    """
    env = gym.make(request.env_id)
    returns = []
    for episode in range(request.episodes):
        act = begin()
        obs, _ = env.reset(seed=EPISODE_SEED + episode)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    env.close()
    return returns


Trained = Callable[[], Callable[[Any], Any]]
"""The ``begin`` of `play`."""
Train = Callable[[Request, Clock], Trained]


def limit_threads(threads: int) -> None:
    """Set torch's threads; those of JAX come from variables that `peers.py` sets."""
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def answer(train: Train, packages: tuple[str, ...]) -> None:
    """Read the request, train, and print the answer."""
    request = Request(**json.loads(sys.argv[1]))
    limit_threads(request.threads)
    clock = Clock(request)
    result: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        trained = train(request, clock)
        if not request.seconds:
            result["seconds"] = time.perf_counter() - begin
            result["returns"] = play(request, trained)
    except TimeUpError:
        pass
    if request.seconds:
        if clock.measured is None:
            raise RuntimeError("training ended before the measured time was over")
        result |= clock.measured
    result["versions"] = {name: metadata.version(name) for name in (*packages, "gymnasium")}
    print(json.dumps(result), flush=True)
    # Environments and thread pools of an interrupted run need no orderly end.
    os._exit(0)


def scaled(low: Any, high: Any, action: Any) -> Any:
    """Return an action in [-1, 1] in the range of the environment."""
    return low + (np.asarray(action) + 1) / 2 * (high - low)
