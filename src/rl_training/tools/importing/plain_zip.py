"""Zip files of other people whose entries are not compressed: models, and arrays of NumPy.

They are read with limits: an entry is never larger than the file, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from rl_training.errors import UserError
from rl_training.stored_zip import quote
from rl_training.types import Array
from rl_training.untrusted_files import open_regular

_END = struct.Struct("<4s4H2IH")
_MAX_DIRECTORY = 1 << 20
"""Bytes of the directory at the end of the file; that of a model has a few hundred."""


@contextlib.contextmanager
def open_plain_zip(path: Path, max_bytes: int, kind: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file without compression; ``kind`` says in errors what it should be."""
    if not path.exists():
        raise UserError(f"there is no file {path}")
    try:
        with open_regular(path, max_bytes) as file:
            _check_end(file, path, kind)
            with zipfile.ZipFile(file) as found:
                _check_entries(found, path, os.fstat(file.fileno()).st_size)
                yield found
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _check_end(file: BinaryIO, path: Path, kind: str) -> None:
    """Raise UserError unless the file ends as a zip file with a small directory does."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    end = file.read(_END.size)
    if len(end) < _END.size or end[:4] != b"PK\x05\x06":
        raise UserError(f"{path} is not {kind} (it is no zip file, or its end is missing)")
    if _END.unpack(end)[5] > _MAX_DIRECTORY:
        raise UserError(f"{path} is not {kind} (its directory is too large)")
    file.seek(0)


def _check_entries(found: zipfile.ZipFile, path: Path, size: int) -> None:
    entries = found.infolist()
    if len({entry.filename for entry in entries}) != len(entries):
        raise UserError(f"{path} has two entries of one name")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise UserError(
                f"{path}: its entry {quote(entry.filename)} is compressed or encrypted, which those"
                " of such files are not"
            )
    if sum(entry.file_size for entry in entries) > size:
        raise UserError(f"{path} is damaged (its entries are larger than the file)")


def read_arrays(path: Path, names: tuple[str, ...], max_bytes: int) -> dict[str, Array]:
    """Return arrays of numbers from a file that ``numpy.savez`` wrote.

    Raises:
        UserError: One is missing, or is no array of numbers.
    """
    arrays: dict[str, Array] = {}
    with open_plain_zip(path, max_bytes, "a file of arrays (.npz)") as found:
        there = found.namelist()
        for name in names:
            if f"{name}.npy" not in there:
                listed = ", ".join(quote(one) for one in there[:10])
                raise UserError(f"{path} has no array {name!r}; it has {listed or 'none'}")
            arrays[name] = _array(found.read(f"{name}.npy"), f"{path}: {name!r}")
    return arrays


def _array(content: bytes, where: str) -> Array:
    stream = io.BytesIO(content)
    try:
        version = npy.read_magic(stream)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, is_fortran, dtype = read(stream)
    except (ValueError, KeyError, SyntaxError, RecursionError, MemoryError):
        raise UserError(f"{where} is no array of NumPy") from None
    if dtype.kind not in "biuf" or is_fortran:
        raise UserError(f"{where} must be numbers in C order; it is of {dtype}")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise UserError(f"{where} has a shape that does not match its size")
    array: Array = np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise UserError(f"{where} holds a NaN or an infinity")
    return array
