"""Named random streams: each is keyed by its name, not by the order of creation."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, name: str, *keys: int) -> int:
    """Return a 63-bit seed for the stream ``name`` of run ``seed``; ``keys`` select substreams."""
    sequence = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()), *keys))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def shard_key(shard: int) -> tuple[int, ...]:
    """Return the key of a shard's substream; the first shard has the stream itself."""
    return (shard,) if shard else ()


def torch_stream(
    seed: int, name: str, *keys: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a torch generator at the start of the stream ``name``."""
    import torch

    return torch.Generator(device=device).manual_seed(stream_seed(seed, name, *keys))


def restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    """Restore a generator's state; one of another kind of device seeds it instead."""
    if len(state) == len(generator.get_state()):
        generator.set_state(state)
        return
    digest = hashlib.sha256(state.numpy().tobytes()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def shard_streams(seed: int, name: str, shards: Iterable[int]) -> list[torch.Generator]:
    """Return a generator for each shard, at the start of its stream ``name``."""
    return [torch_stream(seed, name, *shard_key(shard)) for shard in shards]
