"""The rollouts of several groups of agents as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.types import Array, VectorStep


class GroupedRollout:
    """A `RolloutBuffer` for each group; rows of a step are divided among them."""

    def __init__(self, groups: Mapping[str, RolloutBuffer]) -> None:
        self.groups = dict(groups)
        self._rows = rows_of_groups(self.groups)

    @property
    def _all(self) -> list[RolloutBuffer]:
        return list(self.groups.values())

    @property
    def position(self) -> int:
        """Steps stored so far."""
        return self._all[0].position

    @property
    def first_env(self) -> int:
        """Index in the run of the first of these environments, for errors."""
        return self._all[0].first_env

    @first_env.setter
    def first_env(self, index: int) -> None:
        for buffer in self._all:
            buffer.first_env = index

    def reset(self) -> None:
        """Start a new rollout in the same memory."""
        for buffer in self._all:
            buffer.reset()

    def add(
        self,
        obs: Mapping[str, Any],
        action: Mapping[str, Array],
        record: Mapping[str, Mapping[str, Any]],
        step: VectorStep,
    ) -> None:
        """Append one step of every row."""
        for name, buffer in self.groups.items():
            own = step_of_group(step, name, self._rows[name])
            buffer.add(obs[name], action[name], record.get(name, {}), own)

    def check_finite(self, first_step: int, episode_lengths: Array | None = None) -> None:
        """Raise `NonFiniteError` if a complete rollout contains a NaN or infinity."""
        for name, buffer in self.groups.items():
            own = None if episode_lengths is None else episode_lengths[self._rows[name]]
            buffer.check_finite(first_step, own)

    def truncate(self, obs: Mapping[str, Any], actor_state: Mapping[str, Any]) -> None:
        """Truncate every running episode after the last stored step."""
        for name, buffer in self.groups.items():
            buffer.truncate(obs[name], actor_state["groups"][name])

    def state_dict(self) -> dict[str, Any]:
        """Return the steps stored so far."""
        return {"groups": {name: one.state_dict() for name, one in self.groups.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the steps stored so far."""
        for name, buffer in self.groups.items():
            buffer.load_state_dict(state["groups"][name])


def rows_of_groups(buffers: Mapping[str, Any]) -> dict[str, slice]:
    """Return which rows of a step belong to each group, of their buffers."""
    rows = {}
    first = 0
    for name, buffer in buffers.items():
        rows[name] = slice(first, first + buffer.num_envs)
        first += buffer.num_envs
    return rows


def step_of_group(step: VectorStep, name: str, rows: slice) -> VectorStep:
    """Return the part of a step that belongs to a group, without its episodes."""
    obs: Any = step.obs
    final_obs: Any = step.final_obs
    return VectorStep(
        obs[name],
        final_obs[name],
        step.reward[rows],
        step.terminated[rows],
        step.truncated[rows],
        step.valid[rows],
        (),
        None if step.waiting is None else step.waiting[rows],
    )


def of_group(experience: Any, name: str) -> Any:
    """Return the buffer of one group; of several shards, the list of theirs."""
    if isinstance(experience, Sequence):
        return [one.groups[name] for one in experience]
    return experience.groups[name]
