"""Checkpoints that are safe to open: no pickle, one atomic file, its digest inside it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import CheckpointError

FORMAT = 1
SUFFIX = ".pt"


def to_storable(value: Any, where: str = "state") -> Any:
    """Tensors and plain values only; arrays become tensors, anything else is refused by name."""
    if isinstance(value, Tensor):
        return _plain_tensor(value, where)
    if isinstance(value, np.ndarray):
        return _array_to_tensor(value, where)
    if isinstance(value, np.generic):
        value = value.item()
    # Exactly these: a subclass (an enum, say) would be pickled by its class's name.
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
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold"
        " (tensors, arrays, numbers, strings, lists and dicts are held)"
    )


def _plain_tensor(value: Tensor, where: str) -> Tensor:
    if value.layout != torch.strided or value.is_meta:
        kind = "meta" if value.is_meta else value.layout
        raise CheckpointError(f"{where} is a {kind} tensor, which can't be saved")
    tensor = value.detach().cpu()
    # A view would drag its whole storage into the file.
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
    """SHA-256 over the structure, the values and the tensor bytes."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        graph = "grad" if value.requires_grad else ""
        sha.update(f"T{value.dtype}{tuple(value.shape)}{graph}".encode())
        if value.numel():
            # A contiguous tensor of one element may still have any stride: reshape keeps it.
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
    """Write ``state`` to ``path``: complete and on disk, or not there at all."""
    stored = to_storable(state)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "digest": state_digest(stored), "state": stored}, buffer)
    write_durably(path, buffer.getbuffer())


def write_durably(path: Path, content: memoryview) -> None:
    """Write a file: complete and on disk, or not there at all."""
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
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems cannot
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def link_checkpoint(source: Path, path: Path) -> None:
    """Give a written checkpoint a second name, atomically."""
    temporary = path.parent / f".{path.stem}-link.tmp"
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint. Nothing in the file is ever executed."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or is not a checkpoint ({reason[:200]}){_offer_older(path)}"
        ) from None
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of rl_training")
    version = content["format"]
    if not isinstance(version, int) or version > FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {version!r}; this rl_training reads up to {FORMAT}:"
            " use the version that wrote it, or a newer one"
        )
    state = content.get("state")
    try:
        intact = isinstance(state, dict) and bool(content.get("digest") == state_digest(state))
    except Exception:  # noqa: BLE001 - a damaged structure may even hold itself
        intact = False
    if not intact:
        raise CheckpointError(
            f"{path} was altered or damaged: its digest does not match{_offer_older(path)}"
        )
    return cast("dict[str, Any]", state)


def _offer_older(path: Path) -> str:
    try:
        broken = path.stat()
        others = [
            p
            for p in path.parent.glob(f"*{SUFFIX}")
            if p != path and not os.path.samestat(p.stat(), broken)
        ]
    except OSError:
        return ""
    if not others:
        return ""
    return f"; the one before it: {max(others, key=lambda p: p.stat().st_mtime)}"


def find_checkpoint(path: Path) -> Path:
    """A checkpoint file from its own path or from a run folder."""
    if path.is_dir():
        for candidate in (path / "checkpoints" / "last.pt", path / "last.pt"):
            if candidate.is_file():
                return candidate
        raise CheckpointError(f"{path} holds no checkpoint (checkpoints/last.pt)")
    with_suffix = path.with_name(path.name + SUFFIX)
    if not path.exists() and with_suffix.is_file():
        return with_suffix
    if not path.exists():
        raise CheckpointError(f"no checkpoint or run folder at {path}")
    return path


def prune(paths: Iterable[Path]) -> None:
    """Delete checkpoints that are no longer kept."""
    for path in paths:
        path.unlink(missing_ok=True)
