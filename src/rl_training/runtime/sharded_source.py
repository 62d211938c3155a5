"""Experience of several shards, those that this process executes, as one source."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.moments import Moments
from rl_training.communicator import (
    Communicator,
    add_in_order,
    per_shard_state,
    shards_of,
    state_of_each,
)
from rl_training.runtime.episode_info import means_of_sums
from rl_training.runtime.experience import Collected, ExperienceSource, OnStep, Timed
from rl_training.types import Array, EnvInfo, Episode, Obs, Progress, StopRequest, never


class ShardedSource:
    """Steps the environments of every local shard with the shard's own actor.

    Counts, metrics and statistics are those of all shards of the run. Shards take their steps in
    turns, so that all of them, on whatever process, have the same number of steps.
    """

    def __init__(self, shards: Sequence[Any], communicator: Communicator) -> None:
        self.shards = list(shards)
        self._communicator = communicator
        first: EnvInfo = self.shards[0].info
        self.info = first._replace(num_envs=first.num_envs * communicator.shards)
        self.exact_elsewhere = True
        """Whether the environments of other processes can be restored bit for bit."""
        self._log_info: tuple[str, ...] = ()
        self._metrics: dict[str, float] = {}

    @property
    def obs(self) -> Obs | None:
        """The observations of the local shards' environments; None before the first step."""
        found: list[Any] = [shard.obs for shard in self.shards]
        if any(obs is None for obs in found):
            return None
        if isinstance(found[0], dict):
            return {key: np.concatenate([obs[key] for obs in found]) for key in found[0]}
        return np.concatenate(found)

    @property
    def episode_lengths(self) -> Array:
        """Steps so far of the current episodes of the local shards' environments."""
        return np.concatenate([shard.episode_lengths for shard in self.shards])

    @property
    def exactly_resumable(self) -> bool:
        """Whether the environments can be restored bit for bit."""
        return self.exact_elsewhere and all(shard.exactly_resumable for shard in self.shards)

    def collect(
        self, buffer: Any, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add ``num_steps`` steps of every environment to its shard's buffer."""
        buffers = shards_of(buffer)
        parts: list[Collected] = []
        episodes: list[Episode] = []

        def take(shard: Any, own: Any, count: int, stop: StopRequest = never) -> int:
            part: Collected = shard.collect(own, count, progress, stop)
            parts.append(part)
            first = first_env(shard)  # episodes name environments by their index in the run
            episodes.extend(one._replace(env=first + one.env) for one in part.episodes)
            return part.vector_steps

        if len(self.shards) == 1:
            vector_steps = take(self.shards[0], buffers[0], num_steps, stop)
        else:
            vector_steps = 0
            while vector_steps < num_steps and not stop():
                for shard, own in zip(self.shards, buffers, strict=True):
                    take(shard, own, 1)
                vector_steps += 1
        steps = self._steps_of_all(parts, vector_steps)
        return Collected(vector_steps, steps, tuple(episodes), self.shards[0].policy_version)

    def _steps_of_all(self, parts: Sequence[Collected], vector_steps: int) -> int:
        """Transitions of all shards; how many rows are reset-only is known to each alone."""
        if not self.info.has_invalid_rows:
            return vector_steps * self.info.num_envs
        local = torch.tensor([sum(part.steps for part in parts)])
        counts = torch.zeros((len(self.shards), 1), dtype=torch.int64)
        counts[0] = local
        return int(self._communicator.gather(counts).sum())

    def end_rollout(self) -> None:
        """Merge the moments of every shard's rewards, in the order of shards."""
        mine = torch.tensor([shard.reward_moments() for shard in self.shards], dtype=torch.float64)
        merged = [Moments(*row) for row in self._communicator.gather(mine).tolist()]
        for shard in self.shards:
            shard.merge_rewards(merged)

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Record the version; the actors read the learner's own weights."""
        for shard in self.shards:
            shard.publish(module, version)

    def metrics(self) -> dict[str, float]:
        """Return the means over the last hundred training episodes, an equal part of each shard.

        They are those of the last `update_metrics`.
        """
        return dict(self._metrics)

    def update_metrics(self) -> None:
        """Compute the metrics of all shards; all ranks call this."""
        mine = torch.tensor([shard.episode_sums() for shard in self.shards], dtype=torch.float64)
        count, returns, lengths, *info = add_in_order(self._communicator.gather(mine)).tolist()
        if not count:
            self._metrics = {}
            return
        pairs = list(zip(info[::2], info[1::2], strict=True))
        self._metrics = {
            "rollout/return_mean": returns / count,
            "rollout/length_mean": lengths / count,
            **means_of_sums("rollout", self._log_info, pairs),
        }

    def watch_steps(self, on_step: OnStep | None) -> None:
        """Call ``on_step`` for every step of each local shard; None: no longer."""
        for shard in self.shards:
            shard.watch_steps(on_step)

    def watch_info(self, keys: Sequence[str]) -> None:
        """Average the values of ``keys`` in the info of each episode's last step."""
        self._log_info = tuple(keys)
        for shard in self.shards:
            shard.watch_info(keys)

    def measure(self, timed: Timed) -> None:
        """Call the parts of every shard through ``timed`` from now on."""
        for shard in self.shards:
            shard.measure(timed)

    def state_dict(self) -> Any:
        """Return the states of the local shards."""
        return per_shard_state([shard.state_dict() for shard in self.shards], self._communicator)

    def load_state_dict(self, state: Any) -> bool:
        """Restore the local shards; False where one of any process could not be restored."""
        saved = state_of_each(state, self._communicator)
        pairs = zip(self.shards, saved, strict=True)
        exact = torch.tensor([[shard.load_state_dict(one)] for shard, one in pairs])
        return bool(self._communicator.gather(exact.to(torch.uint8)).all())

    def end_of(self, state: Any) -> tuple[Obs, Mapping[str, Any]] | None:
        """Raise NotImplementedError: call it on each of `shards`."""
        raise NotImplementedError("call it on each of `shards`")

    def close(self) -> None:
        """Close the environments of every local shard, whatever one of them raises."""
        with contextlib.ExitStack() as stack:
            for shard in self.shards:
                stack.callback(shard.close)


def shard_sources(source: ExperienceSource) -> list[Any]:
    """Return the sources of the local shards; a source that is not divided is the only one."""
    return source.shards if isinstance(source, ShardedSource) else [source]


def first_env(source: Any) -> int:
    """Return the index in the run of the first environment of a shard's source."""
    return int(getattr(source, "first_env", 0))
