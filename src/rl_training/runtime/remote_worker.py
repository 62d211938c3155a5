"""The environments of one shard and the policy that acts in them, in a process of their own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rl_training.config import TrainConfig
from rl_training.data.step_block import StepBlock, StepRecorder
from rl_training.envs import EnvFn, make_adapter
from rl_training.registry import spec_of
from rl_training.runtime.assembly import build_algorithm, shard_source
from rl_training.runtime.device import pick_threads
from rl_training.runtime.sources import as_arrays
from rl_training.types import EnvInfo, Episode, Progress

INITIAL_STATE = 0
"""Name of the state in which every worker of a shard starts."""
_SECONDS_BETWEEN_SIGNS = 1.0


@dataclasses.dataclass(frozen=True)
class Described:
    """What a worker reports of its environments when it starts."""

    info: EnvInfo
    first_env: int
    exactly_resumable: bool
    state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    """Steps to take: from which state and with which weights."""

    state_name: int
    """The state to continue from."""
    next_name: int
    """The name of the state after these steps."""
    num_steps: int
    progress: Progress
    reward_normalizer: dict[str, Any] | None
    """Its state, which the driver changes between two requests; None: rewards are not normalised.
    """


@dataclasses.dataclass(frozen=True)
class StateRequired:
    """The worker is in another state than the requested one: send it."""


@dataclasses.dataclass(frozen=True)
class StillWorking:
    """A sign of life between two steps."""

    steps: int


@dataclasses.dataclass(frozen=True)
class Taken:
    """The steps of a request, and the state after them."""

    block: StepBlock
    steps: int
    """Transitions (reset-only rows are not counted)."""
    episodes: tuple[Episode, ...]
    sums: list[float]
    """Sums over the last episodes, as `LocalSource.episode_sums` returns them."""
    episode_lengths: Any
    state: dict[str, Any]


class ShardWorker:
    """Steps the environments of one shard for a driver, which holds the state between requests.

    It repeats a request bit for bit: a driver that lost a worker sends the same request, with the
    state that it starts from, to a new one.
    """

    def __init__(
        self, config: TrainConfig[Any], env_fn: EnvFn | None, shard: int, threads: int | None
    ) -> None:
        cpu, spec = torch.device("cpu"), spec_of(config)
        env = make_adapter(config, env_fn, shard)
        threads = pick_threads(config, env.obs_spec, cpu) if threads is None else threads
        torch.set_num_threads(threads)
        learner = build_algorithm(config, env.obs_spec, env.action_spec, cpu, threads)
        self._module = learner.module
        self._source = shard_source(spec, learner, config, cpu, shard, env)
        if config.log_info:
            self._source.watch_info(config.log_info)
        self._state_name: int | None = INITIAL_STATE

    def describe(self) -> Described:
        """Return what the driver needs to know before the first request."""
        source = self._source
        return Described(
            source.info, source.first_env, source.exactly_resumable, source.state_dict()
        )

    def load_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        """Act with these weights from now on."""
        self._module.load_state_dict(weights)
        self._source.publish(self._module, version)

    def load_state(self, name: int, state: Mapping[str, Any]) -> bool:
        """Continue from a state; return whether it was restored bit for bit."""
        self._state_name = None
        exact = self._source.load_state_dict(state)
        self._state_name = name
        return exact

    def take(self, request: Request) -> Iterator[StateRequired | StillWorking | Taken]:
        """Take the steps of a request; yield a sign of life every second, and the result."""
        if request.state_name != self._state_name:
            yield StateRequired()
            return
        self._state_name = None  # until the steps are complete
        source, recorder = self._source, StepRecorder()
        if source.reward_normalizer is not None and request.reward_normalizer is not None:
            source.reward_normalizer.load_state_dict(as_arrays(request.reward_normalizer))
        steps, episodes = 0, list[Episode]()
        piece, shown = 1, time.monotonic()
        while (left := request.num_steps - len(recorder)) > 0:
            started = time.monotonic()
            part = source.collect(recorder, min(piece, left), request.progress)
            steps += part.steps
            episodes += part.episodes
            now = time.monotonic()
            if now - started < _SECONDS_BETWEEN_SIGNS / 4:
                piece *= 2
            elif now - started > _SECONDS_BETWEEN_SIGNS:
                piece = max(1, piece // 2)
            if now - shown > _SECONDS_BETWEEN_SIGNS:
                shown = now
                yield StillWorking(len(recorder))
        self._state_name = request.next_name
        yield Taken(
            recorder.block(),
            steps,
            tuple(episodes),
            source.episode_sums(),
            source.episode_lengths,
            source.state_dict(),
        )

    def close(self) -> None:
        """Close the environments."""
        self._source.close()
