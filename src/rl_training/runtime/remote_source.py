"""Experience of workers in other processes: one worker per shard, a request per rollout."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_training._internal.tree import tree_map
from rl_training.algorithms.moments import Moments
from rl_training.communicator import Communicator, shards_of
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.experience import Collected, OnStep, Timed
from rl_training.runtime.remote_worker import Request, Taken
from rl_training.runtime.sharded_source import ShardedSource
from rl_training.runtime.sources import as_arrays
from rl_training.runtime.supervision import SupervisedWorker, Weights, Workers
from rl_training.types import Array, Obs, Progress, StopRequest, never

SECONDS_BETWEEN_STOPS = 0.05
"""How often a stop is looked for while workers are waited for."""


class RemoteShard:
    """One shard as the run sees it: after the last steps that are in its buffer."""

    def __init__(self, worker: SupervisedWorker, config: TrainConfig[Any]) -> None:
        self.worker = worker
        described = worker.handle.describe()
        self.info = described.info
        self.first_env = described.first_env
        self.exactly_resumable = described.exactly_resumable
        self.state: dict[str, Any] = described.state
        self.policy_version = 0
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

    def advance(self, taken: Taken) -> None:
        """Continue from the state after the steps of a request."""
        self.state = taken.state
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
        self.state = dict(state)
        if state["obs"] is None:  # the worker is in this state
            return True
        recent = np.array(state["recent"], np.float64).reshape(-1, 2)
        self._sums[:3] = [float(len(recent)), *(float(np.sum(column)) for column in recent.T)]
        return self.worker.load_state(self.state)

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
        self.worker.handle.kill()


class WorkerSource(ShardedSource):
    """Workers, one per shard, and the weights that they are sent. Subclasses send requests.

    A worker that fails is replaced, and the new one takes the same steps again from the state that
    this process holds: every step reaches the buffers exactly once.
    """

    shards: list[RemoteShard]

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
        self._lag = 0.0
        """By how many versions the policy of the last steps was behind, on average."""
        started: list[SupervisedWorker] = []
        try:
            for shard in communicator.local:  # all of them start at the same time
                started.append(SupervisedWorker(shard, workers, config))  # noqa: PERF401
            shards = [RemoteShard(worker, config) for worker in started]
        except BaseException:
            for worker in started:
                worker.handle.kill()
            workers.close()
            raise
        super().__init__(shards, communicator)

    def _published(self) -> Weights:
        """Return the weights of the last publication; they are copied and put once."""
        if self._weights is None:
            assert self._module is not None  # noqa: S101 - narrows the type
            state = self._module.state_dict().items()
            values = {name: one.detach().to("cpu", copy=True) for name, one in state}
            self._weights = self._put(values, self._version)
        return self._weights

    def _put(self, values: dict[str, Any], version: int) -> Weights:
        return Weights(next(self._numbers), version, values, self._workers.put(values))

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Act with these weights in requests that are sent from now on."""
        super().publish(module, version)
        self._module, self._version, self._weights = module, version, None

    def metrics(self) -> dict[str, float]:
        """Return those of episodes, and by how much the policy that acted was behind."""
        found = super().metrics()
        return found if self._config.lag == 0 else {**found, "rollout/policy_lag": self._lag}

    def watch_steps(self, on_step: OnStep | None) -> None:
        """Raise `ConfigError`: steps are taken in other processes."""
        if on_step is not None:
            raise ConfigError("on_step needs environments of this process: set engine to local")

    def close(self) -> None:
        """End the workers."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._workers.close)
            super().close()


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Requests to all workers that are under way."""

    num_steps: int
    progress: Progress
    weights: Weights

    def is_for(self, num_steps: int, progress: Progress) -> bool:
        """Return whether these steps were requested."""
        return (self.num_steps, self.progress) == (num_steps, progress)


class RemoteSource(WorkerSource):
    """Lets every worker take the steps of a rollout, and adds them to the buffers.

    With ``lag`` 1, the next rollout is collected while the learner learns from the last one, with
    the weights from before that.
    """

    def __init__(
        self, workers: Workers, config: TrainConfig[Any], communicator: Communicator
    ) -> None:
        self._flight: _Flight | None = None
        self._answers: dict[int, Taken] = {}
        self._collect: Callable[..., list[Taken] | None] = self._wait
        super().__init__(workers, config, communicator)

    def collect(
        self, buffer: Any, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add ``num_steps`` steps of every environment to its shard's buffer, or none on ``stop``.

        After a stop the workers continue: the next call waits for the same steps.
        """
        if not num_steps:  # a rollout that is complete, of a learning phase that was stopped
            return Collected(0, 0, (), self.shards[0].policy_version)
        lagging = self._config.lag == 1
        flight = self._flight
        if flight is None or not (lagging or flight.is_for(num_steps, progress)):
            flight = self._launch(num_steps, progress, self._published())
        answers = self._collect(stop)
        if answers is None:
            return Collected(0, 0, (), flight.weights.version)
        self._flight = None
        self._lag = float(self._version - flight.weights.version)
        buffers, episodes = shards_of(buffer), []
        for shard, taken, own in zip(self.shards, answers, buffers, strict=True):
            taken.block.add_to(own)
            request = shard.worker.request
            assert request is not None  # noqa: S101 - narrows the type
            shard.worker.continue_from(request.next_name, taken.state)
            shard.advance(taken)
            episodes += [one._replace(env=shard.first_env + one.env) for one in taken.episodes]
        if lagging:
            if self._config.normalize_reward:
                super().end_rollout()
            self._launch(num_steps, progress, self._published())
        steps = sum(taken.steps for taken in answers)
        return Collected(num_steps, steps, tuple(episodes), flight.weights.version)

    def _launch(self, num_steps: int, progress: Progress, weights: Weights) -> _Flight:
        """Send a request to every worker."""
        self._flight = flight = _Flight(num_steps, progress, weights)
        self._answers.clear()
        for shard in self.shards:
            worker = shard.worker
            worker.state = shard.state  # the driver may have merged statistics into it
            worker.send(
                Request(
                    worker.state_name,
                    worker.next_name(),
                    num_steps,
                    progress,
                    shard.state["reward_normalizer"],
                ),
                weights,
            )
        return flight

    def _wait(self, stop: StopRequest) -> list[Taken] | None:
        """Return the answers of all workers; None on ``stop``."""
        for shard in self.shards:  # what came while this process learnt was not looked at
            shard.worker.extend_deadline()
        while True:
            waiting = [one.worker for one in self.shards if one.worker.index not in self._answers]
            for worker in waiting:
                if (answer := worker.receive()) is not None:
                    self._answers[worker.index] = answer
            if len(self._answers) == len(self.shards):
                return [self._answers.pop(shard.worker.index) for shard in self.shards]
            if stop():
                return None
            left = [one.handle for one in waiting if one.index not in self._answers]
            self._workers.wait(left, SECONDS_BETWEEN_STOPS)

    def end_rollout(self) -> None:
        """Merge the moments of every shard's rewards, in the order of shards."""
        if self._config.lag == 0:  # else they were merged before the next rollout began
            super().end_rollout()

    def measure(self, timed: Timed) -> None:
        """Count the time that workers are waited for as that of the environments."""
        self._collect = timed("environment", self._wait)

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
                "version": flight.weights.version,
            },
        }

    def load_state_dict(self, state: Any) -> bool:
        """Restore the shards; begin the rollout that was under way again."""
        self._flight = None
        flight = None
        if self._config.lag:
            state, flight = state["shards"], state["flight"]
        weights = self._published()
        if flight is not None:
            weights = self._put(dict(flight["weights"]), int(flight.get("version", 0)))
        for shard in self.shards:
            shard.worker.handle.load_weights(weights)
        exact = super().load_state_dict(state)
        if flight is not None:
            progress = Progress(*map(int, flight["progress"]))
            self._launch(int(flight["num_steps"]), progress, weights)
        return exact
