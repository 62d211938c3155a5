"""A replay whose transitions stay on their device, and are sampled within the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.data import finite
from rl_training.data.device_copy import new_place
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.transition_ring import ENDED, TERMINATED, VALID, rows_per_chunk
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Array, ObsSpec, Rows

_WORD = 8
"""Bytes of a word, the unit that transitions consist of."""
_MOST = 2**62
"""Random integers are below this; their remainder chooses a cell."""


class _Part(NamedTuple):
    """Where a transition has one of its arrays."""

    start: int
    stop: int
    """First word, and the one after the last."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, words: Tensor) -> Tensor:
        """Return the array as a view of whole transitions (..., words)."""
        numbers = words[..., self.start : self.stop].view(self.dtype)
        flat = numbers[..., : math.prod(self.shape)]
        return flat.view(*flat.shape[:-1], *self.shape)


class _Layout:
    """The arrays of a transition: observation, action, true next observation, reward and flags.

    A transition is contiguous, so that one operation writes those of a step and one gathers a
    batch.
    """

    def __init__(self, obs_spec: ObsSpec, action_spec: ActionSpec) -> None:
        self.words = 0
        leaves: Any = obs_spec.leaves if obs_spec.is_dict else obs_spec.leaves[""]
        self.obs: Any = tree_map(lambda leaf: self._part(leaf.shape, leaf.dtype), leaves)
        self.next_obs: Any = tree_map(lambda leaf: self._part(leaf.shape, leaf.dtype), leaves)
        self.actions = self._part(action_spec.shape, action_spec.policy_dtype)
        last = self.words
        self.rewards = _Part(last, last + 1, (), torch.float32)
        self._flags = _Part(last, last + 1, (2,), torch.int32)
        self.words = last + 1

    def _part(self, shape: tuple[int, ...], dtype: str) -> _Part:
        kind: torch.dtype = getattr(torch, dtype)
        start = self.words
        self.words += -(-math.prod(shape) * kind.itemsize // _WORD)
        return _Part(start, self.words, shape, kind)

    def flags(self, words: Tensor) -> Tensor:
        """Return the flags, which share a word with the reward."""
        return self._flags.of(words)[..., 1]


class DeviceReplay:
    """The last ``capacity`` transitions of a `DeviceEnv`, on its device.

    It equals a `ReplayBuffer` of the same steps: rows, cells, chunks and what is returned for a
    cell. True next observations are stored with every transition, so that all shapes are static.
    `sample` draws random numbers and `gather`, which is part of the update and of its CUDA graph,
    turns them into a batch. `write` may be captured, too, before `advance`, which may not.
    """

    first_env = 0
    """Index in the run of the first of these environments, for errors."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        *,
        device: torch.device,
        n_step: int = 1,
        gamma: float = 0.99,
    ) -> None:
        self.num_envs = num_envs
        self.rows = -(-capacity // num_envs)
        self.n_step, self.gamma = n_step, gamma
        self.is_finite: bool | None = None
        """Whether the rows since the last report are finite, once that is known on the host."""
        self._keys = list(obs_spec.leaves)
        self._layout = _Layout(obs_spec, action_spec)
        self._ring = self.rows + 1  # as on the host, where one row has the current observations
        words = self._layout.words
        self.place = new_place()
        """Number of the memory that `gather` reads from."""
        shape = (self._ring, num_envs, words)
        self._transitions = torch.zeros(shape, dtype=torch.int64, device=device)
        self._cells = self._transitions.flatten(0, 1)
        self._row = torch.zeros((num_envs, words), dtype=torch.int64, device=device)
        """The step that is written next."""
        self._steps = 0
        """Steps of every environment that were stored; after a resume, fewer whole rings."""
        self._steps_there = torch.zeros((), dtype=torch.int64, device=device)
        each = ReplayBuffer.bytes_per_transition(obs_spec, action_spec)
        self.chunk_rows = rows_per_chunk(num_envs, each)
        """Rows of a chunk."""
        self.changed_chunks: set[int] = set()
        """Chunks that changed; the code that saves them clears this set."""

    def __len__(self) -> int:
        """Return the number of transitions."""
        return self._filled * self.num_envs

    @property
    def _head(self) -> int:
        return self._steps % self._ring

    @property
    def _filled(self) -> int:
        return min(self._steps, self.rows)

    @staticmethod
    def bytes_per_transition(obs_spec: ObsSpec, action_spec: ActionSpec) -> int:
        """Return the bytes of one transition: two observations, an action, reward and flags."""
        return _Layout(obs_spec, action_spec).words * _WORD

    def arrays(self) -> Iterator[Array]:
        """Yield the memory on the host; that of an accelerator is allocated at once."""
        if self._transitions.device.type == "cpu":
            yield self._transitions.numpy()

    # -- writing -------------------------------------------------------------------------------

    def add(self, obs: Any, action: Tensor, record: Mapping[str, Any], step: Any) -> None:
        """Append one step of every environment, a `DeviceStep`, in place of the oldest row."""
        if record:
            raise ValueError(f"a replay cannot store {sorted(record)} with a step")
        self.write(obs, action, step)
        self.advance()

    def write(self, obs: Any, action: Tensor, step: Any) -> None:
        """Prepare a step without changing anything on the host.

        Without final observations the successor of a truncated episode is the observation before.
        """
        layout, row = self._layout, self._row
        ended = step.terminated | step.truncated
        final_obs = obs if step.final_obs is None else step.final_obs

        def put_next(part: _Part, final: Tensor, following: Tensor) -> None:
            rows = ended.view(-1, *(1,) * len(part.shape))
            part.of(row).copy_(torch.where(rows, final, following))

        tree_map(lambda part, leaf: part.of(row).copy_(leaf), layout.obs, obs)
        tree_map(put_next, layout.next_obs, final_obs, step.obs)
        layout.actions.of(row).copy_(action)
        layout.rewards.of(row).copy_(step.reward)
        layout.flags(row).copy_(VALID + ENDED * ended + TERMINATED * step.terminated)
        self._steps_there += 1

    def advance(self) -> None:
        """Store the step that was written."""
        t = self._head
        self._transitions[t].copy_(self._row)
        self.changed_chunks.update((t // self.chunk_rows, (t + 1) % self._ring // self.chunk_rows))
        self._steps += 1

    def resume_at(self, obs: Any, *, exact: bool = True) -> None:
        """Continue from other observations than the last ones, unless ``exact``."""
        del obs
        if self._filled and not exact:
            newest = (self._head - 1) % self._ring
            self._layout.flags(self._transitions[newest]).bitwise_or_(ENDED)
            self.changed_chunks.add(newest // self.chunk_rows)

    # -- sampling ------------------------------------------------------------------------------

    def sample(
        self, batch_size: int, generator: torch.Generator, *, beta: float = 1.0
    ) -> dict[str, Any]:
        """Draw what `gather` turns into a batch of transitions, with replacement."""
        del beta
        if not self._filled:
            raise ValueError("the replay contains no transition to sample")
        drawn = torch.randint(_MOST, (batch_size,), generator=generator, device=generator.device)
        return {"recipe": drawn}

    def gather(self, recipe: Tensor) -> dict[str, Any]:
        """Return the transitions that were drawn, as `ReplayBuffer.sample` returns them."""
        return self.transitions(self._drawn_cells(recipe))

    def _drawn_cells(self, drawn: Tensor) -> Tensor:
        filled = self._steps_there.clamp(max=self.rows)
        oldest = (self._steps_there - filled) * self.num_envs
        return (oldest + drawn % (filled * self.num_envs)) % len(self._cells)

    def transitions(self, cells: Tensor) -> dict[str, Any]:
        """Return a batch of the transitions of these cells."""
        layout = self._layout
        words = self._cells.index_select(0, cells)
        rewards, last = layout.rewards.of(words), words
        discounts = torch.full_like(rewards, self.gamma)
        if self.n_step > 1:
            rewards, discounts, last = self._over_steps(cells, rewards, discounts)
        flags = layout.flags(last)
        return {
            "obs": tree_map(lambda part: part.of(words), layout.obs),
            "actions": layout.actions.of(words),
            "next_obs": tree_map(lambda part: part.of(last), layout.next_obs),
            "rewards": rewards,
            "discounts": torch.where(flags & TERMINATED > 0, 0.0, discounts),
            "weights": torch.ones_like(rewards),
        }

    def _over_steps(
        self, cells: Tensor, returns: Tensor, discounts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return n-step returns, the factors of what follows, and the last transitions."""
        last = cells
        ends = self._cells[:, -1:]  # the word of rewards and flags
        reward = _Part(0, 1, (), torch.float32)
        flags = _Part(0, 1, (2,), torch.int32)
        newest = (self._steps_there - 1) % self._ring
        continues = torch.ones_like(cells, dtype=torch.bool)
        for _ in range(1, self.n_step):
            ended = flags.of(ends.index_select(0, last))[..., 1] & ENDED > 0
            continues = continues & ~ended & (last // self.num_envs != newest)
            last = torch.where(continues, (last + self.num_envs) % len(self._cells), last)
            received = discounts * reward.of(ends.index_select(0, last))
            returns = returns + torch.where(continues, received, 0.0)
            discounts = torch.where(continues, discounts * self.gamma, discounts)
        return returns, discounts, self._cells.index_select(0, last)

    # -- reading -------------------------------------------------------------------------------

    def _newest(self, count: int) -> Tensor:
        """Return the newest rows, oldest first: a view where they do not wrap round the ring."""
        first = (self._head - count) % self._ring
        if first + count <= self._ring:
            return self._transitions[first : first + count]
        return torch.cat(
            (self._transitions[first:], self._transitions[: first + count - self._ring])
        )

    def newest_observations(self, count: int) -> Rows:
        """Return the observations of the newest rows, flat and oldest first; all are valid."""
        words = self._newest(min(count, self._filled)).flatten(0, 1)
        obs = tree_map(lambda part: part.of(words), self._layout.obs)
        return Rows(obs, torch.ones(len(words), dtype=torch.bool, device=words.device))

    def finite_flag(self, count: int) -> Tensor:
        """Return whether all numbers of the newest rows are finite, as a tensor."""
        layout, words = self._layout, self._newest(min(count, self._filled))
        parts = [*tree_leaves(layout.obs), *tree_leaves(layout.next_obs), layout.actions]
        arrays = [part.of(words) for part in (*parts, layout.rewards)]
        checks = [torch.isfinite(one).all() for one in arrays if one.is_floating_point()]
        return torch.stack(checks).all()

    def check_finite(
        self, rows: int, first_step: int, episode_lengths: Array | None = None
    ) -> None:
        """Raise `NonFiniteError` if the newest ``rows`` contain a NaN or infinity."""
        del episode_lengths
        known, self.is_finite = self.is_finite, None
        if bool(self.finite_flag(rows)) if known is None else known:
            return
        count, layout = min(rows, self._filled), self._layout
        words = self._newest(count).cpu()
        flags = layout.flags(words).numpy()
        ended = flags & ENDED > 0
        fields: list[finite.Field] = []
        names = finite.named_leaves(self._keys)
        parts = (tree_leaves(layout.obs), tree_leaves(layout.next_obs))
        for name, here, after in zip(names, *parts, strict=True):
            shown, following = here.of(words).numpy(), after.of(words).numpy()
            if shown.dtype.kind != "f":
                continue
            at_end = np.where(ended.reshape(*ended.shape, *(1,) * len(after.shape)), following, 0)
            rows_after = np.concatenate((shown, following[-1:]))
            fields.append(finite.Field(finite.OBSERVATION, name, rows_after))
            fields.append(finite.Field(finite.FINAL, f"final {name}", at_end))
        fields.append(finite.Field(finite.ACTION, "action", layout.actions.of(words).numpy()))
        fields.append(finite.Field(finite.REWARD, "reward", layout.rewards.of(words).numpy()))
        before = np.zeros(self.num_envs, np.int64) if first_step == 0 and count == rows else None
        episodes = finite.Episodes(ended, np.ones_like(ended), before, None)
        raise finite.non_finite_error(
            fields,
            episodes,
            first_row=rows - count,
            first_step=first_step,
            first_env=self.first_env,
        )

    # -- state ---------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        """Number of chunks in use."""
        used = self._ring if self._filled == self.rows else self._head + 1
        return -(-used // self.chunk_rows)

    def chunk_state(self, index: int) -> dict[str, Any]:
        """Return the rows of a chunk in the format of `ReplayBuffer.chunk_state`.

        Successors that are not in the next row of the chunk are its final observations.
        """
        layout, rows = self._layout, self._chunk(index)
        words = self._transitions[rows].cpu()
        flags = layout.flags(words)
        has_final = flags & ENDED > 0
        has_final[-1] = True
        newest = (self._head - 1) % self._ring
        if self._filled and rows.start <= newest < rows.stop:
            has_final[newest - rows.start] = True
        state: dict[str, Any] = {
            "actions": layout.actions.of(words),
            "rewards": layout.rewards.of(words),
            "flags": flags.to(torch.uint8),
            "has_final": has_final,
        }
        parts = (tree_leaves(layout.obs), tree_leaves(layout.next_obs))
        for key, here, after in zip(self._keys, *parts, strict=True):
            finals = after.of(words)[has_final]
            state[f"obs/{key}"] = {"obs": here.of(words), "final_obs": finals}
        return state

    def load_chunk(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore a chunk."""
        layout, rows = self._layout, self._chunk(index)
        words = torch.zeros_like(self._transitions[rows], device="cpu")
        layout.actions.of(words).copy_(torch.as_tensor(state["actions"]))
        layout.rewards.of(words).copy_(torch.as_tensor(state["rewards"]))
        layout.flags(words).copy_(torch.as_tensor(state["flags"]))
        has_final = torch.as_tensor(state["has_final"])
        parts = (tree_leaves(layout.obs), tree_leaves(layout.next_obs))
        for key, here, after in zip(self._keys, *parts, strict=True):
            saved = state[f"obs/{key}"]
            obs = torch.as_tensor(saved["obs"])
            here.of(words).copy_(obs)
            following = torch.cat((obs[1:], obs[-1:]))
            following[has_final] = torch.as_tensor(saved["final_obs"])
            after.of(words).copy_(following)
        self._transitions[rows].copy_(words)

    def _chunk(self, index: int) -> slice:
        start = index * self.chunk_rows
        return slice(start, min(start + self.chunk_rows, self._ring))

    def ring_state(self) -> dict[str, Any]:
        """Return the state that is not in the chunks: the shape of the ring and its position."""
        return {
            "shape": [self._ring, self.num_envs, self.chunk_rows],
            "position": [self._head, self._filled],
            "max_priority": 1.0,
            "priorities": None,
        }

    def load_ring_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that is not in the chunks; call it before `load_chunk`."""
        shape = [self._ring, self.num_envs, self.chunk_rows]
        if list(state["shape"]) != shape:
            raise ConfigError(
                f"the saved replay has the shape {list(state['shape'])}, this one {shape}:"
                " buffer_size and num_envs must not change on resume"
            )
        head, filled = (int(number) for number in state["position"])
        self._steps = filled if filled == head else head + self._ring
        self._steps_there.fill_(self._steps)
