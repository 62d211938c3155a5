"""Reading files from other people: only regular files, and only up to a size limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from rl_training.errors import UserError

_MEBIBYTE = 1 << 20


def open_regular(path: Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of at most ``max_bytes`` for reading.

    Raises:
        OSError: It is missing, too large, or a pipe, device or folder. These are not opened,
            because opening a pipe waits for its other end.
    """
    _require_regular(path, path.stat())
    # O_NONBLOCK, in case the file was replaced by a pipe since the check.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        status = os.fstat(file.fileno())
        _require_regular(path, status)
        if status.st_size > max_bytes:
            raise _too_large(path, max_bytes)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``; raise OSError otherwise."""
    with open_regular(path, max_bytes) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew, or its size was not known in advance
        raise _too_large(path, max_bytes)
    return content


def require_no_links(path: Path, below: Path) -> None:
    """Raise UserError if a part of ``path`` inside the folder ``below`` is a symbolic link.

    ``below`` itself and its parent folders may be links.
    """
    target = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links
    for root in {Path(os.path.abspath(below)), below.resolve()}:  # noqa: PTH100
        if not target.is_relative_to(root):
            continue
        for part in reversed([target, *target.parents]):
            if part != root and part.is_relative_to(root) and part.is_symlink():
                raise UserError(
                    f"{part} is a symbolic link, and files are not written through links inside"
                    f" {below}: remove the link, or choose another output folder"
                )


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _too_large(path: Path, max_bytes: int) -> OSError:
    limit = f"{max_bytes // _MEBIBYTE} MiB" if max_bytes >= _MEBIBYTE else f"{max_bytes} bytes"
    return OSError(errno.EFBIG, f"it is larger than {limit}", str(path))
