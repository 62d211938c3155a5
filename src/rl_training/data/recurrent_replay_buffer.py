"""Replay for networks that remember: the ring of transitions, drawn from in sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.obs_store import own_array
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.tree import tree_map
from rl_training.types import ActionSpec, Array, Obs, ObsSpec, VectorStep


class RecurrentReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose samples are sequences, with the states they began in.

    Every environment's transitions are put together in sequences of ``sequence_length`` steps as
    they come; an episode's first and last may be shorter, and none goes on in the next episode.
    What was remembered where a sequence begins is stored with it, except at the start of an
    episode, where that is nothing. It was remembered by an older network: the first ``burn_in``
    steps of a sequence within an episode are there to bring it up to date, and have ``mask`` 0
    (both as in R2D2, Kapturowski et al. 2019).
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
    ) -> None:
        super().__init__(capacity, num_envs, obs_spec, action_spec, gamma=gamma)
        self.sequence_length = sequence_length
        self.state_size = state_size
        self.burn_in = burn_in
        self._rows_added = 0
        self._offsets = np.zeros((self._ring, num_envs), np.int32)
        """How far into its sequence each transition is."""
        self._states: dict[int, Array] = {}
        """What was remembered before a cell that begins a sequence within an episode."""

    @staticmethod
    def bytes_per_step(
        obs_spec: ObsSpec, action_spec: ActionSpec, *, sequence_length: int, state_size: int
    ) -> int:
        """What one transition costs: as elsewhere, four bytes, and its share of a state."""
        plain = ReplayBuffer.bytes_per_transition(obs_spec, action_spec)
        return plain + 4 + -(-4 * state_size // sequence_length)

    @property
    def nbytes(self) -> int:
        """Bytes taken now."""
        return super().nbytes + self._offsets.nbytes + sum(s.nbytes for s in self._states.values())

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Append one step of every environment; ``record`` holds the states before it."""
        t, before = self._head, (self._head - 1) % self._ring
        remaining = dict(record)
        state = remaining.pop("state")
        # All sequences are cut at the same rows: where that is in an episode differs, so that no
        # part of episodes is always burn-in.
        is_cut = self._rows_added % self.sequence_length == 0
        self._rows_added += 1
        in_episode = np.zeros(self.num_envs, bool)
        if self._filled:
            in_episode = self.episode_goes_on(before)
        self._offsets[t] = 0 if is_cut else np.where(in_episode, self._offsets[before] + 1, 0)
        for env in range(self.num_envs):
            self._states.pop(t * self.num_envs + env, None)
        for env in np.flatnonzero(in_episode).tolist() if is_cut else ():
            held = torch.as_tensor(state[env]).cpu().numpy()
            self._states[t * self.num_envs + env] = held.astype(np.float32)
        super().add(obs, action, remaining, step)

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Draw sequences with replacement, each as likely as it is long; all (time, batch, ...).

        ``obs`` is one longer than the rest and ends in the true successor of the last step;
        ``mask`` is 0 on padding and burn-in, ``episode_starts`` 1 where an episode begins, and
        ``state`` what was remembered before the first step; the rest is as in the base.
        """
        del beta
        first = self._draw_starts(batch_size, generator)
        steps = np.arange(self.sequence_length)[:, None]
        cells = (first + steps * self.num_envs) % self._offsets.size
        offsets = self._offsets.reshape(-1)
        # A sequence that still grows is followed by the oldest rows, which may look like its own.
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
        starts[0] = [int(cell) not in self._states for cell in first]
        mask[: self.burn_in, ~starts[0]] = False
        return {
            **taken,
            "mask": torch.from_numpy(mask.astype(np.float32)),
            "episode_starts": torch.from_numpy(starts),
            "state": self._states_at(first),
            "cells": first,
        }

    def _draw_starts(self, count: int, generator: torch.Generator) -> Array:
        """Where sequences begin whose beginnings are still stored."""
        found = np.empty(0, np.int64)
        while len(found) < count:
            cells = self._draw_uniform(count - len(found), generator)
            back = self._offsets.reshape(-1)[cells].astype(np.int64)
            age = (self._head - 1 - cells // self.num_envs) % self._ring
            first = (cells - back * self.num_envs) % self._offsets.size
            found = np.concatenate((found, first[age + back < self._filled]))
        return found

    def _is_stored(self, cells: Array) -> Array:
        """Whether cells hold transitions, rather than what comes next or what came long ago."""
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
        """The rows of a chunk, and the sequences that begin there."""
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
        """What is not in the chunks."""
        return {**super().ring_state(), "rows_added": self._rows_added}

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Bring that back, before the chunks."""
        super().load_ring_state(state)
        self._rows_added = int(state["rows_added"])
        self._states.clear()

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Bring a chunk back."""
        super().load_chunk(index, state)
        self._offsets[self._chunk(index)] = own_array(state["offsets"])
        cells = own_array(state["state_cells"]).tolist()
        self._states.update(zip(cells, own_array(state["states"]), strict=True))
