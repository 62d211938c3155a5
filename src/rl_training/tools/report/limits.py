"""Checks of the files of a run: a report accepts only plain values of bounded size.

Run folders may come from other people or from crashes. Every value that a report uses is checked
here first, so that a bad value makes one folder damaged and never the whole report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.untrusted_files import read_regular

MAX_BYTES = 8 << 20
"""Largest metadata.json or summary.json."""
MAX_STEP = 10**15
"""Most environment steps of a run."""
MAX_NUMBER = 1e100
"""Largest magnitude of a number."""
MAX_NAME = 200
"""Longest name of an algorithm, environment, setting, status or metric."""
_MAX_VALUES = 20_000
_MAX_DEPTH = 32
_MAX_TEXT = 100_000


class DamagedError(Exception):
    """A run folder whose files cannot be used; the message is the reason."""


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds a mapping of plain values within the limits."""
    try:
        content = json.loads(read_regular(path, MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise DamagedError(f"{path.name} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from None
    return plain_mapping(content, path.name)


def plain_mapping(value: Any, file: str) -> dict[str, Any]:
    """Return a copy of a mapping with string keys and plain values; ``file`` is for errors."""
    if not isinstance(value, dict):
        raise DamagedError(f"{file} does not contain a mapping")
    copy: dict[str, Any] = _Copier(file).copy(value, 0)
    return copy


class _Copier:
    """Copies plain values, counting them."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._values = 0

    def copy(self, value: Any, depth: int) -> Any:
        self._values += 1
        if self._values > _MAX_VALUES:
            raise DamagedError(f"{self._file} holds more than {_MAX_VALUES:,} values")
        if depth > _MAX_DEPTH:
            raise DamagedError(f"{self._file} is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            return {self._key(key): self.copy(part, depth + 1) for key, part in value.items()}
        if isinstance(value, list):
            return [self.copy(part, depth + 1) for part in value]
        return self._scalar(value)

    def _key(self, key: Any) -> str:
        text = str(self._scalar(key))
        if len(text) > MAX_NAME:
            raise DamagedError(f"{self._file} has a key of {len(text):,} characters")
        return text

    def _scalar(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise DamagedError(f"{self._file} holds a text of {len(value):,} characters")
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise DamagedError(f"{self._file} holds a number beyond {MAX_NUMBER:g}")
        if value is not None and not isinstance(value, (str, int, float)):
            raise DamagedError(f"{self._file} holds a {type(value).__name__}: not a plain value")
        return value


def require_names(file: str, content: Mapping[str, Any], *keys: str) -> None:
    """Raise DamagedError unless each key has a short text that is not blank."""
    for key in keys:
        value = content.get(key)
        if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME:
            raise DamagedError(f"{file} has no usable {key!r}")


def require_counts(file: str, content: Mapping[str, Any], **limits: int) -> None:
    """Raise DamagedError unless each key has an integer from zero to its limit."""
    for key, limit in limits.items():
        value = content.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise DamagedError(f"{file} has no usable {key!r}")


def require_types(file: str, content: Mapping[str, Any], **kinds: type) -> None:
    """Raise DamagedError if a key is present with a value of another type, other than null."""
    for key, kind in kinds.items():
        if not isinstance(content.get(key), (kind, type(None))):
            raise DamagedError(f"{file} has no usable {key!r}")
