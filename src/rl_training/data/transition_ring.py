"""A ring of transitions in which every observation is stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.data.obs_store import ObsStore, own_array
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Array, Obs, ObsSpec, Rows, VectorStep

TERMINATED, ENDED, VALID = 1, 2, 4
"""Bits of a transition's flags."""
_CHUNK_BYTES = 1 << 20


def rows_per_chunk(num_envs: int, each: int) -> int:
    """Return the rows of a chunk, given the bytes of each transition."""
    return max(1, _CHUNK_BYTES // (num_envs * each))


class TransitionRing:
    """The last ``capacity`` transitions of ``num_envs`` environments, allocated once.

    A cell is one environment's entry in one row; its index is row x ``num_envs`` + environment. The
    successor of an observation is in the next row of the ring. Where an episode ended, the
    successor is its true final observation, stored in a separate pool. The row after the newest
    transitions holds the environments' current observations. Where observations are stacks of
    images (``frame_stack``), each image is stored once.

    For checkpoints the ring is divided into chunks of rows; only chunks that changed are written.
    """

    first_env = 0
    """Index in the run of the first of these environments, for errors."""
    agents: Sequence[str] = ()
    """Of several agents: those of each environment, a row for each."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        frame_stack: int = 1,
    ) -> None:
        if capacity < num_envs:
            raise ConfigError(
                f"a replay of {capacity} transitions is too small for {num_envs} environments:"
                " raise buffer_size"
            )
        self.num_envs = num_envs
        self.rows = -(-capacity // num_envs)
        # Rows that are no longer sampled, but whose images are part of the oldest stacks.
        self._ring = self.rows + frame_stack
        self._frame_stack = frame_stack
        shape = (self._ring, num_envs)
        stores = {
            key: ObsStore(leaf, self._ring, num_envs, frame_stack)
            for key, leaf in obs_spec.leaves.items()
        }
        self._obs: Any = stores if obs_spec.is_dict else stores[""]
        self._actions = np.zeros((*shape, *action_spec.shape), action_spec.policy_dtype)
        self._rewards = np.zeros(shape, np.float32)
        self._flags = np.zeros(shape, np.uint8)
        self._final_row = np.full(shape, -1, np.int32)
        self._free = list(range(self._pool_size - 1, -1, -1))
        self._rows_with_finals: set[int] = set()
        self._head = 0
        """Row that the next transitions are written to."""
        self._filled = 0
        """Rows that hold transitions."""
        self._all_valid = True
        each = self.bytes_per_transition(obs_spec, action_spec, frame_stack=frame_stack)
        self.chunk_rows = rows_per_chunk(num_envs, each)
        """Rows of a chunk; not to be changed once transitions are stored."""
        self.changed_chunks: set[int] = set()
        """Chunks that changed; the code that saves them clears this set."""

    def __len__(self) -> int:
        """Return the number of transitions, including reset-only rows."""
        return self._filled * self.num_envs

    @staticmethod
    def bytes_per_transition(
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        prioritized: bool = False,
        frame_stack: int = 1,
    ) -> int:
        """Return the bytes per transition: one observation, one action and nine bytes.

        Of a stack of images only the newest is counted, and one more byte. Priorities, which are
        not counted, take up to 32 bytes: a tree of doubles over a power of two.
        """
        leaves = obs_spec.leaves.values()
        obs = sum(ObsStore.bytes_per_cell(leaf, frame_stack) for leaf in leaves)
        action = action_spec.size * np.dtype(action_spec.policy_dtype).itemsize
        return obs + action + 4 + 1 + 4 + (32 if prioritized else 0)

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays of the ring; only the pool of final observations can grow."""
        for store in tree_leaves(self._obs):
            yield from store.arrays()
        yield from (self._actions, self._rewards, self._flags, self._final_row)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(array.nbytes for array in self.arrays())

    @property
    def _pool_size(self) -> int:
        return len(tree_leaves(self._obs)[0].pool)

    def _named_stores(self) -> Iterable[tuple[str, ObsStore]]:
        return self._obs.items() if isinstance(self._obs, dict) else [("", self._obs)]

    # -- writing -------------------------------------------------------------------------------

    def add(self, obs: Obs, action: Array, record: Mapping[str, Tensor], step: VectorStep) -> None:
        """Append one step of every environment in place of the oldest row."""
        if record:
            raise ValueError(f"a replay buffer cannot store {sorted(record)} with a step")
        t = self._head
        self._write_obs(t, obs)
        self._actions[t] = action
        self._rewards[t] = step.reward
        ended = step.terminated | step.truncated
        any_ended, all_valid = bool(ended.any()), bool(step.valid.all())
        if all_valid and not any_ended:
            self._flags[t] = VALID
        else:
            self._flags[t] = TERMINATED * step.terminated + ENDED * ended + VALID * step.valid
            self._all_valid = self._all_valid and all_valid
        self._head = (t + 1) % self._ring
        self._filled = min(self._filled + 1, self.rows)
        self._free_finals(self._head)
        if any_ended:
            for env in np.flatnonzero(ended):
                if not self._continues_anyway(step, int(env)):
                    self._keep_final(t, int(env), step.final_obs, source=int(env))
        self._write_obs(self._head, step.obs)
        self.changed_chunks.update((t // self.chunk_rows, self._head // self.chunk_rows))

    def add_episode(self, obs: Obs, actions: Array, rewards: Array, *, terminated: bool) -> None:
        """Append a whole recorded episode of the only environment, without wrapping round.

        ``obs`` has one row more than there are actions. The last observation is the true successor
        of the last transition, whose discount is zero only if the episode ``terminated``.
        """
        count, start = len(rewards), self._head
        if self.num_envs != 1 or start + count > self.rows:
            raise ValueError(
                f"an episode of {count} steps does not fit into rows {start} to {self.rows} of a"
                f" replay of {self.num_envs} environments"
            )
        rows, last = slice(start, start + count), start + count - 1
        tree_map(lambda store, leaf: store.write_rows(start, leaf[:-1]), self._obs, obs)
        self._actions[rows, 0] = actions
        self._rewards[rows, 0] = rewards
        self._flags[rows, 0] = VALID
        self._flags[last, 0] |= ENDED | (TERMINATED if terminated else 0)
        self._head = (start + count) % self._ring
        self._filled += count
        self._keep_final(last, 0, obs, source=-1)
        self.changed_chunks.update(range(start // self.chunk_rows, last // self.chunk_rows + 1))

    def _write_obs(self, t: int, obs: Obs) -> None:
        if isinstance(obs, dict):
            for key, leaf in obs.items():
                self._obs[key].write(t, leaf)
        else:
            self._obs.write(t, obs)

    def _continues_anyway(self, step: VectorStep, env: int) -> bool:
        """Return whether the next row is the true successor: only a life was lost."""
        if self._frame_stack == 1:
            return False
        pairs = zip(tree_leaves(step.final_obs), tree_leaves(step.obs), strict=True)
        return all(np.array_equal(final[env], obs[env]) for final, obs in pairs)

    def _free_finals(self, t: int) -> None:
        """Mark the pool rows of a row's final observations as free."""
        if t not in self._rows_with_finals:
            return
        self._rows_with_finals.remove(t)
        used = self._final_row[t]
        self._free += [int(row) for row in used[used >= 0]]
        used[:] = -1

    def _keep_final(self, t: int, env: int, final_obs: Any, source: int) -> None:
        row, cell = self._new_final(t, env), t * self.num_envs + env
        tree_map(
            lambda store, leaf: store.keep_final(row, cell, leaf[source]), self._obs, final_obs
        )

    def _new_final(self, t: int, env: int) -> int:
        """Allocate a row of the pool for the transition at ``t``."""
        if not self._free:
            size = self._pool_size
            tree_map(ObsStore.grow_pool, self._obs)
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        self._final_row[t, env] = row
        self._rows_with_finals.add(t)
        return row

    def resume_at(self, obs: Obs, *, exact: bool = True) -> None:
        """Continue from ``obs``, which may differ from the stored current observations.

        Where they differ, the stored observation becomes the final observation of the last
        transition, so that no sequence contains two episodes. Without ``exact`` (the environments
        were not restored exactly) this is done for all environments.
        """
        if not self._filled:
            return
        newest = (self._head - 1) % self._ring
        tree_map(lambda store: store.set_newest_row(self._head), self._obs)
        current = self._head * self.num_envs + np.arange(self.num_envs)
        stored = tree_map(lambda store: store.take(current), self._obs)
        pairs = zip(tree_leaves(stored), tree_leaves(obs), strict=True)
        same = np.logical_and.reduce([(a == b).reshape(self.num_envs, -1).all(1) for a, b in pairs])
        same &= exact
        for env in np.flatnonzero(~same & (self._final_row[newest] < 0)):
            self._flags[newest, env] |= ENDED
            self._keep_final(newest, int(env), stored, source=int(env))
            self.changed_chunks.add(newest // self.chunk_rows)

    # -- reading -------------------------------------------------------------------------------

    def episode_continues(self, t: int) -> Array:
        """Return, for every environment, whether its episode continues after row ``t``."""
        continues: Array = self._flags[t] & (ENDED | VALID) == VALID
        return continues

    def is_valid(self, cells: Array) -> Array:
        """Return which cells hold transitions to learn from."""
        valid: Array = self._flags.reshape(-1)[cells] & VALID > 0
        return valid

    def observations(self, cells: Array) -> Any:
        """Return copies of the observations of ``cells``, as tensors."""
        return tree_map(lambda store: torch.from_numpy(store.take(cells)), self._obs)

    def newest_observations(self, count: int) -> Rows:
        """Return copies of the observations of the newest rows, and which are valid.

        They are raw, (rows x environments, ...), oldest first; ``count`` rows, or fewer where fewer
        are stored.
        """
        count = min(count, self._filled)
        rows = (self._head - count + np.arange(count)) % self._ring
        cells = (rows[:, None] * self.num_envs + np.arange(self.num_envs)).reshape(-1)
        return Rows(self.observations(cells), torch.from_numpy(self.is_valid(cells)))

    # -- state ---------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        """Number of chunks in use."""
        used = self._ring if self._filled == self.rows else self._head + 1
        return -(-used // self.chunk_rows)

    def chunk_state(self, index: int) -> dict[str, Any]:
        """Return the rows of a chunk and their final observations."""
        rows = self._chunk(index)
        finals = self._final_row[rows]
        kept = finals[finals >= 0]
        state: dict[str, Any] = {
            "actions": self._actions[rows],
            "rewards": self._rewards[rows],
            "flags": self._flags[rows],
            "has_final": finals >= 0,
        }
        for key, store in self._named_stores():
            state[f"obs/{key}"] = store.chunk_state(rows, kept)
        return state

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore a chunk."""
        rows = self._chunk(index)

        def restore(grid: Array, value: Any) -> None:
            grid[rows] = own_array(value)

        restore(self._actions, state["actions"])
        restore(self._rewards, state["rewards"])
        restore(self._flags, state["flags"])
        self._all_valid = False
        places = np.argwhere(own_array(state["has_final"]))
        pool_rows = [self._new_final(rows.start + int(t), int(env)) for t, env in places]
        for key, store in self._named_stores():
            store.load_chunk(rows, pool_rows, state[f"obs/{key}"])

    def _chunk(self, index: int) -> slice:
        start = index * self.chunk_rows
        return slice(start, min(start + self.chunk_rows, self._ring))

    def ring_state(self) -> dict[str, Any]:
        """Return the state that is not in the chunks: the shape of the ring and its position."""
        return {
            "shape": [self._ring, self.num_envs, self.chunk_rows],
            "position": [self._head, self._filled],
        }

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that is not in the chunks; call it before `load_chunk`."""
        shape = [self._ring, self.num_envs, self.chunk_rows]
        if list(state["shape"]) != shape:
            raise ConfigError(
                f"the saved replay has the shape {list(state['shape'])}, this one {shape}:"
                " buffer_size, num_envs and the frame stack must not change on resume"
            )
        self._head, self._filled = (int(x) for x in state["position"])
        self._final_row[:] = -1
        self._rows_with_finals.clear()
        self._free = list(range(self._pool_size - 1, -1, -1))
        tree_map(ObsStore.forget, self._obs)
