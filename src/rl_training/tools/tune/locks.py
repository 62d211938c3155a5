"""Locks between processes, which the kernel releases when a process dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rl_training.errors import StorageError, UserError
from rl_training.runs import RunLock, storage_errors


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a lock file, which is created if missing; wait until it is free."""
    if os.name != "posix":
        yield
        return
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(folder: Path) -> RunLock | None:
    """Return the lock of a folder, which is created if missing; None if another process has it."""
    with storage_errors():
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return RunLock(folder)
    except UserError:
        return None
