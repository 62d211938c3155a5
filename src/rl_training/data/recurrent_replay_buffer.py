"""Replay for networks that remember: the ring of transitions, drawn from in sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.obs_store import own_array
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.tree import tree_map
from rl_training.types import ActionSpec, Array, Obs, ObsSpec, VectorStep

_PATIENCE = 100
"""Draws in vain after which it is looked whether there is anything to draw."""
_PER_STATE = 208
"""Bytes that Python takes for a stored state besides its numbers."""


class RecurrentReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose samples are sequences, with the states they began in.

    Every environment's transitions are put together in sequences of ``sequence_length`` steps as
    they come; an episode's first and last may be shorter, and none goes on in the next episode.
    What was remembered where a sequence begins is stored with it, except at the start of an
    episode, where that is nothing. It was remembered by an older network: the first ``burn_in``
    steps of a sequence within an episode are there to bring it up to date, and have ``mask`` 0
    (both after R2D2, Kapturowski et al. 2019; gradients flow through them all the same). So that
    no part of episodes is always burn-in, the first sequence of an environment's k-th episode is
    k mod ``sequence_length`` steps shorter.
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
        if sequence_length < 1 or not 0 <= burn_in < sequence_length:
            raise ConfigError(f"no sequences of {sequence_length} steps, {burn_in} of them burn-in")
        if capacity < 2 * sequence_length * num_envs:
            raise ConfigError(
                f"a replay of {capacity} transitions cannot hold two sequences of"
                f" {sequence_length} steps of {num_envs} environments"
            )
        super().__init__(capacity, num_envs, obs_spec, action_spec, gamma=gamma)
        self.sequence_length = sequence_length
        self.state_size = state_size
        self.burn_in = burn_in
        self._left = np.zeros(num_envs, np.int64)
        """Steps that each environment's sequence may still grow by."""
        self._episodes = np.zeros(num_envs, np.int64)
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
        return plain + 4 + -(-(4 * state_size + _PER_STATE) // sequence_length)

    @property
    def nbytes(self) -> int:
        """Bytes taken now."""
        states = len(self._states) * (4 * self.state_size + _PER_STATE)
        return super().nbytes + self._offsets.nbytes + states

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Append one step of every environment; ``record`` holds the states before it."""
        t, before = self._head, (self._head - 1) % self._ring
        remaining = dict(record)
        state = remaining.pop("state")
        # A replay that begins anew may begin in the middle of an episode.
        known = torch.as_tensor(state).cpu().numpy()
        in_episode = self.episode_goes_on(before) if self._filled else known.any(1)
        grows = in_episode & (self._left > 0) & (self._filled > 0)
        self._offsets[t] = np.where(grows, self._offsets[before] + 1, 0)
        shorter = np.where(in_episode, 0, self._episodes % self.sequence_length)
        self._left = np.where(grows, self._left, self.sequence_length - shorter) - 1
        self._episodes += ~in_episode
        first_cell = t * self.num_envs
        for env in range(self.num_envs):
            self._states.pop(first_cell + env, None)
        for env in np.flatnonzero(in_episode & ~grows).tolist():
            self._states[first_cell + env] = known[env].astype(np.float32)
        super().add(obs, action, remaining, step)

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Draw sequences with replacement, each as likely as it has steps that are learnt from.

        All are (time, batch, ...). ``obs`` is one longer than the rest and ends in the true
        successor of the last step; ``mask`` is 0 on padding and burn-in, ``episode_starts`` 1 where
        an episode begins, ``state`` what was remembered before the first step; the rest is as in
        the base.
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
        """Where sequences begin that transitions to learn from are in, those drawn uniformly."""
        found, in_vain = np.empty(0, np.int64), 0
        while len(found) < count:
            cells = self._draw_uniform(count - len(found), generator)
            first, counts = self._starts_of(cells)
            found = np.concatenate((found, first[counts]))
            in_vain = 0 if counts.any() else in_vain + 1
            if in_vain == _PATIENCE:
                _, any_count = self._starts_of(np.arange(self._offsets.size))
                if not any_count.any():
                    raise ValueError("the replay buffer holds nothing to sample")
        return found

    def _starts_of(self, cells: Array) -> tuple[Array, Array]:
        """Where the sequences of transitions begin, and which of them are learnt from.

        Burn-in is not, nor what lost its beginning when the oldest rows made room.
        """
        back = self._offsets.reshape(-1)[cells].astype(np.int64)
        first = (cells - back * self.num_envs) % self._offsets.size
        age = (self._head - 1 - cells // self.num_envs) % self._ring
        is_valid = self.is_valid(cells)
        refreshed = back >= self.burn_in
        if self.burn_in:
            refreshed |= [cell not in self._states for cell in first.tolist()]
        return first, is_valid & refreshed & (age + back < self._filled)

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
        progress = {"left": self._left.tolist(), "episodes": self._episodes.tolist()}
        return {**super().ring_state(), **progress}

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Bring that back, before the chunks."""
        super().load_ring_state(state)
        self._left = np.array(state["left"], np.int64)
        self._episodes = np.array(state["episodes"], np.int64)
        self._states.clear()

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Bring a chunk back."""
        super().load_chunk(index, state)
        self._offsets[self._chunk(index)] = own_array(state["offsets"])
        cells = own_array(state["state_cells"]).tolist()
        self._states.update(zip(cells, own_array(state["states"]), strict=True))
