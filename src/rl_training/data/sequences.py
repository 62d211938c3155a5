"""Batches of sequences: their random parts, and joining them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training._internal.tree import tree_map, tree_stack


def random_parts(
    sequence: Tensor, count: int, num_parts: int, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Yield the indices of the segments of ``num_parts`` equal random parts of the sequences.

    ``sequence`` is the index, below ``count``, of the sequence that each segment is a part of.
    """
    if num_parts < 1 or count % num_parts:
        raise ValueError(f"{num_parts} minibatches do not divide {count} sequences")
    order = torch.randperm(count, generator=generator).to(sequence.device)
    part = torch.empty_like(order)
    part[order] = torch.arange(count, device=sequence.device) % num_parts
    part_of_segment = part[sequence]
    for i in range(num_parts):
        yield (part_of_segment == i).nonzero().squeeze(1)


def shuffled_sequences(
    batch: Mapping[str, Any], num_minibatches: int, generator: torch.Generator | None = None
) -> Iterator[dict[str, Any]]:
    """Yield every sequence of a batch once, in ``num_minibatches`` equal random parts.

    Tensors are (time, segments, ...), but ``state`` and ``sequence`` have a row for each segment.
    """
    sequence = batch["sequence"]
    count = int(sequence.max()) + 1
    for chosen in random_parts(sequence, count, num_minibatches, generator):
        yield {
            key: _rows(value, chosen) if key in _OF_SEGMENTS else _columns(value, chosen)
            for key, value in batch.items()
        }


def joined_sequences(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return batches of sequences as one, padded to the length of the longest."""
    longest = max(len(batch["mask"]) for batch in batches)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([_padded(one, longest) for one in parts], 1)

    steps: dict[str, Any] = {
        key: tree_stack(joined, [batch[key] for batch in batches])
        for key in batches[0]
        if key not in _OF_SEGMENTS
    }
    indices, before = [], 0
    for batch in batches:
        indices.append(batch["sequence"] + before)
        before += int(batch["sequence"].max()) + 1
    states = torch.cat([batch["state"] for batch in batches])
    return {**steps, "state": states, "sequence": torch.cat(indices)}


_OF_SEGMENTS = ("state", "sequence")


def _rows(value: Tensor, chosen: Tensor) -> Tensor:
    return value[chosen]


def _columns(value: Any, chosen: Tensor) -> Any:
    return tree_map(lambda leaf: leaf[:, chosen], value)


def _padded(leaf: Tensor, length: int) -> Tensor:
    missing = length - len(leaf)
    return torch.cat([leaf, leaf.new_zeros((missing, *leaf.shape[1:]))]) if missing else leaf
