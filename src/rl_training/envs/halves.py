"""Two fixed halves of a vector: one is stepped while actions of the other are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv

from rl_training._internal.tree import tree_stack
from rl_training.envs.adapter import VectorAdapter
from rl_training.envs.factory import EnvFn, make_vector_env
from rl_training.envs.team_adapter import TeamAdapter
from rl_training.envs.team_env import team_of
from rl_training.types import Array, Episode, Obs, VectorStep

if TYPE_CHECKING:
    from rl_training.config import TrainConfig


class HalvedAdapter:
    """Two `VectorAdapter`s with the interface of one; ``halves`` are the two."""

    def __init__(self, halves: tuple[VectorAdapter, VectorAdapter]) -> None:
        first, second = self.halves = halves
        self.num_envs = first.num_envs + second.num_envs
        self.first_index = first.first_index
        self.rows = (slice(0, first.num_envs), slice(first.num_envs, self.num_envs))
        """The environments of each half."""
        self.action_spec, self.obs_spec = first.action_spec, first.obs_spec
        self.has_invalid_rows, self.frame_stack = first.has_invalid_rows, first.frame_stack

    def reset(self) -> Obs:
        """Begin the first episode of every environment."""
        return joined_obs([half.reset() for half in self.halves])

    def step(self, action: Array) -> VectorStep:
        """Step both halves at once."""
        for half, rows in zip(self.halves, self.rows, strict=True):
            half.send(action[rows])
        return self.join([half.recv() for half in self.halves])

    def join(self, parts: list[VectorStep]) -> VectorStep:
        """One step of all environments from one of each half."""
        obs = joined_obs([part.obs for part in parts])
        ended = any((part.terminated | part.truncated).any() for part in parts)
        final_obs = joined_obs([part.final_obs for part in parts]) if ended else obs
        episodes = [
            Episode(episode.env + rows.start, episode.ret, episode.length)
            for part, rows in zip(parts, self.rows, strict=True)
            for episode in part.episodes
        ]
        return VectorStep(
            obs,
            final_obs,
            np.concatenate([part.reward for part in parts]),
            np.concatenate([part.terminated for part in parts]),
            np.concatenate([part.truncated for part in parts]),
            np.concatenate([part.valid for part in parts]),
            tuple(episodes),
        )

    @property
    def episode_lengths(self) -> Array:
        """Steps so far of each environment's current episode."""
        return np.concatenate([half.episode_lengths for half in self.halves])

    @property
    def has_unrecorded_episodes(self) -> bool:
        """Whether either half had an episode too long to be recorded."""
        return any(half.has_unrecorded_episodes for half in self.halves)

    @property
    def exactly_resumable(self) -> bool:
        """Whether both can be restored bit for bit."""
        return all(half.exactly_resumable for half in self.halves)

    def state_dict(self) -> dict[str, Any]:
        """Everything that brings the environments back."""
        return {"halves": [half.state_dict() for half in self.halves]}

    def load_state_dict(self, state: dict[str, Any], expected: Obs) -> tuple[Obs, bool]:
        """Restore both; return the current observation, and whether it is exact."""
        leaf_rows = [_rows_of(expected, rows) for rows in self.rows]
        triples = zip(self.halves, state["halves"], leaf_rows, strict=True)
        restored = [half.load_state_dict(saved, rows) for half, saved, rows in triples]
        return joined_obs([obs for obs, _ in restored]), all(exact for _, exact in restored)

    def close(self) -> None:
        """Close the environments."""
        for half in self.halves:
            half.close()


def joined_obs(parts: list[Obs]) -> Obs:
    """Observations of all environments from those of each half."""
    return tree_stack(np.concatenate, parts)


def _rows_of(obs: Obs, rows: slice) -> Obs:
    return {key: leaf[rows] for key, leaf in obs.items()} if isinstance(obs, dict) else obs[rows]


PlainAdapter: TypeAlias = VectorAdapter | TeamAdapter
Adapter: TypeAlias = PlainAdapter | HalvedAdapter
"""What trainers step."""


def plain_adapter(
    env: VectorEnv[Any, Any, Any], seed: int, first_index: int = 0, shard: int = 0
) -> PlainAdapter:
    """Return the adapter of a vector: one row per environment, or per environment and agent."""
    kind = VectorAdapter if team_of(env.metadata) is None else TeamAdapter
    return kind(env, seed, first_index=first_index, shard=shard)


def make_adapter(config: TrainConfig[Any], env_fn: EnvFn | None = None, shard: int = 0) -> Adapter:
    """The environments that a shard trains on, in halves where a config asks for overlap."""
    count = config.num_envs // config.shards

    def make(size: int, start: int) -> VectorEnv[Any, Any, Any]:
        return make_vector_env(config, size, env_fn=env_fn, first_index=start)

    if not config.overlap:
        start = shard * count
        return plain_adapter(make(count, start), config.seed, start, shard)
    starts = [shard * count + start for start in (0, count // 2)]
    first, second = (
        VectorAdapter(make(count // 2, start), config.seed, first_index=start, shard=shard)
        for start in starts
    )
    return HalvedAdapter((first, second))
