"""Experience of workers in other processes: one worker per shard, a request per rollout."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rl_training._internal.tree import tree_map
from rl_training.algorithms.moments import Moments
from rl_training.communicator import Communicator, shards_of
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, LostWorkerError, WorkerError
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.experience import Collected, OnStep, Timed
from rl_training.runtime.remote_worker import (
    INITIAL_STATE,
    Described,
    Request,
    StateRequired,
    StillWorking,
    Taken,
)
from rl_training.runtime.sharded_source import ShardedSource
from rl_training.runtime.sources import as_arrays
from rl_training.terminal import say
from rl_training.types import Array, Obs, Progress, StopRequest, never

_SECONDS_BETWEEN_STOPS = 0.05
"""How often a stop is looked for while workers are waited for."""


class Weights(NamedTuple):
    """Weights of the policy, as they were published."""

    number: int
    """Different for all weights of a process."""
    version: int
    """The version that they were published as."""
    values: dict[str, Any]
    put: Any
    """What `Workers.put` returned for them."""


class WorkerHandle(Protocol):
    """A worker in another process. Everything but `poll` may raise what it raised."""

    def describe(self) -> Described:
        """Wait for the worker to start, and return what it reports."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Send weights, unless the worker has them."""
        ...

    def load_state(self, name: int, state: Mapping[str, Any]) -> bool:
        """Send a state, and wait until it is restored; return whether that was bit for bit."""
        ...

    def start(self, request: Request) -> None:
        """Send a request."""
        ...

    def poll(self) -> StateRequired | StillWorking | Taken | Exception | None:
        """Return the answer to the request, what went wrong, or None: it is not there yet."""
        ...

    def kill(self) -> None:
        """End the process, whatever it does."""
        ...


class Workers(Protocol):
    """What starts workers, and moves weights to them."""

    def start(self, shard: int) -> WorkerHandle:
        """Start the worker of a shard, without waiting for it."""
        ...

    def put(self, weights: Mapping[str, Any]) -> Any:
        """Make weights available to all workers; return what a worker is sent for them."""
        ...

    def wait(self, handles: Sequence[WorkerHandle], seconds: float) -> None:
        """Wait until one of the workers may have an answer, at most so long."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class RemoteShard:
    """One shard as its driver sees it: the state between requests, and the worker."""

    def __init__(self, index: int, handle: WorkerHandle, config: TrainConfig[Any]) -> None:
        self.index = index
        self.handle = handle
        described = handle.describe()
        self.info = described.info
        self.first_env = described.first_env
        self.exactly_resumable = described.exactly_resumable
        self.state: dict[str, Any] = described.state
        self.state_name = INITIAL_STATE
        self.policy_version = 0
        self.failures = 0
        """Failures since the last answer."""
        self._last_name = INITIAL_STATE
        self._sums: list[float] = [0.0] * (3 + 2 * len(config.log_info))
        self._lengths: Array | None = None
        self._rewards: RewardNormalizer | None = None
        if config.normalize_reward:
            gamma = config.algo_kwargs.gamma
            self._rewards = RewardNormalizer(self.info.num_envs, gamma, config.clip_reward)

    @property
    def obs(self) -> Obs | None:
        """The observations after the last step; None before the first one."""
        obs: Any = self.state["obs"]
        return None if obs is None else tree_map(np.asarray, obs)

    @property
    def episode_lengths(self) -> Array:
        """Steps so far of each environment's current episode; zeros before the first request."""
        return np.zeros(self.info.num_envs, np.int64) if self._lengths is None else self._lengths

    def next_name(self) -> int:
        """Return a name for a state that no other state has."""
        self._last_name += 1
        return self._last_name

    def advance(self, name: int, taken: Taken) -> None:
        """Continue from the state after the steps of a request."""
        self.state, self.state_name = taken.state, name
        self._sums, self._lengths = taken.sums, taken.episode_lengths

    def episode_sums(self) -> list[float]:
        """Return sums over the last episodes, as `LocalSource` does."""
        return self._sums

    def reward_moments(self) -> Moments:
        """Return the moments of the rewards since the last `merge_rewards`."""
        return self._loaded_rewards().rollout_moments

    def merge_rewards(self, shards: Sequence[Moments]) -> None:
        """Add the moments of the rewards of every shard to those before the rollout."""
        rewards = self._loaded_rewards()
        rewards.end_rollout(shards)
        self.state = {**self.state, "reward_normalizer": rewards.state_dict()}

    def _loaded_rewards(self) -> RewardNormalizer:
        assert self._rewards is not None  # noqa: S101 - narrows the type
        self._rewards.load_state_dict(as_arrays(self.state["reward_normalizer"]))
        return self._rewards

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the form of a `LocalSource`."""
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Send a state to the worker; False where the environments could not be restored."""
        self.state, self.state_name = dict(state), self.next_name()
        if state["obs"] is None:
            self.state_name = INITIAL_STATE
            return True
        recent = np.array(state["recent"], np.float64).reshape(-1, 2)
        self._sums[:3] = [float(len(recent)), *(float(np.sum(column)) for column in recent.T)]
        return self.handle.load_state(self.state_name, self.state)

    def end_of(self, state: Mapping[str, Any]) -> tuple[Obs, Mapping[str, Any]] | None:
        """Return the last observations and the actor's state in a saved state."""
        if state["obs"] is None:
            return None
        obs: Any = tree_map(np.asarray, state["obs"])
        return obs, state["actor"]

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Record the version."""
        del module
        self.policy_version = version

    def watch_info(self, keys: Sequence[str]) -> None:
        """Do nothing: the worker knows the keys from the config."""

    def close(self) -> None:
        """End the worker."""
        self.handle.kill()


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Requests to all workers that are under way."""

    num_steps: int
    progress: Progress
    weights: Weights
    requests: tuple[Request, ...]

    def is_for(self, num_steps: int, progress: Progress) -> bool:
        """Return whether these steps were requested."""
        return (self.num_steps, self.progress) == (num_steps, progress)


class RemoteSource(ShardedSource):
    """Lets a worker per shard take the steps, and adds them to the buffers of this process.

    A worker that fails is replaced, and the new one takes the same steps again from the state that
    this process holds: every step reaches the buffers exactly once.

    With ``lag`` 1, the next rollout is collected while the learner learns from the last one, with
    the weights from before that.
    """

    shards: list[Any]

    def __init__(
        self, workers: Workers, config: TrainConfig[Any], communicator: Communicator
    ) -> None:
        self._workers = workers
        self._config = config
        self._module: torch.nn.Module | None = None
        self._version = 0
        self._weights: Weights | None = None
        """Those of the last publication; None: not copied yet."""
        self._numbers = itertools.count()
        self._flight: _Flight | None = None
        self._answers: dict[int, Taken] = {}
        self._deadlines: dict[int, float] = {}
        self._collect: Callable[..., list[Taken] | None] = self._wait
        handles: list[WorkerHandle] = []
        try:
            handles += [workers.start(shard) for shard in communicator.local]
            shards = [RemoteShard(i, handle, config) for i, handle in enumerate(handles)]
        except BaseException:
            for handle in handles:
                handle.kill()
            workers.close()
            raise
        super().__init__(shards, communicator)

    def collect(
        self, buffer: Any, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add ``num_steps`` steps of every environment to its shard's buffer, or none on ``stop``.

        After a stop the workers continue: the next call waits for the same steps.
        """
        if not num_steps:  # a rollout that is complete, of a learning phase that was stopped
            return Collected(0, 0, (), self.shards[0].policy_version)
        lagging = self._config.lag > 0
        flight = self._flight
        if flight is None or not (lagging or flight.is_for(num_steps, progress)):
            flight = self._launch(num_steps, progress)
        answers = self._collect(flight, stop)
        if answers is None:
            return Collected(0, 0, (), flight.weights.version)
        self._flight = None
        buffers, episodes = shards_of(buffer), []
        for shard, request, taken, own in zip(
            self.shards, flight.requests, answers, buffers, strict=True
        ):
            taken.block.add_to(own)
            shard.advance(request.next_name, taken)
            episodes += [one._replace(env=shard.first_env + one.env) for one in taken.episodes]
        if lagging:
            if self._config.normalize_reward:
                super().end_rollout()
            self._flight = self._launch(num_steps, progress)
        steps = sum(taken.steps for taken in answers)
        return Collected(num_steps, steps, tuple(episodes), flight.weights.version)

    # -- requests ------------------------------------------------------------------------------

    def _launch(self, num_steps: int, progress: Progress) -> _Flight:
        """Send a request with the current weights to every worker."""
        weights = self._published()
        requests = tuple(
            Request(
                shard.state_name,
                shard.next_name(),
                num_steps,
                progress,
                shard.state["reward_normalizer"],
            )
            for shard in self.shards
        )
        self._flight = flight = _Flight(num_steps, progress, weights, requests)
        self._answers.clear()
        for shard, request in zip(self.shards, requests, strict=True):
            self._send(shard, request, weights)
        return flight

    def _published(self) -> Weights:
        """Return the weights of the last publication; they are copied and put once."""
        if self._weights is None:
            assert self._module is not None  # noqa: S101 - narrows the type
            state = self._module.state_dict().items()
            self._use({name: one.detach().to("cpu", copy=True) for name, one in state})
        return self._weights  # type: ignore[return-value]

    def _use(self, values: dict[str, Any]) -> None:
        put = self._workers.put(values)
        self._weights = Weights(next(self._numbers), self._version, values, put)

    def _send(self, shard: RemoteShard, request: Request, weights: Weights) -> None:
        shard.handle.load_weights(weights)
        shard.handle.start(request)
        self._deadlines[shard.index] = time.monotonic() + self._config.worker_timeout

    def _wait(self, flight: _Flight, stop: StopRequest) -> list[Taken] | None:
        """Return the answers of all workers; None on ``stop``."""
        for index in self._deadlines:  # what came while this process learnt was not looked at
            self._deadlines[index] = time.monotonic() + self._config.worker_timeout
        while True:
            for shard, request in zip(self.shards, flight.requests, strict=True):
                if shard.index not in self._answers:
                    self._receive(shard, request, flight.weights)
            if len(self._answers) == len(self.shards):
                return [self._answers.pop(shard.index) for shard in self.shards]
            if stop():
                return None
            self._workers_wait(_SECONDS_BETWEEN_STOPS)

    def _workers_wait(self, seconds: float) -> None:
        waiting = [one.handle for one in self.shards if one.index not in self._answers]
        self._workers.wait(waiting, seconds)

    def _receive(self, shard: RemoteShard, request: Request, weights: Weights) -> None:
        """Take the answer of a worker, if it is there; replace a worker that failed."""
        answer = shard.handle.poll()
        if isinstance(answer, Taken):
            self._answers[shard.index] = answer
            shard.failures = 0
        elif isinstance(answer, StateRequired):
            if shard.state_name == INITIAL_STATE:
                self._renew(shard, weights)
            else:
                self._restore(shard, weights)
            self._send(shard, request, weights)
        elif isinstance(answer, Exception):
            self._replace(shard, request, weights, answer)
        elif isinstance(answer, StillWorking):
            self._deadlines[shard.index] = time.monotonic() + self._config.worker_timeout
        elif time.monotonic() > self._deadlines[shard.index]:
            seconds = self._config.worker_timeout
            error = WorkerError(f"no sign of life for {seconds:g} s (worker_timeout)")
            self._replace(shard, request, weights, error)

    def _replace(
        self, shard: RemoteShard, request: Request, weights: Weights, error: Exception
    ) -> None:
        """Let a new worker do what one that failed was asked to do."""
        while True:
            shard.failures += 1
            most = self._config.max_worker_failures
            if shard.failures >= most:
                raise LostWorkerError(
                    f"the worker of shard {shard.index} failed {shard.failures} times in a row"
                    f" (max_worker_failures): {error}"
                ) from error
            first, _, _ = str(error).strip().partition("\n")
            say(
                f"the worker of shard {shard.index} failed ({first}); a new one collects the same"
                f" steps again (failure {shard.failures} of {most})"
            )
            try:
                self._renew(shard, weights)
            except Exception as failure:  # noqa: BLE001 - of a process that may run anything
                error = failure
                continue
            self._send(shard, request, weights)
            return

    def _renew(self, shard: RemoteShard, weights: Weights) -> None:
        """Start a new worker in place of the one of a shard, in the same state."""
        shard.handle.kill()
        shard.handle = self._workers.start(shard.index)
        shard.handle.describe()
        if shard.state_name != INITIAL_STATE:
            self._restore(shard, weights)

    def _restore(self, shard: RemoteShard, weights: Weights) -> None:
        shard.handle.load_weights(weights)  # first: noise is prepared with them
        if not shard.handle.load_state(shard.state_name, shard.state):
            say(
                f"the environments of shard {shard.index} could not be restored exactly: the steps"
                " differ from those that were lost"
            )

    # -- the rest of what a source is ------------------------------------------------------------

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Act with these weights in requests that are sent from now on."""
        super().publish(module, version)
        self._module, self._version, self._weights = module, version, None

    def end_rollout(self) -> None:
        """Merge the moments of every shard's rewards, in the order of shards."""
        if self._config.lag == 0:  # else they were merged before the next rollout began
            super().end_rollout()

    def measure(self, timed: Timed) -> None:
        """Count the time that workers are waited for as that of the environments."""
        self._collect = timed("environment", self._wait)

    def watch_steps(self, on_step: OnStep | None) -> None:
        """Raise `ConfigError`: steps are taken in other processes."""
        if on_step is not None:
            raise ConfigError("on_step needs environments of this process: set engine to local")

    def state_dict(self) -> Any:
        """Return the states of the shards; with a lag, also what began the rollout under way."""
        states = super().state_dict()
        if self._config.lag == 0:
            return states
        flight = self._flight
        return {
            "shards": states,
            "flight": None
            if flight is None
            else {
                "num_steps": flight.num_steps,
                "progress": list(flight.progress),
                "weights": flight.weights.values,
            },
        }

    def load_state_dict(self, state: Any) -> bool:
        """Restore the shards; begin the rollout that was under way again."""
        self._flight = None
        flight = None
        if self._config.lag:
            state, flight = state["shards"], state["flight"]
        if flight is not None:
            self._use(dict(flight["weights"]))
        for shard in self.shards:
            shard.handle.load_weights(self._published())
        exact = super().load_state_dict(state)
        if flight is not None:
            self._launch(int(flight["num_steps"]), Progress(*map(int, flight["progress"])))
            self._weights = None  # those of the learner are newer
        return exact

    def close(self) -> None:
        """End the workers."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._workers.close)
            super().close()
