"""Steps of all environments as arrays: collected in one process, stored in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map, tree_stack
from rl_training.types import Array, Obs, VectorStep


class StepStorage(Protocol):
    """What a block can be added to."""

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Store one step of every environment."""
        ...


class StepBlock(NamedTuple):
    """Consecutive steps of all environments, T of them; every array has the time first."""

    obs: Obs
    """T + 1 observations: those after the last step included."""
    actions: Array
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    records: dict[str, Array]
    """What the actor recorded with each step."""
    tensors: frozenset[str]
    """Names of the records that were tensors."""
    finals: tuple[tuple[int, Array, Obs], ...]
    """Where episodes ended: step, environments and their final observations."""

    def add_to(self, storage: StepStorage) -> None:
        """Add every step to a buffer, as if it had just been taken."""
        following = self._obs_at(0)
        for t in range(len(self.actions)):
            obs, following = following, self._obs_at(t + 1)
            step = VectorStep(
                following,
                self._final_obs(t, following),
                self.rewards[t],
                self.terminated[t],
                self.truncated[t],
                self.valid[t],
                (),
            )
            storage.add(obs, self.actions[t], self._record(t), step)

    def _obs_at(self, t: int) -> Obs:
        # Arrays that another process sent are read-only, which torch warns of.
        obs: Any = tree_map(lambda leaf: leaf[t].copy(), self.obs)
        return obs  # type: ignore[no-any-return]

    def _final_obs(self, t: int, following: Obs) -> Obs:
        for at, rows, finals in self.finals:
            if at == t:
                final: Any = tree_map(np.copy, following)
                tree_map(lambda leaf, own, rows=rows: leaf.__setitem__(rows, own), final, finals)
                return final  # type: ignore[no-any-return]
        return following

    def _record(self, t: int) -> dict[str, Any]:
        return {
            name: torch.from_numpy(array[t].copy()) if name in self.tensors else array[t].copy()
            for name, array in self.records.items()
        }


class StepRecorder:
    """A buffer that turns the steps that are added to it into a block."""

    def __init__(self) -> None:
        self._obs: list[Obs] = []
        self._columns: list[tuple[Array, ...]] = []
        self._records: list[dict[str, Array]] = []
        self._tensors: frozenset[str] = frozenset()
        self._finals: list[tuple[int, Array, Obs]] = []

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Copy one step of every environment."""
        t = len(self._columns)
        self._obs.append(tree_map(np.copy, obs))
        self._tensors = frozenset(k for k, value in record.items() if isinstance(value, Tensor))
        arrays = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in record.items()}
        self._records.append({k: np.array(array) for k, array in arrays.items()})
        columns = (action, step.reward, step.terminated, step.truncated, step.valid)
        self._columns.append(tuple(np.array(column) for column in columns))
        rows = np.flatnonzero(step.terminated | step.truncated)
        if rows.size:
            self._finals.append((t, rows, tree_map(lambda leaf: leaf[rows], step.final_obs)))
        self._last: Obs = tree_map(np.copy, step.obs)

    def block(self) -> StepBlock:
        """Return the steps so far, at least one."""
        actions, rewards, terminated, truncated, valid = (
            np.stack(column) for column in zip(*self._columns, strict=True)
        )
        records = {
            name: np.stack([one[name] for one in self._records]) for name in self._records[0]
        }
        obs: Any = tree_stack(np.stack, [*self._obs, self._last])
        return StepBlock(
            obs,
            actions,
            rewards,
            terminated,
            truncated,
            valid,
            records,
            self._tensors,
            tuple(self._finals),
        )
