"""`Communicator`: which shards of a run this process executes, and how all of them are combined.

A run has ``shards`` logical shards. Each has its own environments, random streams, replay and rows
of every batch. Results of shards are combined in the order of shards, never in that of arrival or
by a tree, so that a run learns the same bit for bit however its shards are placed on processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.seeding import restore_generator

SHARD_WEIGHT = "shard_weight"
"""Key of a batch: the share of its shard in means over all shards; absent: equal shares."""


class Communicator:
    """All shards in this process: nothing is sent anywhere. `ProcessGroup` is the other one."""

    rank = 0
    world_size = 1
    is_local = True
    """Whether `gather` is no communication, so that it may be part of a CUDA graph."""

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards
        """Number of shards of the run."""
        self.local = range(shards)
        """The shards that this process executes."""

    @property
    def alone(self) -> bool:
        """Whether there is one shard in one process: there is nothing to combine."""
        return self.shards == 1 and self.is_local

    def gather(self, rows: Tensor) -> Tensor:
        """Return one row per shard of the run, given one per local shard."""
        return rows

    def gather_objects(self, values: Sequence[Any], *, everywhere: bool = True) -> list[Any]:
        """Return one plain value per shard of the run, given one per local shard.

        Unless ``everywhere``, only rank 0 gets them; other ranks get an empty list.
        """
        del everywhere
        return list(values)


ALONE = Communicator()
"""One shard in one process."""


def add_in_order(rows: Tensor) -> Tensor:
    """Return the sum over the first axis, added from first to last.

    ``rows.sum(0)`` may add in another order, which rounds differently.
    """
    if len(rows) == 1:
        return rows[0]
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total


def shards_of(experience: Any) -> Sequence[Any]:
    """Return the buffers of the local shards; a single buffer is that of the only shard."""
    return experience if isinstance(experience, list | tuple) else (experience,)


def share(batch: Mapping[str, Any], communicator: Communicator) -> Any:
    """Return the share of a batch's shard in means over all shards."""
    return batch.get(SHARD_WEIGHT, 1.0 / communicator.shards)


# -- state -----------------------------------------------------------------------------------------

_KEY = "__shards__"


class PerShard(list[Any]):
    """Values of the local shards within a state."""


def per_shard_state(values: Sequence[Any], communicator: Communicator) -> Any:
    """Return what a state holds for values of the local shards: of an only shard its own value."""
    return values[0] if communicator.shards == 1 else PerShard(values)


def state_of_each(value: Any, communicator: Communicator) -> list[Any]:
    """Return the values of the local shards from what `per_shard_state` returned."""
    if communicator.shards == 1:
        return [value]
    if not isinstance(value, list) or len(value) != len(communicator.local):
        raise ValueError(
            f"the state does not have one part for each of {communicator.shards} shards"
        )
    return list(value)


def generator_states(generators: Sequence[torch.Generator], communicator: Communicator) -> Any:
    """Return the states of the local shards' generators."""
    return per_shard_state([one.get_state() for one in generators], communicator)


def load_generator_states(
    generators: Sequence[torch.Generator], state: Any, communicator: Communicator
) -> None:
    """Restore the states of the local shards' generators."""
    saved = state_of_each(state, communicator)
    for generator, one in zip(generators, saved, strict=True):
        restore_generator(generator, one)


def gather_state(state: Any, communicator: Communicator, *, everywhere: bool = True) -> Any:
    """Return a state in which every `PerShard` holds the values of all shards of the run.

    Unless ``everywhere``, only on rank 0: other ranks return the state as it is.
    """
    found: list[PerShard] = []
    _collect(state, found)
    if not found:
        return state
    per_shard = [[values[i] for values in found] for i in range(len(communicator.local))]
    gathered = communicator.gather_objects(per_shard, everywhere=everywhere)
    if not gathered:
        return state
    of_all = zip(*gathered, strict=True)
    return _replaced(state, iter([{_KEY: list(values)} for values in of_all]))


def _collect(state: Any, found: list[PerShard]) -> None:
    if isinstance(state, PerShard):
        found.append(state)
    elif isinstance(state, dict):
        for value in state.values():
            _collect(value, found)


def _replaced(state: Any, values: Any) -> Any:
    if isinstance(state, PerShard):
        return next(values)
    if isinstance(state, dict):
        return {key: _replaced(value, values) for key, value in state.items()}
    return state


def saved_shards(value: Any) -> list[Any]:
    """Return the values of all shards in a state of `gather_state`; of an only shard its own."""
    if isinstance(value, dict) and set(value) == {_KEY}:
        return list(value[_KEY])
    return [value]


def local_state(state: Any, communicator: Communicator) -> Any:
    """Return a state of `gather_state` with the values of the local shards alone."""
    if not isinstance(state, dict):
        return state
    if set(state) == {_KEY}:
        values = state[_KEY]
        if not isinstance(values, list) or len(values) != communicator.shards:
            raise ValueError(f"the state does not have parts of {communicator.shards} shards")
        return PerShard(values[shard] for shard in communicator.local)
    return {key: local_state(value, communicator) for key, value in state.items()}
