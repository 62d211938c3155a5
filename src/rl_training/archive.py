"""A strict reader of checkpoint files: it accepts only what this package writes.

``torch.save`` writes a zip file. Its first entry, ``data.pkl``, is a pickle of the structure; the
bytes of each tensor are a separate entry. ``stored_zip`` finds the entries, ``plain_pickle``
interprets the structure; then the bytes are read directly into the tensors' memory.
"""

from __future__ import annotations

import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_training.plain_pickle import DTYPES, MAX_DEPTH, MAX_DIMS, MAX_NODES, PlainUnpickler, is_key
from rl_training.stored_zip import (
    ArchiveError,
    damaged,
    quote,
    read_at,
    read_directory,
    read_into,
    read_small,
)

__all__ = ["ArchiveError", "check_storable", "read_archive"]

_TENSOR_NODES = 20  # values that describe a tensor (at most 19), besides its sizes and strides
_MAX_TEXT = 32 << 20  # bytes of strings and integers; settings and names take kilobytes
_MAX_PICKLE = 64 << 20  # bytes of data.pkl: the text, and 12 bytes for each node
_MAX_INT_BITS = 255 * 8 - 1  # the instruction for long integers holds 255 bytes
_SHARED_FACTOR = 4  # tensors may share storages, but a digest reads the bytes of each tensor
_SHARED_BYTES = 64 << 20  # small tensors may be shared more often than that

_RECORDS = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment"}
_RECORDS.add(".data/serialization_id")


def read_archive(path: Path) -> Any:
    """Return the value that was saved to ``path``, with tensors on the CPU.

    Raises:
        ArchiveError: The file is damaged, malicious, or was not written by this package.
        OSError: The file cannot be opened or read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        raise ArchiveError("is not a file")
    with path.open("rb") as file:
        _check_start(file, status.st_size)
        entries = read_directory(file, status.st_size)
        if read_small(file, entries, "byteorder", 6) != b"little" or sys.byteorder != "little":
            raise ArchiveError("cannot be read here (files and machines must be little-endian)")
        unpickler = PlainUnpickler(read_small(file, entries, "data.pkl", _MAX_PICKLE), entries)
        content = unpickler.run()
        try:
            check_storable(content)
        except ValueError as error:
            raise damaged(str(error)) from None
        unknown = entries.keys() - _RECORDS - unpickler.storages.keys()
        if unknown:
            raise damaged(f"it has an unknown entry {quote(min(unknown))}")
        for name, storage in unpickler.storages.items():
            read_into(file, entries[name], storage.numpy().data)
    return content


def _check_start(file: BufferedReader, size: int) -> None:
    """Raise ArchiveError unless this is a zip file, with a separate message for pickles."""
    if not size:
        raise ArchiveError("is empty (0 bytes)")
    head = file.read(4)
    if head == b"PK\x03\x04":
        return
    # Protocols 2 to 5 start with their number, 0 and 1 with an instruction; all end with ".".
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if head[:1] in (b"(", b"]", b"}", b")", b"c"):
        is_pickle = read_at(file, size - 1, 1) == b"."
    if is_pickle:
        raise ArchiveError("contains code (a Python pickle) and was not opened", holds_code=True)
    raise ArchiveError("is not a checkpoint")


def check_storable(value: Any) -> None:
    """Check that ``read_archive`` would accept a file of ``value``.

    Raises:
        ValueError: The tree is too deep, too large, or contains unsupported values.
    """
    tally = _Tally()
    level = [value]  # all values at one depth
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                if not all(map(is_key, item)):
                    raise ValueError(
                        "a dict has a key that is neither a string nor a 64-bit integer"
                    )
                tally.nodes += 1  # an empty group of items may end a dict
                below += item.keys()
                below += item.values()
            elif type(item) is list:
                below += item
            else:
                tally.add(item)
            if tally.nodes + len(level) + len(below) > MAX_NODES:
                raise ValueError(f"it has more than {MAX_NODES:,} values")
        tally.nodes += len(level)
        level = below
    if level:
        raise ValueError(f"dicts and lists are nested more than {MAX_DEPTH} deep")
    if tally.text > _MAX_TEXT:
        raise ValueError(f"strings and integers take more than {_MAX_TEXT >> 20} MiB")
    if tally.tensor_bytes > _SHARED_FACTOR * sum(tally.storages.values()) + _SHARED_BYTES:
        raise ValueError("too many tensors share the same memory")


class _Tally:
    """Sizes of the values of a tree in a file."""

    def __init__(self) -> None:
        self.nodes = 0
        self.text = 0
        self.tensor_bytes = 0
        self.storages: dict[int, int] = {}  # bytes by address

    def add(self, item: Any) -> None:
        """Count a value that is neither a dict nor a list."""
        if type(item) is str:
            self.text += len(item) if item.isascii() else 4 * len(item)
        elif type(item) is int:
            self.text += item.bit_length() // 8
            if item.bit_length() > _MAX_INT_BITS:
                raise ValueError(f"an integer has more than {_MAX_INT_BITS:,} bits")
        elif type(item) is Tensor:
            if item.dtype not in DTYPES or item.dim() > MAX_DIMS:
                raise ValueError(f"a tensor is of {item.dtype} with {item.dim()} dimensions")
            self.nodes += _TENSOR_NODES + 2 * item.dim()
            self.storages[item.data_ptr()] = item.nbytes
            self.tensor_bytes += item.nbytes
        elif item is not None and type(item) not in (bool, float):
            raise ValueError(f"a value is a {type(item).__name__}")
