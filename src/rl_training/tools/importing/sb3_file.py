"""Read a model file of Stable-Baselines3: its weights, and the plain values beside them.

Such a file is a zip with ``policy.pth``, the weights as `torch.save` writes them, and ``data``,
JSON in which other values are pickled and encoded as text. These pickles are never decoded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.stored_zip import ArchiveError, quote, read_directory, read_small
from rl_training.tools.importing.plain_zip import open_plain_zip
from rl_training.untrusted_files import open_regular

_MAX_FILE = 2 << 30
_MAX_DATA = 16 << 20
_MAX_STRUCTURE = 4 << 20
_SHARED_FACTOR = 4
"""Weights of a shared encoder are listed several times, and stored once."""
_PICKLED = ":serialized:"
_GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch FloatStorage",
    "torch LongStorage",
}
"""What the structure of a file of weights names."""
_OTHER_CALLS = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """What a model file contains, without its pickles."""

    path: Path
    sha256: str
    weights: Mapping[str, Tensor]
    data: Mapping[str, Any]
    """Settings; of a pickled value the plain attributes that are written beside it."""

    @property
    def policy_kwargs(self) -> Mapping[str, Any]:
        """The ``policy_kwargs``; classes among them are texts."""
        kwargs = self.data.get("policy_kwargs")
        return kwargs if isinstance(kwargs, Mapping) else {}


def read_model(path: Path) -> SavedModel:
    """Read a model file.

    Raises:
        UserError: It is no model of Stable-Baselines3, or is damaged or malicious.
    """
    with open_plain_zip(path, _MAX_FILE, "a model of Stable-Baselines3") as found:
        missing = {"data", "policy.pth"} - set(found.namelist())
        if missing:
            raise UserError(
                f"{path} is no model of Stable-Baselines3: it lacks {', '.join(sorted(missing))}"
            )
        if found.getinfo("data").file_size > _MAX_DATA:
            raise UserError(f"{path}: its settings are larger than {_MAX_DATA >> 20} MiB")
        data = _plain(found.read("data"), path)
        weights = _weights(found.read("policy.pth"), path)
    with open_regular(path, _MAX_FILE) as file:
        sha256 = hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()
    return SavedModel(path, sha256, weights, data)


def _plain(content: bytes, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: its settings are not valid JSON") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: its settings are not a mapping")
    for value in data.values():
        if isinstance(value, dict):
            value.pop(_PICKLED, None)
    return data


def _weights(content: bytes, path: Path) -> dict[str, Tensor]:
    where = f"{path}: policy.pth"
    stream: Any = io.BytesIO(content)
    try:
        entries = read_directory(stream, len(content))
        _check_structure(read_small(stream, entries, "data.pkl", _MAX_STRUCTURE), where)
    except ArchiveError as error:
        raise UserError(f"{where} {error}") from None
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - of a malicious file it may be any
        detail = " ".join(str(error).split())[:200]
        raise UserError(f"{where} cannot be read ({type(error).__name__}: {detail})") from None
    if not isinstance(state, dict) or not state:
        raise UserError(f"{where} holds no weights")
    for name, value in state.items():
        _check_weight(name, value, where)
    if sum(value.nbytes for value in state.values()) > _SHARED_FACTOR * len(content):
        raise UserError(f"{where} has more weights than bytes")
    return dict(state)


def _check_structure(structure: bytes, where: str) -> None:
    """Raise UserError where a pickle names anything but what tensors are made from."""
    try:
        for instruction, argument, _ in pickletools.genops(structure):
            is_named = instruction.name == "GLOBAL"
            if instruction.name in _OTHER_CALLS or (is_named and argument not in _GLOBALS):
                named = quote(str(argument or instruction.name))
                raise UserError(f"{where} was not opened: it names {named}, and weights do not")
    except (ValueError, IndexError, AttributeError):
        raise UserError(f"{where} is damaged") from None


def _check_weight(name: Any, value: Any, where: str) -> None:
    if type(name) is not str or not isinstance(value, Tensor) or value.layout != torch.strided:
        raise UserError(f"{where}: {quote(str(name))} is no weight")
    if value.dtype not in (torch.float32, torch.int64):
        raise UserError(f"{where}: {quote(name)} is of {value.dtype}, not float32")
    # Larger than its storage: an expanded view, small in the file and huge when copied.
    if value.nbytes > value.untyped_storage().nbytes() or not value.is_contiguous():
        raise UserError(f"{where}: {quote(name)} is a view of fewer numbers than it has")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise UserError(f"{where}: {quote(name)} holds a NaN or an infinity")
