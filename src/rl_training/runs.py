"""Run folders: their names, metadata and locks, and durable writing of files."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import StorageError, UserError
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

FORMAT = 1
_PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "box2d", "ale-py")


def make_run_dir(config: TrainConfig[Any]) -> Path:
    """Create a new folder ``ALGO__ENV__seedN__UTC-STAMP`` in ``config.output_dir``."""
    name = config.env_id or config.dataset or "env"
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "env"
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    base = f"{config.algo}__{env[:80]}__seed{config.seed}__{stamp}"
    for attempt in range(1000):
        path = config.output_dir / (base if attempt == 0 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                continue
            raise UserError(f"cannot create a run folder: {path} is not a folder") from None
        except OSError as error:
            kind = StorageError if is_storage_error(error) else UserError
            raise kind(f"cannot create the run folder {path}: {error.strerror}") from None
        return path
    raise UserError(f"cannot find a free name for a run folder like {base}")


def make_named_run_dir(path: Path) -> Path:
    """Create the run folder ``path``; raise UserError if it exists and is not empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        used = any(path.iterdir())
    except OSError as error:
        kind = StorageError if is_storage_error(error) else UserError
        raise kind(f"cannot create the run folder {path}: {error.strerror}") from None
    if used:
        raise UserError(
            f"the run folder {path} is not empty: choose another one, or continue its run with"
            " PPO.load(folder).learn(n), or the class that it was trained with"
        )
    return path


class RunLock:
    """A lock that prevents two processes from training in the same run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.release: Callable[[], Any] = lambda: None
        """Release the lock; also happens when this object is garbage collected."""
        if os.name != "posix":
            return
        import fcntl

        descriptor = os.open(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{run_dir} is being trained by another process") from None
            return  # a file system without locks
        self.release = weakref.finalize(self, os.close, descriptor)


_FULL_OR_FORBIDDEN = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
}


def is_storage_error(error: BaseException) -> bool:
    """Return whether the cause is the disk (full, read-only, no permission, broken)."""
    return isinstance(error, OSError) and error.errno in _FULL_OR_FORBIDDEN


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Raise `StorageError` instead of OSError if a file cannot be written."""
    try:
        yield
    except OSError as error:
        if not is_storage_error(error):
            raise
        where = f"cannot write {error.filename}" if error.filename else "cannot write"
        raise StorageError(f"{where}: {error.strerror}") from error


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``place`` for files, and rename it to ``place`` at the end.

    So ``place``, which must be missing or empty before, is complete and durable or absent. On
    failure the hidden folder is deleted, with the parent folders that were made for it.
    """
    parents = [parent for parent in place.absolute().parents if not parent.exists()]
    hidden = place.absolute().with_name(f".{place.name}-{secrets.token_hex(4)}.tmp")
    try:
        try:
            hidden.mkdir(parents=True)
        except OSError as error:  # a file where a folder is needed is a mistake of the user
            kind = StorageError if is_storage_error(error) else UserError
            raise kind(f"cannot create {place}: {error.strerror}") from None
        yield hidden
        try:
            for path in hidden.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if place.is_dir():
                place.rmdir()
            hidden.rename(place)
        except OSError as error:
            raise StorageError(f"cannot write {place}: {error.strerror}") from error
        sync_folder(place.absolute().parent)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else may have written there
            for parent in parents:
                parent.rmdir()
        if is_storage_error(error) and isinstance(error, OSError):
            raise StorageError(f"cannot write {place}: {error.strerror}") from error
        raise


def refuse_links(run_dir: Path) -> None:
    """Raise UserError if files that a resume would write are symbolic links."""
    written = [run_dir, *(run_dir / name for name in ("checkpoints", "replay", "tensorboard"))]
    for folder in written:
        if folder != run_dir and folder.is_symlink():
            raise _linked(folder)
        if folder.is_dir():
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        raise _linked(folder / entry.name)


def _linked(path: Path) -> UserError:
    return UserError(
        f"{path} is a symbolic link: resuming would write to its target. Replace it by a real file"
        " or folder, or start a new run from the weights with init_from"
    )


def write_durably(path: Path, content: memoryview) -> None:
    """Write a file atomically and durably."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make created and renamed files of a folder durable."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems do not support it
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file; empty if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def versions() -> dict[str, str]:
    """Return the versions of packages that a run's numbers depend on."""
    found = {"rl_training": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def describe_run(config: TrainConfig[Any], **extra: Any) -> dict[str, Any]:
    """Return the metadata of a new run."""
    return {
        "format": FORMAT,
        "created": _now(),
        "command": sys.argv,
        "algo": config.algo,
        "env_id": config.env_id,
        "seed": config.seed,
        "versions": versions(),
        "git_commit": _git_commit(),
        "hardware": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cpu_count": os.cpu_count(),
        },
        "resumes": [],
        **extra,
    }


def record_resume(run_dir: Path, **details: Any) -> None:
    """Add a resume to the run's lineage."""
    path = run_dir / "metadata.json"
    content = read_json(path)
    entry = {"at": _now(), "command": sys.argv, "versions": versions(), **details}
    earlier = content.get("resumes")
    content["resumes"] = [*(earlier if isinstance(earlier, list) else []), entry]
    write_json(path, content)


def record_inexactness(run_dir: Path) -> None:
    """Record that a run can no longer be resumed exactly."""
    path = run_dir / "metadata.json"
    content = read_json(path)
    if content.get("resume") != "approximate":
        write_json(path, {**content, "resume": "approximate"})


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 - whichever git the user has
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
