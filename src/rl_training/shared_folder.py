"""The files of a shared policy: weights, config and spaces, in the layout of Hugging Face.

A shared folder holds ``model.safetensors``, ``config.yaml``, ``env.json`` and a ``README.md``,
which is not read. ``env.json`` contains the SHA-256 of the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from rl_training._internal.yaml_io import dump_yaml, load_yaml
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.runs import new_folder
from rl_training.safetensors_file import (
    Described,
    Header,
    read_header,
    read_tensors,
    safetensors_bytes,
)
from rl_training.stored_zip import ArchiveError
from rl_training.trust import remember_own, require_importable
from rl_training.untrusted_files import open_regular, read_regular

FORMAT = 1
WEIGHTS, CONFIG, SPACES, CARD = "model.safetensors", "config.yaml", "env.json", "README.md"
FILES = (WEIGHTS, CONFIG, SPACES, CARD)
MAX_WEIGHTS = 4 << 30
"""Bytes of the largest file of weights that is read."""
MAX_TEXT = 1 << 20
"""Bytes of the largest config or description that is read."""
_OF_ENVIRONMENT = ("env_id", "env_kwargs", "wrappers", "preprocessing")
"""Settings of the config that ``env.json`` repeats, for programs that read only that file."""


def is_shared(path: Path) -> bool:
    """Return whether a path is the file of weights of a shared folder."""
    return path.name == WEIGHTS


@dataclasses.dataclass(frozen=True)
class SharedPolicy:
    """A shared folder whose texts are read, and whose weights are not."""

    path: Path
    """The file of weights."""
    digest: str
    """SHA-256 over the texts, which contain that of the weights."""
    state: dict[str, Any]
    """Everything that a portable policy file holds, without the weights."""
    shapes: dict[str, Described]
    """Types and shapes of the weights."""
    _file: BinaryIO
    _header: Header
    _sha256: str

    def with_weights(self) -> dict[str, Any]:
        """Read the weights; return the state with them.

        Raises:
            CheckpointError: They are not those that the folder was written with.
        """
        with _errors_of(self.path):
            weights, found = read_tensors(self._file, self._header)
        if found != self._sha256:
            raise CheckpointError(
                f"{self.path} was altered or damaged: its SHA-256 is not the one in {SPACES}"
            )
        return {**self.state, "algorithm": {"model": weights}}


@contextlib.contextmanager
def open_shared(path: Path) -> Iterator[SharedPolicy]:
    """Open the folder of a file of weights; nothing that it names is imported.

    Raises:
        CheckpointError: It is incomplete, damaged or malicious.
    """
    folder = path.parent
    config_text, spaces_text = (_read_text(folder / name) for name in (CONFIG, SPACES))
    config = _parsed(folder / CONFIG, config_text)
    about = _parsed(folder / SPACES, spaces_text)
    for name, read in ((CONFIG, config), (SPACES, about)):
        if type(read.get("format")) is not int or read["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / name} has format {read.get('format')!r}; this rl_training reads format"
                f" {FORMAT}: use a newer one"
            )
    for name in _OF_ENVIRONMENT:
        if about.get(name) != _as_json(config.get(name)):
            raise CheckpointError(f"{folder}: {SPACES} and {CONFIG} contradict each other: {name}")
    missing = {"obs_spec", "action_spec", "custom_env", "model_sha256"} - set(about)
    if missing:
        raise CheckpointError(f"{folder / SPACES} lacks {', '.join(sorted(missing))}")
    with _errors_of(path), open_regular(path, MAX_WEIGHTS) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        state = {
            "config": {key: value for key, value in config.items() if key != "format"},
            **{key: about[key] for key in ("custom_env", "obs_spec")},
            "action_spec": _text_as_infinite(about["action_spec"]),
        }
        digest = _digest(config_text, spaces_text)
        yield SharedPolicy(path, digest, state, header.tensors, file, header, about["model_sha256"])


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        raise CheckpointError(f"{path} {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, MAX_TEXT).decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no shared policy: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """Return the mapping of a YAML or JSON text, with the limits of YAML files for both."""
    try:
        value = load_yaml(text, str(path)) if path.name == CONFIG else json.loads(text)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{path} does not hold a mapping")
    return value


def _as_json(value: Any) -> Any:
    """Return what JSON makes of a value; None for what it cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:  # a date, for example, which validation refuses
        return None


def _infinite_as_text(value: Any) -> Any:
    """Return plain values with infinite numbers as texts, since JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {key: _infinite_as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_infinite_as_text(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _text_as_infinite(value: Any) -> Any:
    """Undo `_infinite_as_text`; what is read is checked later."""
    if isinstance(value, dict):
        return {key: _text_as_infinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_text_as_infinite(item) for item in value]
    return float(value) if value in ("inf", "-inf") else value


def _digest(config: str, spaces: str) -> str:
    parts = (hashlib.sha256(text.encode()).hexdigest() for text in (config, spaces))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def require_free(folder: Path) -> None:
    """Raise UserError unless a folder can be written: it is missing or empty, and no link."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link: choose another folder")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not an empty folder: choose another one")
    except OSError as error:
        raise UserError(f"cannot use {folder}: {error.strerror}") from None


def write_shared(
    folder: Path,
    config: Mapping[str, Any],
    spaces: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    card: str,
) -> str:
    """Write a shared folder, which must be missing or empty; return the weights' SHA-256.

    It is written beside its place and then renamed, so that it is complete or absent.

    Args:
        folder: where it is written.
        config: settings, as of `TrainConfig.to_dict`.
        spaces: ``custom_env``, ``obs_spec`` and ``action_spec`` in plain values.
        weights: those of the networks.
        card: text of the README, in which ``{model_sha256}`` is replaced.
    """
    require_free(folder)
    require_importable(config)
    content = safetensors_bytes(weights)
    sha256 = hashlib.sha256(content).hexdigest()
    config_text = dump_yaml({"format": FORMAT, **config})
    about = {
        "format": FORMAT,
        **{name: config.get(name) for name in _OF_ENVIRONMENT},
        **spaces,
        "action_spec": _infinite_as_text(spaces["action_spec"]),
        "model_sha256": sha256,
    }
    spaces_text = json.dumps(about, indent=2) + "\n"
    files = {
        WEIGHTS: content,
        CONFIG: config_text.encode(),
        SPACES: spaces_text.encode(),
        CARD: card.replace("{model_sha256}", sha256).encode(),
    }
    with new_folder(folder) as hidden:
        for name, data in files.items():
            (hidden / name).write_bytes(data)
    remember_own(config, _digest(config_text, spaces_text))
    return sha256
