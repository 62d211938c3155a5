"""Checkpoints: one file, written atomically, verified by a digest, and safe to open."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.archive import ArchiveError, check_storable, read_archive
from rl_training.errors import CheckpointError, StorageError
from rl_training.runs import sync_folder, write_durably
from rl_training.shared_folder import WEIGHTS
from rl_training.trust import remember_own

FORMAT = 1
SUFFIX = ".pt"


def to_storable(value: Any, where: str = "state") -> Any:
    """Return ``value`` as tensors and plain values; raise CheckpointError for anything else."""
    if isinstance(value, Tensor):
        return _plain_tensor(value, where)
    if isinstance(value, np.ndarray):
        return _array_to_tensor(value, where)
    if isinstance(value, np.generic):
        value = value.item()
    # Exactly these types: a subclass such as an enum would be pickled by its class name.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{where}: a key of type {type(key).__name__} can't be saved")
        return {key: to_storable(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_storable(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot contain"
        " (only tensors, arrays, numbers, strings, lists and dicts)"
    )


def _plain_tensor(value: Tensor, where: str) -> Tensor:
    if value.layout != torch.strided or value.is_meta:
        kind = "meta" if value.is_meta else value.layout
        raise CheckpointError(f"{where} is a {kind} tensor, which can't be saved")
    tensor = value.detach().cpu()
    # torch.save would write the whole storage of a view.
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    if whole and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _array_to_tensor(value: np.ndarray[Any, Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{where} is an array of {value.dtype}, which can't be saved"
        ) from None


def state_digest(value: Any) -> str:
    """Return a SHA-256 over structure, values and tensor bytes."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        graph = "grad" if value.requires_grad else ""
        sha.update(f"T{value.dtype}{tuple(value.shape)}{graph}".encode())
        if value.numel():
            # A tensor of one element may have any stride, which reshape keeps.
            flat = value.detach().contiguous().as_strided((value.numel(),), (1,))
            sha.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, dict):
        sha.update(f"D{len(value)}".encode())
        for key, item in value.items():
            _feed(sha, key)
            _feed(sha, item)
    elif isinstance(value, list):
        sha.update(f"L{len(value)}".encode())
        for item in value:
            _feed(sha, item)
    else:
        text = f"{type(value).__name__}:{value!r}"
        sha.update(f"V{len(text)}:{text}".encode())


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically and durably."""
    stored = to_storable(state)
    try:
        check_storable(stored)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be saved: {error}") from None
    digest = state_digest(stored)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "digest": digest, "state": stored}, buffer)
    remember_own(stored.get("config"), digest)
    write_durably(path, buffer.getbuffer())


def link_checkpoint(source: Path, path: Path) -> None:
    """Create a second name for a checkpoint file, atomically."""
    temporary = path.parent / f".{path.stem}-link.tmp"
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


class Stored(NamedTuple):
    """A verified checkpoint."""

    digest: str
    state: dict[str, Any]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint, without executing or importing anything from the file."""
    return read_checkpoint(path).state


def read_checkpoint(path: Path) -> Stored:
    """Read and verify a checkpoint; return its state and digest."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        content = read_archive(path)
    except ArchiveError as error:
        offer = "" if error.holds_code else _offer_older(path)
        raise CheckpointError(f"{path} {error}{offer}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of rl_training")
    version = content["format"]
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {version!r}; this rl_training reads up to {FORMAT}:"
            " use the version that wrote it, or a newer one"
        )
    state, digest = content.get("state"), content.get("digest")
    if not isinstance(state, dict) or digest != state_digest(state):
        raise CheckpointError(
            f"{path} was altered or damaged: its digest does not match{_offer_older(path)}"
        )
    return Stored(digest, state)


def checkpoint_step(path: Path) -> int:
    """Return the step in a numbered checkpoint's name; -1 for other names."""
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _offer_older(path: Path) -> str:
    """Return the end of a message: the checkpoint before ``path``, if a run wrote ``path``."""
    if not _is_of_run(path):
        return ""
    try:
        broken = path.stat()
        others = [
            p
            for p in path.parent.glob(f"*{SUFFIX}")
            if p != path and _is_of_run(p) and not os.path.samestat(p.stat(), broken)
        ]
    except OSError:
        return ""
    if not others:
        return ""
    return f"; use the one before it: {max(others, key=checkpoint_step)}"


def _is_of_run(path: Path) -> bool:
    """Whether a file has a name that training gives to checkpoints."""
    return path.stem in ("last", "best") or checkpoint_step(path) >= 0


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint file of a path: the file itself, or that of a folder.

    Of a run folder it is the last one, of a shared folder its file of weights.
    """
    if path.is_dir():
        for candidate in (path / "checkpoints" / "last.pt", path / "last.pt", path / WEIGHTS):
            if candidate.is_file():
                return candidate
        raise CheckpointError(
            f"{path} contains no checkpoint (checkpoints/last.pt){_runs_in(path)}"
        )
    with_suffix = path.with_name(path.name + SUFFIX)
    if not path.exists() and with_suffix.is_file():
        return with_suffix
    if not path.exists():
        raise CheckpointError(f"no checkpoint or run folder at {path}")
    return path


def _runs_in(folder: Path) -> str:
    """Return the end of a message: the run folders directly in ``folder``, if there are any."""
    try:
        found = [(path.stat().st_mtime, path) for path in folder.glob("*/checkpoints/last.pt")]
    except OSError:
        return ""
    if not found:
        return ""
    newest = max(found)[1].parent.parent
    if len(found) == 1:
        return f"; it contains one run folder: {newest}"
    return f"; it contains {len(found)} run folders: name one of them, the newest is {newest}"


def prune(paths: Iterable[Path]) -> None:
    """Delete checkpoint files."""
    for path in paths:
        path.unlink(missing_ok=True)
