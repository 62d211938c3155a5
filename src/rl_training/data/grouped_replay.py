"""The replays of several groups of agents as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_training.data.grouped_rollout import rows_of_groups, step_of_group
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.types import Array, VectorStep


class GroupedReplay:
    """A `ReplayBuffer` for each group; rows of a step are divided among them.

    All have equally many rows, so that a chunk is the same steps of every group.
    """

    def __init__(self, groups: Mapping[str, ReplayBuffer]) -> None:
        self.groups = dict(groups)
        self._rows = rows_of_groups(self.groups)
        self.changed_chunks: set[int] = set()
        """Chunks that changed; the code that saves them clears this set."""
        chunk_rows = min(one.chunk_rows for one in self._all)
        for one in self._all:
            one.chunk_rows, one.changed_chunks = chunk_rows, self.changed_chunks

    @property
    def _all(self) -> list[ReplayBuffer]:
        return list(self.groups.values())

    @property
    def first_env(self) -> int:
        """Index in the run of the first of these environments, for errors."""
        return self._all[0].first_env

    @first_env.setter
    def first_env(self, index: int) -> None:
        for one in self._all:
            one.first_env = index

    def __len__(self) -> int:
        """Return the number of transitions of all groups, rows that are not valid included."""
        return sum(map(len, self._all))

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays of every group."""
        for one in self._all:
            yield from one.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(one.nbytes for one in self._all)

    def add(
        self,
        obs: Mapping[str, Any],
        action: Mapping[str, Array],
        record: Mapping[str, Mapping[str, Any]],
        step: VectorStep,
    ) -> None:
        """Append one step of every row."""
        for name, one in self.groups.items():
            own = step_of_group(step, name, self._rows[name])
            one.add(obs[name], action[name], record.get(name, {}), own)

    def resume_at(self, obs: Mapping[str, Any], *, exact: bool = True) -> None:
        """Continue from ``obs``, as `TransitionRing.resume_at` does."""
        for name, one in self.groups.items():
            one.resume_at(obs[name], exact=exact)

    def check_finite(
        self, rows: int, first_step: int, episode_lengths: Array | None = None
    ) -> None:
        """Raise `NonFiniteError` if the newest ``rows`` contain a NaN or infinity."""
        for name, one in self.groups.items():
            own = None if episode_lengths is None else episode_lengths[self._rows[name]]
            one.check_finite(rows, first_step, own)

    # -- state ---------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        """Number of chunks in use."""
        return self._all[0].num_chunks

    def chunk_state(self, index: int) -> dict[str, Any]:
        """Return a chunk of every group."""
        return {"groups": {name: one.chunk_state(index) for name, one in self.groups.items()}}

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore a chunk."""
        for name, one in self.groups.items():
            one.load_chunk(index, state["groups"][name])

    def ring_state(self) -> dict[str, Any]:
        """Return the state that is not in the chunks."""
        states = {name: one.ring_state() for name, one in self.groups.items()}
        ring, _, chunk_rows = next(iter(states.values()))["shape"]
        width = sum(one.num_envs for one in self._all)
        return {"shape": [ring, width, chunk_rows], "groups": states}

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that is not in the chunks; call it before `load_chunk`."""
        for name, one in self.groups.items():
            one.load_ring_state(state["groups"][name])
