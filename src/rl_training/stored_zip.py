"""A strict reader of zip files as ``torch.save`` writes them: no gaps, no overlapping entries.

For each entry there is a local header, the entry's bytes and a descriptor if there are any bytes;
then the directory with a record for each entry, then three end records. Nothing is compressed and
there is nothing in between, so all entries together are smaller than the file.
"""

from __future__ import annotations

import struct
import zlib
from io import BufferedReader
from typing import NamedTuple

MAX_ENTRIES = 100_016  # a storage for each tensor of the largest tree, and a few small records
_MAX_RECORD = 512  # bytes of a directory record: 46, and a name
_MAX_DESCRIPTOR = 24  # signature, checksum, and two sizes of 4 or 8 bytes
_CHUNK = 1 << 20  # bytes read at a time, so that the checksum finds them in the cache
_SHORT = 0xFFFFFFFF  # in a 32-bit field: the value is too large and is in the extra field
_FLAGS = (0x800, 0x808)  # names in UTF-8, without and with a descriptor; others mean encryption

_LOCAL = struct.Struct("<4s5H3I2H")
_RECORD = struct.Struct("<4s6H3I5H2I")
_ENDS = struct.Struct("<4sQ2H2I4Q 4sIQI 4s4H2IH")  # the 64-bit end record, its locator, the old one


class ArchiveError(Exception):
    """A file that this package did not write, or that was damaged.

    The message is one line to print after the file's name: "is damaged (...)".
    """

    def __init__(self, message: str, *, holds_code: bool = False) -> None:
        super().__init__(message)
        self.holds_code = holds_code


class Entry(NamedTuple):
    """Position and size of an entry's bytes."""

    start: int
    size: int
    crc: int


class _Record(NamedTuple):
    name: bytes
    flags: int
    offset: int  # of the local header
    size: int
    crc: int
    length: int  # of the record itself


def damaged(reason: str) -> ArchiveError:
    """Return the error for a damaged file."""
    return ArchiveError(f"is damaged ({reason})")


def quote(name: str) -> str:
    """Return a name from a file for a message, shortened and without control characters."""
    text = ascii(name)
    return text if len(text) <= 80 else text[:77] + "..."


def read_directory(file: BufferedReader, file_size: int) -> dict[str, Entry]:
    """Return the entries by name, without their common prefix ("archive/")."""
    start, directory, count = _read_ends(file, file_size)
    entries: dict[str, Entry] = {}
    position = end = 0
    prefix = b""
    while position < len(directory):
        record = _parse_record(directory, position)
        position += record.length
        if not end <= record.offset <= end + (_MAX_DESCRIPTOR if entries else 0):
            raise damaged("its entries overlap or are out of order")
        entry = Entry(_data_start(file, record), record.size, record.crc)
        end = entry.start + entry.size
        prefix = prefix or record.name[: record.name.find(b"/") + 1]
        name = record.name.removeprefix(prefix).decode("utf-8", "replace")
        if name in entries or not record.name.startswith(prefix):
            raise damaged(f"a second or misplaced entry {quote(name)}")
        entries[name] = entry
    if len(entries) != count or not end <= start <= end + _MAX_DESCRIPTOR:
        raise damaged("its entries overlap or are out of order")
    return entries


def _read_ends(file: BufferedReader, file_size: int) -> tuple[int, bytes, int]:
    """Return the offset of the directory, its bytes, and its number of entries."""
    ends_at = max(0, file_size - _ENDS.size)
    found = _ENDS.unpack(read_at(file, ends_at, _ENDS.size))
    versions = found[2:4]
    count, size, start = found[7:10]
    end = (b"PK\x06\x06", 44, *versions, 0, 0, count, count, size, start)
    locator = (b"PK\x06\x07", 0, ends_at, 1)
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, _SHORT), min(start, _SHORT))
    if found != (*end, *locator, b"PK\x05\x06", 0, 0, *short, 0):
        raise damaged("its end is missing")
    if start + size != ends_at or count > MAX_ENTRIES or size > count * _MAX_RECORD:
        raise damaged("its directory has a wrong size")
    return start, read_at(file, start, size), count


def _parse_record(directory: bytes, position: int) -> _Record:
    name_at = position + _RECORD.size
    if name_at > len(directory):
        raise damaged("its directory is cut off")
    fields = _RECORD.unpack_from(directory, position)
    magic, _, _, flags, method, _, _, crc, stored, size, *lengths, disk, _, _, offset = fields
    extra_at, end = name_at + lengths[0], name_at + sum(lengths)
    if magic != b"PK\x01\x02" or end > len(directory):
        raise damaged("its directory is cut off")
    # The extra field may contain only 64-bit versions of values that do not fit in 32 bits.
    wide = (size, stored, offset).count(_SHORT)
    header = struct.pack("<2H", 1, 8 * wide) if wide else b""
    extra = directory[extra_at:end]
    if not extra.startswith(header) or len(extra) != len(header) + 8 * wide:
        raise damaged("an entry has an unknown field")
    more = iter(struct.unpack_from(f"<{wide}Q", extra, len(header)))
    size, stored, offset = (next(more) if v == _SHORT else v for v in (size, stored, offset))
    if flags not in _FLAGS or method or disk or stored != size:
        raise damaged("an entry is compressed or encrypted")
    return _Record(directory[name_at:extra_at], flags, offset, size, crc, end - position)


def _data_start(file: BufferedReader, record: _Record) -> int:
    """Return the offset of an entry's bytes; its local header must equal its record."""
    header = _LOCAL.unpack(read_at(file, record.offset, _LOCAL.size))
    magic, _, flags, method, _, _, crc, stored, size, name_length, extra_length = header
    name = read_at(file, record.offset + _LOCAL.size, name_length)
    short = min(record.size, _SHORT)
    agrees = (magic, flags, method, name) == (b"PK\x03\x04", record.flags, 0, record.name)
    # Checksum and sizes are zero if they are in the descriptor.
    if not agrees or (crc, stored, size) not in ((0, 0, 0), (record.crc, short, short)):
        raise damaged("an entry's two headers differ")
    return int(record.offset + _LOCAL.size + name_length + extra_length)


def read_at(file: BufferedReader, offset: int, size: int) -> bytes:
    """Return ``size`` bytes from ``offset`` on."""
    file.seek(offset)
    content = file.read(size)
    if len(content) != size:
        raise damaged("it is cut off")
    return content


def read_small(file: BufferedReader, entries: dict[str, Entry], name: str, limit: int) -> bytes:
    """Return the bytes of an entry, which must exist and have at most ``limit`` bytes."""
    if name not in entries:
        raise ArchiveError(f"is not a checkpoint (it has no {name})")
    if entries[name].size > limit:
        raise damaged(f"its {name} has more than {limit:,} bytes")
    content = read_at(file, entries[name].start, entries[name].size)
    if zlib.crc32(content) != entries[name].crc:
        raise damaged("a checksum does not match")
    return content


def read_into(file: BufferedReader, entry: Entry, memory: memoryview) -> None:
    """Read an entry's bytes into ``memory``, in chunks, without a copy."""
    crc = 0
    file.seek(entry.start)
    for begin in range(0, entry.size, _CHUNK):
        part = memory[begin : begin + _CHUNK]
        if file.readinto(part) != len(part):
            raise damaged("it is cut off")
        crc = zlib.crc32(part, crc)
    if crc != entry.crc:
        raise damaged("a checksum does not match")
