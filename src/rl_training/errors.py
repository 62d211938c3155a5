"""Errors a user can act on. A ``UserError`` is a mistake in the request, not a failure of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend; the command line prints it in one line and exits with 2."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, hostile, or does not fit the request."""


class WorkerError(RuntimeError):
    """An environment worker raised, hung or died; the message holds its traceback."""


class EnvironmentFailure(RuntimeError):  # noqa: N818 - 'EnvironmentError' is taken
    """An environment broke its own rules."""


class StorageError(RuntimeError):
    """A file of a run could not be written: the disk is full, read-only or forbidden."""


class Paused(Exception):  # noqa: N818 - it reports no error
    """Work was left before its end because a stop was requested; it starts again when resumed."""


class NonFiniteError(RuntimeError):
    """A NaN or infinity turned up; the message names the tensor, the step and the environment."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for a near miss, else the list of what is known."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(options)}." if options else ""
