"""Rollout storage for recurrent networks: a rollout is divided into sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.data.sequences import random_parts
from rl_training.types import Array, Obs, Remembered, VectorStep


class Segments(NamedTuple):
    """Parts of sequences, each within one episode, padded to the same length."""

    rows: Tensor
    """(longest, segments): row index of each step; padding repeats a segment's first row."""
    mask: Tensor
    """(longest, segments): False on padding."""
    sequence: Tensor
    """(segments,): index of the sequence that each segment is a part of."""
    leads: Tensor
    """(segments,): whether it goes on with the episode at the start of its sequence, and so starts
    in the stored state."""


def split_at(starts: Array, seen: Array | None = None) -> Segments:
    """Split (length, sequences) into segments where ``starts`` is True: an episode begins there.

    Rows count along sequences: row = time * sequences + sequence. Steps that are not ``seen`` are
    left out: the network does not see them. The first step of a sequence without any is kept.
    """
    length, count = starts.shape
    steps = np.arange(length * count)
    """Indices of the steps that are kept, sequence by sequence."""
    episode = starts.T.cumsum(1) - starts.T[:, :1]
    """Number of the episode of each step, within its sequence."""
    if seen is not None:
        kept = seen.T.copy()
        kept[:, 0] |= ~kept.any(1)
        steps = np.flatnonzero(kept)
    sequence_of, episode_of = steps // length, episode.reshape(-1)[steps]
    begins = np.ones(len(steps), bool)
    begins[1:] = (np.diff(sequence_of) != 0) | (np.diff(episode_of) != 0)
    segment = begins.cumsum() - 1
    first = np.flatnonzero(begins)
    offset = np.arange(len(steps)) - first[segment]
    longest = int(offset.max()) + 1
    position = np.tile(steps[first], (longest, 1))
    mask = np.zeros((longest, len(first)), bool)
    position[offset, segment] = steps
    mask[offset, segment] = True
    time, sequence = position % length, position // length
    sequence_of = sequence_of[first]
    leads = (np.diff(sequence_of, prepend=-1) != 0) & (episode_of[first] == 0)
    return Segments(
        torch.from_numpy(time * count + sequence),
        torch.from_numpy(mask),
        torch.from_numpy(sequence_of),
        torch.from_numpy(leads),
    )


class RecurrentRolloutBuffer(RolloutBuffer):
    """A rollout whose minibatches are whole sequences of ``sequence_length`` steps.

    The actor records the recurrent state before each step (``state``) and after it (``next_state``,
    before any reset). Stored are the states at the starts of sequences, at the ends of truncated
    episodes, and after the last step. Minibatches contain each sequence split into segments where
    episodes begin, so that a fused LSTM call needs no reset inside; padding has ``mask`` 0. With
    ``turns`` a row's state changes only in steps in which it acts, and segments contain only those.
    """

    def __init__(
        self, num_steps: int, num_envs: int, *shapes: Any, sequence_length: int, **kwargs: Any
    ) -> None:
        if sequence_length < 1 or num_steps % sequence_length:
            raise ValueError(
                f"'sequence_length' must divide num_steps; got {sequence_length} and {num_steps}"
            )
        super().__init__(num_steps, num_envs, *shapes, **kwargs)
        self.sequence_length = sequence_length
        self.num_sequences = num_steps // sequence_length * num_envs
        self.states: list[Tensor] = []
        """Recurrent states at the starts of sequences."""
        self.next_state: Tensor | None = None
        """Recurrent states after the rollout; zeros where the last step ended an episode."""
        self._final_states: list[Tensor] = []
        self._segments: Segments | None = None

    def reset(self) -> None:
        """Start a new rollout in the same memory."""
        super().reset()
        self.states.clear()
        self._final_states.clear()
        self._segments = None

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Append one step of every environment, and the recurrent states before and after it."""
        remaining = dict(record)
        state, after = remaining.pop("state"), remaining.pop("next_state")
        if step.held is not None:
            held = torch.from_numpy(step.held).unsqueeze(1)
            after = torch.where(held, torch.as_tensor(state), torch.as_tensor(after))
        if self.position % self.sequence_length == 0:
            self.states.append(self._copied(state))
        bootstraps = step.truncated & ~step.terminated
        if bootstraps.any():
            self._final_states.append(self._copied(after)[torch.from_numpy(bootstraps)])
        super().add(obs, action, remaining, step)
        if self.position == self.num_steps:
            self.next_state = self._copied(after)
            self.next_state[torch.from_numpy(step.cut)] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the steps stored so far and their recurrent states."""
        return {
            **super().state_dict(),
            "states": list(self.states),
            "final_states": list(self._final_states),
            "next_state": self.next_state if self.position == self.num_steps else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the steps stored so far."""
        super().load_state_dict(state)
        self.states.extend(self._copied(one) for one in state["states"])
        self._final_states.extend(self._copied(one) for one in state["final_states"])
        if state["next_state"] is not None:
            self.next_state = self._copied(state["next_state"])

    def truncate(self, obs: Obs, actor_state: Mapping[str, Any]) -> Array:
        """Truncate every episode after the last stored step, and store the states after it."""
        rows = super().truncate(obs, actor_state)
        if rows.size:
            state = self._copied(actor_state["memory"]["state"])
            self._final_states.append(state[torch.from_numpy(rows)])
        return rows

    def _copied(self, state: Any) -> Tensor:
        return torch.as_tensor(state).detach().clone().to(self.device)

    def truncated_observations(self) -> tuple[Tensor, Any] | None:
        """Return indices of truncated steps, their final observations and recurrent states."""
        found = super().truncated_observations()
        if found is None:
            return None
        index, obs = found
        return index, Remembered(obs, torch.cat(self._final_states))

    def next_inputs(self) -> Remembered:
        """Return the observations and the recurrent states after the last step."""
        return Remembered(self.next_obs, self.next_state)

    def whole(self) -> dict[str, Any]:
        """Return all sequences, as a model's ``evaluate`` takes them."""
        batch = self.batch()
        return {key: batch[key] for key in ("obs", "actions", "state")}

    def batch(self) -> dict[str, Any]:
        """Return all sequences as one minibatch."""
        segments = self.segments()
        everything = torch.arange(segments.rows.shape[1], device=self.device)
        return {**self._gather(self.flat(), everything), "sequence": segments.sequence}

    def keep_evaluation(self, logprobs: Tensor, values: Tensor) -> None:
        """Store a model's evaluation of `whole`, without its padding."""
        rows, mask, *_ = self.segments()
        rows = rows[mask]
        for name, numbers in (("logprobs", logprobs), ("values", values)):
            if name not in self.recorded:
                getattr(self, name).view(-1)[rows] = numbers[mask]

    def segments(self) -> Segments:
        """Return the segments of a complete rollout."""
        if self._segments is None:
            length, count = self.sequence_length, self.num_sequences
            ended, valid = (self.dones > 0).cpu().numpy(), self.valid.cpu().numpy()
            begins = np.roll(ended if self.turns else ended | ~valid, 1, axis=0)

            def chunked(steps: Array) -> Array:
                """(chunks, length, envs) to (length, chunks * envs)."""
                each = steps.reshape(-1, length, self.num_envs).swapaxes(0, 1)
                return each.reshape(length, count)

            rows = torch.from_numpy(chunked(np.arange(valid.size)).reshape(-1))
            found = split_at(chunked(begins), chunked(valid) if self.turns else None)
            found = found._replace(rows=rows[found.rows])
            self._segments = Segments(*(tensor.to(self.device) for tensor in found))
        return self._segments

    def iter_minibatches(
        self, num_minibatches: int, *, generator: torch.Generator | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield one epoch: every sequence once, in ``num_minibatches`` equal random parts."""
        sequence, batch = self.segments().sequence, self.flat()
        for chosen in random_parts(sequence, self.num_sequences, num_minibatches, generator):
            yield self._gather(batch, chosen)

    def _gather(self, batch: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
        """Return the ``chosen`` segments as a batch of (length, segments, ...)."""
        rows, mask, sequence, leads = self.segments()
        rows = rows[:, chosen]
        taken: dict[str, Any] = {
            key: tree_map(lambda leaf: leaf[rows], value) for key, value in batch.items()
        }
        states = torch.cat(self.states)[sequence[chosen]]
        counts = mask[:, chosen].to(self.rewards.dtype)
        return {
            **taken,
            "mask": counts * taken["mask"] if "mask" in taken else counts,
            "state": states * leads[chosen].unsqueeze(1),
        }
