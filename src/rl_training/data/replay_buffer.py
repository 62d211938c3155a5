"""Off-policy storage: a ring of transitions in which every observation is stored once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.data import finite
from rl_training.data.device_copy import DeviceCopy
from rl_training.data.obs_store import ObsStore, own_array
from rl_training.data.sum_tree import SumTree
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Array, Obs, ObsSpec, VectorStep

_TERMINATED, _ENDED, _VALID = 1, 2, 4
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Prioritization:
    """Proportional prioritised replay (Schaul et al. 2016, arXiv:1511.05952)."""

    alpha: float = 0.6
    """How much priorities matter: 0 is uniform, 1 in proportion."""
    epsilon: float = 1e-6
    """Added to every error, so that nothing is never seen again."""


class ReplayBuffer:
    """The last ``capacity`` transitions of ``num_envs`` environments, allocated once.

    The successor of a stored observation is the next row of the ring. Only where an episode ended
    is there another, its true final observation, kept in a pool beside the ring. The row after
    the newest one holds the observation the environments stand at, and is never sampled.
    Where observations are stacks of images (``frame_stack``), each image is stored once.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritization: Prioritization | None = None,
        frame_stack: int = 1,
        device: torch.device | None = None,
    ) -> None:
        if capacity < num_envs:
            raise ConfigError(f"a replay of {capacity} transitions cannot hold {num_envs} envs")
        self.num_envs = num_envs
        self.n_step = n_step
        self.gamma = gamma
        self.rows = -(-capacity // num_envs)
        # The oldest transition's stack goes back over rows that are not sampled any more.
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
        self._filled = 0
        self._all_valid = True
        self._prioritization = prioritization
        self._tree = SumTree(self._ring * num_envs) if prioritization is not None else None
        self._max_priority = 1.0
        each = self.bytes_per_transition(obs_spec, action_spec, frame_stack=frame_stack)
        row_bytes = num_envs * each
        self._chunk_rows = max(1, _CHUNK_BYTES // row_bytes)
        self._copy = DeviceCopy(device) if device is not None else None
        self.changed_chunks: set[int] = set()
        """Chunks written to since whoever saves them cleared this."""

    def __len__(self) -> int:
        """Transitions that can be sampled (reset-only rows included, until they are skipped)."""
        return self._filled * self.num_envs

    @staticmethod
    def bytes_per_transition(
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        prioritized: bool = False,
        frame_stack: int = 1,
    ) -> int:
        """What one transition costs: its observation once, its action, and nine bytes.

        Of a stack of images it is the newest, and one byte more. Priorities cost up to 32 more:
        a tree of doubles over a power of two.
        """
        leaves = obs_spec.leaves.values()
        obs = sum(ObsStore.bytes_per_cell(leaf, frame_stack) for leaf in leaves)
        action = action_spec.size * np.dtype(action_spec.policy_dtype).itemsize
        return obs + action + 4 + 1 + 4 + (32 if prioritized else 0)

    @staticmethod
    def copied_bytes_per_transition(
        obs_spec: ObsSpec, action_spec: ActionSpec, *, frame_stack: int = 1
    ) -> int:
        """What one costs again on an accelerator: its observation and its action."""
        each = ReplayBuffer.bytes_per_transition(obs_spec, action_spec, frame_stack=frame_stack)
        return each - 9

    @property
    def nbytes(self) -> int:
        """Bytes taken now; only the pool of final observations grows."""
        parts = [*tree_leaves(self._obs), self._actions, self._rewards, self._flags]
        parts += [self._final_row, *([self._tree] if self._tree is not None else [])]
        return int(sum(part.nbytes for part in parts))

    @property
    def _pool_size(self) -> int:
        return len(tree_leaves(self._obs)[0].pool)

    # -- writing -------------------------------------------------------------------------------

    def add(self, obs: Obs, action: Array, record: Mapping[str, Tensor], step: VectorStep) -> None:
        """Append one step of every environment; the oldest row makes room."""
        if record:
            raise ValueError(f"a replay buffer stores no {sorted(record)}")
        t = self._head
        self._write_obs(t, obs)
        self._actions[t] = action
        self._rewards[t] = step.reward
        ended = step.terminated | step.truncated
        any_ended, all_valid = bool(ended.any()), bool(step.valid.all())
        if all_valid and not any_ended:
            self._flags[t] = _VALID
        else:
            self._flags[t] = _TERMINATED * step.terminated + _ENDED * ended + _VALID * step.valid
            self._all_valid = self._all_valid and all_valid
        self._head = (t + 1) % self._ring
        self._filled = min(self._filled + 1, self.rows)
        self._forget(self._head)
        if any_ended:
            for env in np.flatnonzero(ended):
                if not self._goes_on_anyway(step, int(env)):
                    self._keep_final(t, int(env), step.final_obs, source=int(env))
        self._write_obs(self._head, step.obs)
        if self._copy is not None:
            self._copy.note_row()
        self.changed_chunks.update((t // self._chunk_rows, self._head // self._chunk_rows))
        if self._tree is not None:
            cells = np.arange(self.num_envs)
            self._tree.set(t * self.num_envs + cells, np.where(step.valid, self._max_priority, 0.0))
            left = (self._head - self.rows - 1) % self._ring
            self._tree.set(left * self.num_envs + cells, np.zeros(self.num_envs))

    def episode_goes_on(self, t: int) -> Array:
        """Whether the episodes of row ``t`` go on after it."""
        goes_on: Array = self._flags[t] & (_ENDED | _VALID) == _VALID
        return goes_on

    def is_valid(self, cells: Array) -> Array:
        """Whether cells hold transitions that may be learnt from."""
        valid: Array = self._flags.reshape(-1)[cells] & _VALID > 0
        return valid

    def _write_obs(self, t: int, obs: Obs) -> None:
        if isinstance(obs, dict):
            for key, leaf in obs.items():
                self._obs[key].write(t, leaf)
        else:
            self._obs.write(t, obs)

    def _goes_on_anyway(self, step: VectorStep, env: int) -> bool:
        """Whether an ended episode's successor is the next row all the same: a life was lost."""
        if self._frame_stack == 1:
            return False
        pairs = zip(tree_leaves(step.final_obs), tree_leaves(step.obs), strict=True)
        return all(np.array_equal(final[env], obs[env]) for final, obs in pairs)

    def _forget(self, t: int) -> None:
        """Give the final observations of a row back to the pool."""
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
        """A row of the pool for the transition at ``t``."""
        if not self._free:
            size = self._pool_size
            tree_map(ObsStore.grow_pool, self._obs)
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        self._final_row[t, env] = row
        self._rows_with_finals.add(t)
        if self._copy is not None:
            self._copy.note_final(row)
        return row

    # -- reading -------------------------------------------------------------------------------

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Draw transitions with replacement.

        ``rewards`` is the n-step return, ``next_obs`` the true successor of its last step and
        ``discounts`` what its value is to be multiplied by (0 after a termination), so that

            target = rewards + discounts V(next_obs)

        The sum ends early where the episode does, and where the ring's newest row is reached.
        With prioritisation ``weights`` corrects for it (largest 1) by the exponent ``beta``.
        """
        cells, weights = self._draw(batch_size, generator, beta)
        batch = self._gather(cells)
        batch["cells"] = cells
        batch["weights"] = torch.from_numpy(weights)
        return batch

    def _draw(
        self, batch_size: int, generator: torch.Generator, beta: float
    ) -> tuple[Array, Array]:
        if self._tree is None:
            return self._draw_uniform(batch_size, generator), np.ones(batch_size, np.float32)
        if self._tree.total <= 0:
            raise ValueError("the replay buffer holds nothing to sample")
        uniform = torch.rand(batch_size, generator=generator, dtype=torch.float64).numpy()
        cells = self._tree.find(uniform * self._tree.total)
        # w = (N P)^-beta, divided by the largest; N cancels out of that quotient.
        priorities = self._tree.get(cells)
        weights = (priorities / priorities.min()) ** -beta
        return cells, weights.astype(np.float32)

    def _draw_uniform(self, batch_size: int, generator: torch.Generator) -> Array:
        if not self._filled:
            raise ValueError("the replay buffer holds nothing to sample")
        oldest = (self._head - self._filled) * self.num_envs
        cells = self._draw_cells(batch_size, oldest, generator)
        if self._all_valid:
            return cells
        flags = self._flags.reshape(-1)
        kept = cells[flags[cells] & _VALID > 0]
        if not len(kept):
            stored = flags[(oldest + np.arange(len(self))) % len(flags)]
            if not (stored & _VALID).any():
                raise ValueError("the replay buffer holds nothing to sample")
        while len(kept) < batch_size:
            more = self._draw_cells(batch_size - len(kept), oldest, generator)
            kept = np.concatenate((kept, more[flags[more] & _VALID > 0]))
        return kept

    def _draw_cells(self, count: int, oldest: int, generator: torch.Generator) -> Array:
        drawn: Array = torch.randint(len(self), (count,), generator=generator).numpy()
        return (oldest + drawn) % (self._ring * self.num_envs)

    def _gather(self, cells: Array) -> dict[str, Any]:
        rewards, flags = self._rewards.reshape(-1), self._flags.reshape(-1)
        total = len(rewards)
        last = cells
        returns = rewards.take(cells)
        discounts = np.full(len(cells), self.gamma, np.float32)
        going_on: Any = True
        for _ in range(1, self.n_step):
            following = (last + self.num_envs) % total
            at_newest = following // self.num_envs == self._head
            going_on = going_on & (flags.take(last) & _ENDED == 0) & ~at_newest
            last = np.where(going_on, following, last)
            returns = returns + np.where(going_on, discounts * rewards.take(last), 0)
            discounts = np.where(going_on, discounts * np.float32(self.gamma), discounts)
        discounts[flags.take(last) & _TERMINATED > 0] = 0.0
        finals = self._final_row.reshape(-1).take(last)
        return {
            **self._take(cells, last, finals),
            "rewards": torch.from_numpy(returns),
            "discounts": torch.from_numpy(discounts),
        }

    def _take(self, cells: Array, last: Array, finals: Array) -> dict[str, Any]:
        """Observations and actions at ``cells``, and the true successors of ``last``."""
        following = (last + self.num_envs) % (self._ring * self.num_envs)
        if self._copy is not None:
            self._copy.sync(self._obs, self._actions, self._head)
            return self._copy.take(self._obs, cells, following, last, finals)
        actions = self._actions.reshape(-1, *self._actions.shape[2:])
        return {
            "obs": tree_map(lambda store: torch.from_numpy(store.take(cells)), self._obs),
            "actions": torch.from_numpy(actions.take(cells, axis=0)),
            "next_obs": tree_map(
                lambda store: torch.from_numpy(store.take_next(following, last, finals)), self._obs
            ),
        }

    def update_priorities(self, cells: Array, errors: Tensor) -> None:
        """Set the priorities of sampled transitions from their TD errors."""
        if self._tree is None or self._prioritization is None:
            raise ValueError("this replay buffer is not prioritised")
        rule = self._prioritization
        raw = errors.detach().abs().cpu().numpy().astype(np.float64) + rule.epsilon
        priorities = raw**rule.alpha
        self._max_priority = max(self._max_priority, float(priorities.max()))
        self._tree.set(cells, priorities)

    def go_on_from(self, obs: Obs, *, exact: bool = True) -> None:
        """The environments stand at ``obs``, which may not be the newest observation stored.

        Where it is not, that one is kept as the last transition's final observation, so that no
        episode goes on in another. Unless they stand there ``exact``-ly, all episodes are new,
        whatever they show.
        """
        if not self._filled:
            return
        newest = (self._head - 1) % self._ring
        tree_map(lambda store: store.settle(self._head), self._obs)
        standing = self._head * self.num_envs + np.arange(self.num_envs)
        stored = tree_map(lambda store: store.take(standing), self._obs)
        pairs = zip(tree_leaves(stored), tree_leaves(obs), strict=True)
        same = np.logical_and.reduce([(a == b).reshape(self.num_envs, -1).all(1) for a, b in pairs])
        same &= exact
        for env in np.flatnonzero(~same & (self._final_row[newest] < 0)):
            self._flags[newest, env] |= _ENDED
            self._keep_final(newest, int(env), stored, source=int(env))
            self.changed_chunks.add(newest // self._chunk_rows)

    def check_finite(
        self, rows: int, first_step: int, episode_lengths: Array | None = None
    ) -> None:
        """Raise `NonFiniteError` for a NaN or infinity in the newest ``rows``, naming its origin.

        ``episode_lengths`` are the steps so far of the environments' episodes; without them the
        error may name too early a step of an episode that began before what is stored.
        """
        count = min(rows, self._filled)
        fields = self._newest_fields(count)
        if not all(field.is_finite() for field in fields):
            stored = self._flags[(self._head - self._filled + np.arange(self._filled)) % self._ring]
            valid = stored & _VALID > 0
            holds_all = int(valid[: self._filled - count].sum()) == first_step and count == rows
            before = np.zeros(self.num_envs, np.int64) if holds_all else None
            ended = stored & _ENDED > 0
            episodes = finite.Episodes(ended, valid, before, episode_lengths, not valid.all())
            raise finite.non_finite_error(
                fields, episodes, first_row=rows - count, first_step=first_step
            )

    def _newest_fields(self, count: int) -> list[finite.Field]:
        """The newest ``count`` rows, and what is observed after them."""
        shown = (self._head - count + np.arange(count + 1)) % self._ring
        recent = shown[:-1]
        finals = self._final_row[recent]
        has_final = finals >= 0
        fields: list[finite.Field] = []
        keys, stores = zip(*self._named_stores(), strict=True)
        for name, store in zip(finite.named_leaves(keys), stores, strict=True):
            pool = store.pool
            if pool.dtype.kind != "f":
                continue
            fields.append(finite.Field(finite.OBSERVATION, name, store.rows[shown]))
            if has_final.any():
                mask = has_final.reshape(*finals.shape, *(1,) * (pool.ndim - 1))
                at_end = np.where(mask, pool[finals], 0)
                fields.append(finite.Field(finite.FINAL, f"final {name}", at_end))
        fields.append(finite.Field(finite.ACTION, "action", self._actions[recent]))
        fields.append(finite.Field(finite.REWARD, "reward", self._rewards[recent]))
        return fields

    # -- state: the ring in chunks of rows, so that only what changed is written anew -----------

    @property
    def num_chunks(self) -> int:
        """Chunks that hold something."""
        used = self._ring if self._filled == self.rows else self._head + 1
        return -(-used // self._chunk_rows)

    def chunk_state(self, index: int) -> dict[str, Any]:
        """The rows of a chunk with their final observations, complete in itself."""
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

    def _named_stores(self) -> Iterable[tuple[str, ObsStore]]:
        return self._obs.items() if isinstance(self._obs, dict) else [("", self._obs)]

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Bring a chunk back."""
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
        start = index * self._chunk_rows
        return slice(start, min(start + self._chunk_rows, self._ring))

    def ring_state(self) -> dict[str, Any]:
        """What is not in the chunks: where the ring stands, and the priorities."""
        return {
            "shape": [self._ring, self.num_envs, self._chunk_rows],
            "position": [self._head, self._filled],
            "max_priority": self._max_priority,
            "priorities": self._tree.leaves() if self._tree is not None else None,
        }

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Bring that back, before the chunks."""
        shape = [self._ring, self.num_envs, self._chunk_rows]
        if list(state["shape"]) != shape:
            raise ConfigError(
                f"the saved replay has the shape {list(state['shape'])}, this one {shape}:"
                " buffer_size, num_envs and the stack of frames must not change"
            )
        self._head, self._filled = (int(x) for x in state["position"])
        self._max_priority = float(state["max_priority"])
        if self._copy is not None:
            self._copy.forget()
        self._final_row[:] = -1
        self._rows_with_finals.clear()
        self._free = list(range(self._pool_size - 1, -1, -1))
        tree_map(ObsStore.forget, self._obs)
        if self._tree is not None:
            self._tree.load(own_array(state["priorities"]))
