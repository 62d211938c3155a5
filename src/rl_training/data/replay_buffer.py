"""Replay buffer: a ring of transitions from which batches are sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.data import finite
from rl_training.data.device_copy import DeviceCopy
from rl_training.data.obs_store import own_array
from rl_training.data.priorities import Priorities, Prioritization, importance_weights
from rl_training.data.transition_ring import ENDED, TERMINATED, VALID, TransitionRing
from rl_training.types import ActionSpec, Array, Obs, ObsSpec, VectorStep

__all__ = ["Prioritization", "ReplayBuffer"]


class Draw(NamedTuple):
    """Cells that were sampled."""

    cells: Array
    probabilities: Array | None
    """Of each cell; None: all are equally likely."""

    @property
    def smallest(self) -> float:
        """The smallest of the probabilities."""
        return 1.0 if self.probabilities is None else float(self.probabilities.min())


class ReplayBuffer(TransitionRing):
    """A `TransitionRing` with sampling: uniform, or by priority.

    With ``device``, batches are gathered from a copy of observations and actions on that device.
    With ``next_actions``, batches contain the actions that were taken in ``next_obs``, too.
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
        next_actions: bool = False,
    ) -> None:
        super().__init__(capacity, num_envs, obs_spec, action_spec, frame_stack=frame_stack)
        self._next_actions = next_actions
        self.n_step = n_step
        self.gamma = gamma
        self._priorities: Priorities | None = None
        if prioritization is not None:
            self._priorities = Priorities(self._ring * num_envs, prioritization)
        self._copy = DeviceCopy(device) if device is not None else None
        self._gathers_inside = False

    def gather_within_update(self) -> None:
        """Return recipes from now on, which `gather` turns into batches within the update.

        It needs a copy on a device, of observations that are not stacked.
        """
        if self._copy is None or self._frame_stack > 1:
            raise ValueError("only unstacked observations on a device are gathered there")
        self._gathers_inside = True

    @property
    def place(self) -> int | None:
        """Number of the memory that `gather` reads from; None if batches are not gathered so."""
        return None if self._copy is None or not self._gathers_inside else self._copy.place

    def gather(self, recipe: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the observations and actions of a recipe, on the device."""
        if self._copy is None:
            raise ValueError("this replay has no copy on a device")
        return self._copy.gather(recipe)

    @staticmethod
    def copied_bytes_per_transition(
        obs_spec: ObsSpec, action_spec: ActionSpec, *, frame_stack: int = 1
    ) -> int:
        """Return the bytes of one transition on an accelerator: its observation and its action."""
        each = ReplayBuffer.bytes_per_transition(obs_spec, action_spec, frame_stack=frame_stack)
        return each - 9

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays that hold the ring and the priorities."""
        yield from super().arrays()
        if self._priorities is not None:
            yield from self._priorities.arrays()

    def add(self, obs: Obs, action: Array, record: Mapping[str, Tensor], step: VectorStep) -> None:
        """Append one step of every environment in place of the oldest row."""
        t = self._head
        super().add(obs, action, record, step)
        if self._copy is not None:
            self._copy.note_row()
        if self._priorities is not None:
            cells, largest = np.arange(self.num_envs), self._priorities.largest
            self._priorities.set(t * self.num_envs + cells, np.where(step.valid, largest, 0.0))
            left = (self._head - self.rows - 1) % self._ring
            self._priorities.set(left * self.num_envs + cells, np.zeros(self.num_envs))

    def add_episode(self, obs: Obs, actions: Array, rewards: Array, *, terminated: bool) -> None:
        """Append a whole recorded episode of the only environment, without wrapping round."""
        first = self._head
        super().add_episode(obs, actions, rewards, terminated=terminated)
        if self._copy is not None:
            self._copy.forget()
        if self._priorities is not None:
            cells = first + np.arange(len(rewards))
            self._priorities.set(cells, np.full(len(cells), self._priorities.largest))

    def _new_final(self, t: int, env: int) -> int:
        row = super()._new_final(t, env)
        if self._copy is not None:
            self._copy.note_final(row)
        return row

    # -- sampling ------------------------------------------------------------------------------

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Sample transitions with replacement.

        ``rewards`` is the n-step return, ``next_obs`` the true successor of its last step, and
        ``discounts`` the factor of V(next_obs), 0 after a termination, so that

            target = rewards + discounts V(next_obs)

        The return has fewer than n rewards where the episode ends or the newest row is reached.
        With prioritisation, ``weights`` are importance weights with exponent ``beta`` (largest: 1).
        ``next_actions``, if they are requested, are 0 where none was taken, because the episode
        ended; ``next_recorded`` is 1 elsewhere.
        """
        drawn = self.draw(batch_size, generator)
        return self.batch(drawn, drawn.smallest, beta)

    def draw(self, batch_size: int, generator: torch.Generator) -> Draw:
        """Sample the cells of a batch."""
        if self._priorities is not None:
            return Draw(*self._priorities.draw(batch_size, generator))
        return Draw(self._draw_uniform(batch_size, generator), None)

    def batch(self, drawn: Draw, smallest: float, beta: float) -> dict[str, Any]:
        """Return the transitions of sampled cells.

        With prioritisation, ``smallest`` is the probability of the transition with weight 1.
        """
        batch = self._gather(drawn.cells)
        batch["cells"] = drawn.cells
        weights = np.ones(len(drawn.cells), np.float32)
        if drawn.probabilities is not None:
            weights = importance_weights(drawn.probabilities, smallest, beta)
        batch["weights"] = torch.from_numpy(weights)
        return batch

    def _draw_uniform(self, batch_size: int, generator: torch.Generator) -> Array:
        if not self._filled:
            raise ValueError("the replay buffer contains no transition to sample")
        oldest = (self._head - self._filled) * self.num_envs
        cells = self._draw_cells(batch_size, oldest, generator)
        if self._all_valid:
            return cells
        flags = self._flags.reshape(-1)
        kept = cells[flags[cells] & VALID > 0]
        if not len(kept):
            stored = flags[(oldest + np.arange(len(self))) % len(flags)]
            if not (stored & VALID).any():
                raise ValueError("the replay buffer contains no transition to sample")
        while len(kept) < batch_size:
            more = self._draw_cells(batch_size - len(kept), oldest, generator)
            kept = np.concatenate((kept, more[flags[more] & VALID > 0]))
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
        continues: Any = True
        for _ in range(1, self.n_step):
            following = (last + self.num_envs) % total
            at_newest = following // self.num_envs == self._head
            continues = continues & (flags.take(last) & ENDED == 0) & ~at_newest
            last = np.where(continues, following, last)
            returns = returns + np.where(continues, discounts * rewards.take(last), 0)
            discounts = np.where(continues, discounts * np.float32(self.gamma), discounts)
        discounts[flags.take(last) & TERMINATED > 0] = 0.0
        finals = self._final_row.reshape(-1).take(last)
        batch = {
            **self._take(cells, last, finals),
            "rewards": torch.from_numpy(returns),
            "discounts": torch.from_numpy(discounts),
        }
        return {**batch, **self._following_actions(last)} if self._next_actions else batch

    def _following_actions(self, last: Array) -> dict[str, Tensor]:
        """Return the actions after the transitions at ``last``, and whether there are any."""
        following = (last + self.num_envs) % (self._ring * self.num_envs)
        ended = self._flags.reshape(-1).take(last) & ENDED > 0
        recorded = ~ended & (following // self.num_envs != self._head)
        actions = self._actions.reshape(-1, *self._actions.shape[2:]).take(following, axis=0)
        actions[~recorded] = 0
        return {
            "next_actions": torch.from_numpy(actions),
            "next_recorded": torch.from_numpy(recorded.astype(np.float32)),
        }

    def _take(self, cells: Array, last: Array, finals: Array) -> dict[str, Any]:
        """Return observations and actions at ``cells``, and the true successors of ``last``."""
        following = (last + self.num_envs) % (self._ring * self.num_envs)
        if self._copy is not None:
            self._copy.sync(self._obs, self._actions, self._head)
            if self._gathers_inside:
                indices = {"cells": cells, "following": following, "finals": finals}
                return {"recipe": {k: torch.from_numpy(v) for k, v in indices.items()}}
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
        if self._priorities is None:
            raise ValueError("this replay buffer is not prioritised")
        self._priorities.update(cells, errors)

    # -- checking ------------------------------------------------------------------------------

    def check_finite(
        self, rows: int, first_step: int, episode_lengths: Array | None = None
    ) -> None:
        """Raise `NonFiniteError` if the newest ``rows`` contain a NaN or infinity.

        The error names its environment and step. ``episode_lengths`` are the steps so far of the
        current episodes; without them the step is a lower bound if the episode's start is not
        stored.
        """
        count = min(rows, self._filled)
        fields = self._newest_fields(count)
        if not all(field.is_finite() for field in fields):
            stored = self._flags[(self._head - self._filled + np.arange(self._filled)) % self._ring]
            valid = stored & VALID > 0
            holds_all = int(valid[: self._filled - count].sum()) == first_step and count == rows
            before = np.zeros(self.num_envs, np.int64) if holds_all else None
            ended = stored & ENDED > 0
            episodes = finite.Episodes(ended, valid, before, episode_lengths, not valid.all())
            raise finite.non_finite_error(
                fields,
                episodes,
                first_row=rows - count,
                first_step=first_step,
                first_env=self.first_env,
                agents=self.agents,
            )

    def _newest_fields(self, count: int) -> list[finite.Field]:
        """Return the newest ``count`` rows and the observations after them."""
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

    # -- state ---------------------------------------------------------------------------------

    def ring_state(self) -> dict[str, Any]:
        """Return the state that is not in the chunks: position of the ring, and priorities."""
        priorities = self._priorities
        return {
            **super().ring_state(),
            "max_priority": 1.0 if priorities is None else priorities.largest,
            "priorities": None if priorities is None else priorities.leaves(),
        }

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that is not in the chunks; call it before `load_chunk`."""
        super().load_ring_state(state)
        if self._copy is not None:
            self._copy.forget()
        if self._priorities is not None:
            self._priorities.largest = float(state["max_priority"])
            self._priorities.load(own_array(state["priorities"]))
