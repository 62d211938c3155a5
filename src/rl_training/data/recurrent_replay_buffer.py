"""Replay for recurrent networks: a ring of transitions, sampled as sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.data.obs_store import own_array
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Array, Obs, ObsSpec, VectorStep

_PER_STATE = 208
"""Bytes of Python objects per stored state, besides its numbers."""
_PER_START = 16
"""Bytes per start of a sequence in `_Starts`: eight, and eight of spare capacity."""


class _Starts:
    """A queue of places where sequences begin, in ascending order.

    A place counts all transitions ever added; its cell in the ring is the remainder. The oldest
    places are removed when their transitions are overwritten.
    """

    def __init__(self) -> None:
        self._places = np.empty(64, np.int64)
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def arrays(self) -> Iterator[Array]:
        """Yield the array it owns."""
        yield self._places

    def extend(self, places: Array) -> None:
        """Append places, all larger than those in the queue."""
        if self._end + len(places) > len(self._places):
            held = self._places[self._first : self._end]
            self._places = np.empty(max(64, 2 * (len(held) + len(places))), np.int64)
            self._places[: len(held)] = held
            self._first, self._end = 0, len(held)
        self._places[self._end : self._end + len(places)] = places
        self._end += len(places)

    def drop_before(self, place: int) -> None:
        """Remove all places below ``place``."""
        self._first += int(np.searchsorted(self._places[self._first : self._end], place))

    def take(self, index: Array) -> Array:
        """Return the places with these indices, 0 the oldest."""
        places: Array = self._places[self._first + index]
        return places


class RecurrentReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose samples are sequences, with the recurrent states at their starts.

    Each environment's transitions are divided into sequences of ``sequence_length`` steps; the
    first and last sequence of an episode may be shorter, and no sequence contains two episodes. The
    recurrent state before a sequence is stored with it, except at the start of an episode, where it
    is zero. A stored state was computed by an older network. So in sequences that begin within an
    episode, the first ``burn_in`` steps only update the state and have ``mask`` 0. Stored states
    and burn-in follow R2D2 (Kapturowski et al. 2019); here gradients flow through the burn-in, too.
    The first sequence of an environment's k-th episode is k mod ``sequence_length`` steps shorter,
    so that burn-in does not always fall on the same steps of episodes.

    A step is learnt from if it is valid, not burn-in, and the start of its sequence is stored.
    `sample` draws every sequence that has such a step with the same probability and trains each of
    its steps once, so that all steps are trained equally often.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        sequence_length: int,
        state_size: int,
        burn_in: int = 0,
        gamma: float = 0.99,
        frame_stack: int = 1,
    ) -> None:
        if sequence_length < 1 or not 0 <= burn_in < sequence_length:
            raise ConfigError(
                "'burn_in' must be at least 0 and below 'sequence_length';"
                f" got burn_in {burn_in} and sequence_length {sequence_length}"
            )
        if capacity < 2 * sequence_length * num_envs:
            raise ConfigError(
                f"a replay of {capacity} transitions is too small for two sequences of"
                f" {sequence_length} steps from each of {num_envs} environments: raise buffer_size"
            )
        super().__init__(
            capacity, num_envs, obs_spec, action_spec, gamma=gamma, frame_stack=frame_stack
        )
        self.sequence_length = sequence_length
        self.state_size = state_size
        self.burn_in = burn_in
        self._left = np.zeros(num_envs, np.int64)
        """Steps until each environment's current sequence has its full length."""
        self._episodes = np.zeros(num_envs, np.int64)
        self._offsets = np.zeros((self._ring, num_envs), np.int32)
        """Index of each transition in its sequence."""
        self._states: dict[int, Array] = {}
        """Recurrent states by cell, for sequences that begin within an episode."""
        self._episode_starts = _Starts()
        """Starts of sequences that have a step to learn from and begin with their episode."""
        self._later_starts = _Starts()
        """Starts of sequences that have a step to learn from and begin within their episode."""
        self._rows_added = 0
        """Number of rows ever added."""
        self._rows_indexed = 0
        """Number of those rows whose sequence starts are in the two queues."""

    @staticmethod
    def bytes_per_step(
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        sequence_length: int,
        state_size: int,
        frame_stack: int = 1,
    ) -> int:
        """Return the bytes per transition: the base's, its index, its share of a stored state."""
        plain = ReplayBuffer.bytes_per_transition(obs_spec, action_spec, frame_stack=frame_stack)
        return plain + 4 + -(-(4 * state_size + _PER_STATE + _PER_START) // sequence_length)

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays that hold the ring and the starts of sequences."""
        yield from super().arrays()
        yield self._offsets
        yield from self._episode_starts.arrays()
        yield from self._later_starts.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return super().nbytes + len(self._states) * (4 * self.state_size + _PER_STATE)

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Append one step of every environment; ``record["state"]`` is the state before it."""
        t, before = self._head, (self._head - 1) % self._ring
        remaining = dict(record)
        state = remaining.pop("state")
        # An empty replay may begin in the middle of an episode.
        known = torch.as_tensor(state).cpu().numpy()
        in_episode = self.episode_continues(before) if self._filled else known.any(1)
        grows = in_episode & (self._left > 0) & (self._filled > 0)
        self._offsets[t] = np.where(grows, self._offsets[before] + 1, 0)
        shorter = np.where(in_episode, 0, self._episodes % self.sequence_length)
        self._left = np.where(grows, self._left, self.sequence_length - shorter) - 1
        # The reset-only rows of NEXT_STEP vectors are between episodes and begin none.
        self._episodes += ~in_episode & step.valid
        first_cell = t * self.num_envs
        for env in range(self.num_envs):
            self._states.pop(first_cell + env, None)
        for env in np.flatnonzero(in_episode & ~grows).tolist():
            self._states[first_cell + env] = known[env].astype(np.float32)
        super().add(obs, action, remaining, step)
        self._rows_added += 1

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Sample sequences that have a step to learn from, uniformly and with replacement.

        All tensors are (time, batch, ...). ``obs`` is one step longer than the others and ends with
        the true successor of the last step; ``mask`` is 0 on padding and burn-in;
        ``episode_starts`` is 1 where an episode begins; ``state`` is the recurrent state before the
        first step; the rest is as in the base. A sequence that is not complete is returned as far
        as it is stored.
        """
        del beta
        first, begins_episode = self._draw_starts(batch_size, generator)
        steps = np.arange(self.sequence_length)[:, None]
        cells = (first + steps * self.num_envs) % self._offsets.size
        offsets = self._offsets.reshape(-1)
        # Behind an incomplete sequence are the oldest rows, whose indices may seem to continue it.
        mask = np.logical_and.accumulate((offsets[cells] == steps) & self._is_stored(cells))
        last = mask.sum(0) - 1
        cells = np.where(mask, cells, cells[last, np.arange(batch_size)])
        flat = self._gather(cells.reshape(-1))
        shape = (self.sequence_length, batch_size)
        taken: dict[str, Any] = {
            key: tree_map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), value)
            for key, value in flat.items()
        }
        following = taken.pop("next_obs")
        taken["obs"] = tree_map(
            lambda here, after: torch.cat((here[:1], after)), taken["obs"], following
        )
        starts = np.zeros(shape, bool)
        starts[0] = begins_episode
        mask[: self.burn_in, ~begins_episode] = False
        return {
            **taken,
            "mask": torch.from_numpy(mask.astype(np.float32)),
            "episode_starts": torch.from_numpy(starts),
            "state": self._states_at(first),
            "cells": first,
        }

    def _draw_starts(self, count: int, generator: torch.Generator) -> tuple[Array, Array]:
        """Return the first cells of sampled sequences, and whether their episodes begin there."""
        if self._rows_indexed != self._rows_added:
            self._index_new_rows()
        num_first = len(self._episode_starts)
        total = num_first + len(self._later_starts)
        if not total:
            raise ValueError("the replay buffer contains no transition to sample")
        drawn: Array = torch.randint(total, (count,), generator=generator).numpy()
        begins_episode = drawn < num_first
        first = np.empty(count, np.int64)
        first[begins_episode] = self._episode_starts.take(drawn[begins_episode])
        first[~begins_episode] = self._later_starts.take(drawn[~begins_episode] - num_first)
        return first % self._offsets.size, begins_episode

    def _index_new_rows(self) -> None:
        """Update both queues: remove overwritten starts, append those of new rows."""
        oldest = (self._rows_added - self._filled) * self.num_envs
        self._episode_starts.drop_before(oldest)
        self._later_starts.drop_before(oldest)
        begin = max(self._rows_indexed * self.num_envs, oldest)
        places = np.arange(begin, self._rows_added * self.num_envs)
        cells = places % self._offsets.size
        offsets = self._offsets.reshape(-1)[cells]
        # The first step to learn from: the first of an episode, else the first after the burn-in.
        first = places[(offsets == 0) & self.is_valid(cells)]
        self._episode_starts.extend(first[~self._in_episode(first)])
        later = places[offsets == self.burn_in] - self.burn_in * self.num_envs
        later = later[later >= oldest]
        self._later_starts.extend(later[self._in_episode(later)])
        self._rows_indexed = self._rows_added

    def _in_episode(self, starts: Array) -> Array:
        """Return which sequences begin within an episode: those with a stored state."""
        cells = (starts % self._offsets.size).tolist()
        return np.array([cell in self._states for cell in cells], bool)

    def _is_stored(self, cells: Array) -> Array:
        """Return which cells hold transitions, not the current observation or overwritten rows."""
        stored: Array = (self._head - 1 - cells // self.num_envs) % self._ring < self._filled
        return stored

    def _states_at(self, cells: Array) -> Tensor:
        states = np.zeros((len(cells), self.state_size), np.float32)
        for row, cell in enumerate(cells.tolist()):
            if cell in self._states:
                states[row] = self._states[cell]
        return torch.from_numpy(states)

    # -- state ---------------------------------------------------------------------------------

    def chunk_state(self, index: int) -> dict[str, Any]:
        """Return the rows of a chunk, and the sequences that begin there."""
        rows = self._chunk(index)
        first, last = rows.start * self.num_envs, rows.stop * self.num_envs
        cells = sorted(cell for cell in self._states if first <= cell < last)
        states = [self._states[cell] for cell in cells]
        return {
            **super().chunk_state(index),
            "offsets": self._offsets[rows],
            "state_cells": np.array(cells, np.int64),
            "states": np.array(states, np.float32).reshape(len(cells), self.state_size),
        }

    def ring_state(self) -> dict[str, Any]:
        """Return the state that is not in the chunks."""
        progress = {"left": self._left.tolist(), "episodes": self._episodes.tolist()}
        return {**super().ring_state(), **progress}

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that is not in the chunks; call it before `load_chunk`."""
        super().load_ring_state(state)
        self._left = np.array(state["left"], np.int64)
        self._episodes = np.array(state["episodes"], np.int64)
        self._states.clear()
        # The starts are found again from the chunks, in the same order.
        self._episode_starts, self._later_starts = _Starts(), _Starts()
        self._rows_added = self._ring + self._head
        self._rows_indexed = self._rows_added - self._filled

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore a chunk."""
        super().load_chunk(index, state)
        self._offsets[self._chunk(index)] = own_array(state["offsets"])
        cells = own_array(state["state_cells"]).tolist()
        self._states.update(zip(cells, own_array(state["states"]), strict=True))
