"""Replay files: immutable chunks named by their digests, written only when they change."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_training.archive import ArchiveError, read_archive
from rl_training.checkpointing import load_checkpoint, state_digest, to_storable
from rl_training.communicator import saved_shards
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import CheckpointError
from rl_training.runs import write_durably

_SUFFIX = ".replay"
_NAME = re.compile(r"[0-9a-f]{64}")
_WITHOUT = "resume without the replay: --replay empty"


class ReplayStore:
    """The chunk files of a run; a checkpoint contains their names."""

    def __init__(self, folder: Path | None) -> None:
        self._folder_or_none = folder
        self._names: list[str] = []
        self._best: set[str] | None = None

    @property
    def _folder(self) -> Path:
        if self._folder_or_none is None:
            raise CheckpointError("a run without a run folder has no replay files")
        return self._folder_or_none

    def commit(self, replay: ReplayBuffer) -> None:
        """Write the chunks that changed since the last call."""
        self._names += [""] * (replay.num_chunks - len(self._names))
        for index in range(replay.num_chunks):
            if self._is_committed(replay, index) and self._path(self._names[index]).is_file():
                continue
            content = to_storable(replay.chunk_state(index))
            name = state_digest(content)
            path = self._path(name)
            if not path.is_file():
                buffer = io.BytesIO()
                torch.save(content, buffer)
                write_durably(path, buffer.getbuffer())
            self._names[index] = name
        replay.changed_chunks.clear()

    def state_dict(self, replay: ReplayBuffer) -> dict[str, Any]:
        """Return the names of all chunks and the position of the ring; no file is written.

        Names of chunks that changed since the last commit are computed here.
        """
        names = [
            self._names[index]
            if self._is_committed(replay, index)
            else state_digest(to_storable(replay.chunk_state(index)))
            for index in range(replay.num_chunks)
        ]
        return {"chunks": names, "ring": replay.ring_state()}

    def _is_committed(self, replay: ReplayBuffer, index: int) -> bool:
        known = index < len(self._names) and bool(self._names[index])
        return known and index not in replay.changed_chunks

    def load(self, replay: ReplayBuffer, saved: Mapping[str, Any]) -> None:
        """Restore the replay from its chunks; each is verified against its name."""
        replay.load_ring_state(saved["ring"])
        for index, name in enumerate(saved["chunks"]):
            replay.load_chunk(index, self._read(name))
        replay.changed_chunks.clear()
        self._names = list(saved["chunks"])

    def _read(self, name: str) -> dict[str, Any]:
        if not _NAME.fullmatch(str(name)):
            raise CheckpointError(f"{name!r} is not the name of a replay file; {_WITHOUT}")
        path = self._path(name)
        try:
            content = read_archive(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"the replay of this checkpoint is not in {self._folder} (only those of 'last' and"
                f" 'best' are kept); {_WITHOUT}"
            ) from None
        except ArchiveError as error:
            raise CheckpointError(f"{path} {error}; {_WITHOUT}") from None
        if state_digest(content) != name:
            raise CheckpointError(
                f"{path} was altered or damaged: its digest does not match; {_WITHOUT}"
            )
        return dict(content)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def prune(self, last: set[str], *, is_best: bool, best: Path) -> None:
        """Delete chunks that neither the last saved checkpoint nor the best one names."""
        for leftover in self._folder.glob(".*.tmp"):  # left by a process that was killed
            leftover.unlink()
        if is_best:
            self._best = set(last)
        elif self._best is None:  # once after a resume
            if not best.is_file():
                self._best = set()
            else:
                try:
                    state = load_checkpoint(best)
                except CheckpointError as error:
                    warnings.warn(f"replay files are no longer deleted: {error}", stacklevel=2)
                    return
                self._best = chunk_names(state)
        kept = self._best | last
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.stem not in kept:
                path.unlink()


def chunk_names(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the replay files of a checkpoint, those of all shards."""
    replay = state["training"]["extra"]["replay"]
    return {name for shard in saved_shards(replay) for name in shard["chunks"]}
