"""A strict reader and a writer of safetensors files.

The format is eight bytes with the length of a header, the header in JSON, and the bytes of the
tensors without gaps. Everything is checked against the size of the file before memory is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from rl_training.stored_zip import ArchiveError, damaged, quote

MAX_HEADER = 4 << 20
"""Bytes of a header; that of a model with a thousand tensors has a tenth of a MiB."""
_MAX_DIMS = 16
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Described(NamedTuple):
    """A tensor of a file: its type and its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """The tensors of a file, in the order of their bytes, and where these begin."""

    tensors: dict[str, Described]
    start: int


def read_header(file: BinaryIO, file_size: int) -> Header:
    """Return what a file contains; its tensors then have exactly the bytes that are there.

    Raises:
        ArchiveError: It is no safetensors file, or is damaged or malicious.
    """
    if sys.byteorder != "little":
        raise ArchiveError("cannot be read here (the machine must be little-endian)")
    file.seek(0)
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise ArchiveError("is no safetensors file (it is too short)")
    (length,) = _LENGTH.unpack(prefix)
    if length > min(MAX_HEADER, file_size - _LENGTH.size):
        raise damaged(f"its header would have {length:,} bytes")
    text = file.read(length)
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise damaged("its header is not valid JSON") from None
    if not isinstance(content, dict):
        raise damaged("its header is not a mapping")
    content.pop(_METADATA, None)
    start = _LENGTH.size + length
    entries = sorted((_entry(name, value) for name, value in content.items()), key=lambda e: e[2:])
    end = 0
    for name, described, first, last in entries:
        if first != end or last - first != described.nbytes:
            raise damaged(f"the bytes of {quote(name)} do not match its shape or its neighbours")
        end = last
    if start + end != file_size:
        raise damaged(f"it has {file_size:,} bytes, and its header describes {start + end:,}")
    return Header({name: described for name, described, _, _ in entries}, start)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is there twice")
    return result


def _entry(name: str, value: Any) -> tuple[str, Described, int, int]:
    """Return name, type and shape, first byte and end of a tensor."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged(f"its header does not describe {quote(name)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ArchiveError(f"has a tensor {quote(name)} of type {quote(str(dtype))}")
    counts = _are_counts(shape) and len(shape) <= _MAX_DIMS
    if not (counts and _are_counts(offsets) and len(offsets) == 2):
        raise damaged(f"its header has no valid shape or place for {quote(name)}")
    return name, Described(_DTYPES[dtype], tuple(shape)), *offsets


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def read_tensors(file: BinaryIO, header: Header) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file and the SHA-256 of the whole file."""
    file.seek(0)
    sha = hashlib.sha256(file.read(header.start))
    tensors: dict[str, Tensor] = {}
    for name, described in header.tensors.items():
        flat = torch.empty(described.nbytes, dtype=torch.uint8)
        memory = flat.numpy().data
        if file.readinto(memory) != described.nbytes:  # type: ignore[attr-defined]
            raise damaged("it is cut off")
        sha.update(memory)
        if described.dtype == torch.bool and bool((flat > 1).any()):
            raise damaged(f"{quote(name)} holds values that are neither true nor false")
        tensors[name] = flat.view(described.dtype).reshape(described.shape)
    return tensors, sha.hexdigest()


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file with these tensors.

    As in other writers of the format, the widest numbers are first, so that all are aligned.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files cannot hold")
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        place = [end, end + len(content)]
        end = place[1]
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        parts.append(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([_LENGTH.pack(len(text)), text, *parts])
