"""Where a study is stored: a SQLite database or a journal of JSON lines, shared by processes.

Neither is unpickled, nor is what Optuna's CMA-ES sampler would store in them (see `cma_es`).
"""

from __future__ import annotations

import importlib.util
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_training.errors import ConfigError, UserError
from rl_training.tools.tune.locks import locked

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_DATABASES, _JOURNALS = (".db", ".sqlite", ".sqlite3"), (".log", ".journal")
_SECONDS_TO_WAIT = 60
_SQLITE_HEADER = b"SQLite format 3\0"


def require_optuna() -> None:
    """Raise `ConfigError` if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("tuning needs the extra 'tune'; in the clone: pip install '.[tune]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)


def check_storage(path: Path) -> None:
    """Refuse a path that is not that of a SQLite database or of a journal."""
    if re.match(r"\w+:/", str(path)):
        raise ConfigError(f"--storage is the path of a file, such as study.db; got {path}")
    if path.suffix not in (*_DATABASES, *_JOURNALS):
        raise ConfigError(
            f"--storage must end in .db (SQLite) or .log (a journal); got {str(path)!r}"
        )
    if path.suffix in _DATABASES and re.search(r"[?{}]", str(path)):  # it becomes part of a URL
        raise ConfigError(
            f"the path of a SQLite file must not contain '?', '{{' or '}}'; got {path}"
        )
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is not a regular file: choose another --storage")
    if path.is_file() and path.suffix in _DATABASES:
        with path.open("rb") as file:
            start = file.read(len(_SQLITE_HEADER))
        if start not in (b"", _SQLITE_HEADER):
            raise UserError(f"{path} is not a SQLite database: choose another --storage")


def lock_file(path: Path) -> Path:
    """Return the file whose lock a process holds while it chooses a trial."""
    return path.with_name(f"{path.name}.lock")


def open_storage(path: Path) -> BaseStorage:
    """Open a storage, or create it; call with the lock of ``lock_file(path)``."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        if path.suffix in _JOURNALS:
            backend = JournalFileBackend(str(path), lock_obj=cast("Any", _JournalLock(path)))
            return JournalStorage(backend)
        return RDBStorage(
            f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": _SECONDS_TO_WAIT}}
        )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot open the study in {path}: {reason}") from error


class _JournalLock:
    """A lock for Optuna's journal that is free again when its process was killed."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file = journal.with_name(f"{journal.name}.write-lock")
        self._held: AbstractContextManager[None] | None = None

    def acquire(self) -> bool:
        """Wait for the lock; remove a line that a process which was killed wrote in part."""
        self._held = locked(self._file)
        self._held.__enter__()
        _remove_partial_line(self._journal)
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._held is not None:
            self._held.__exit__(None, None, None)


def _remove_partial_line(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
