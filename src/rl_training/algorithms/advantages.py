"""Minibatches of all shards: their shares in every mean, and standardised advantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_training.algorithms.moments import merged_rows, moments_of
from rl_training.communicator import ALONE, SHARD_WEIGHT, Communicator

Minibatch = dict[str, Any]


def combine_minibatches(
    shards: Sequence[Sequence[Minibatch]],
    communicator: Communicator = ALONE,
    *,
    norm_adv: bool = False,
) -> Iterator[tuple[Minibatch, ...]]:
    """Yield, minibatch by minibatch, those of the local shards, given the minibatches of each.

    Rows that do not count (``mask``) may be more in one shard than in another: a shard's share in
    means over all shards is that of the rows that count. With ``norm_adv``, advantages have zero
    mean and unit deviation over those of all shards. Both take one collective in total.
    """
    masked = "mask" in shards[0][0] and communicator.shards > 1
    if not norm_adv and not masked:
        return zip(*shards, strict=True)
    field = "advantages" if norm_adv else "mask"
    tables = [
        torch.stack([moments_of(one[field], one.get("mask")) for one in minibatches])
        for minibatches in shards
    ]
    moments = merged_rows(communicator.gather(torch.stack(tables)))
    parts = [list(map(dict, minibatches)) for minibatches in shards]
    if masked:
        totals = moments.count.clamp(min=1)
        for table, minibatches in zip(tables, parts, strict=True):
            for one, weight in zip(minibatches, table[:, 0] / totals, strict=True):
                one[SHARD_WEIGHT] = weight
    if norm_adv:
        scales = moments.variance(correction=1).sqrt() + 1e-8
        for minibatches in parts:
            for one, mean, scale in zip(minibatches, moments.mean, scales, strict=True):
                one["advantages"] = (one["advantages"] - mean) / scale
    return zip(*parts, strict=True)
