"""What a file may make this process import: nothing, without the user's consent.

A run's config may name modules: in ``env_id`` ("module:Id-v0"), in ``wrappers``, and in settings of
the algorithm, ``encoder`` and ``network`` ("module:Class"). In a config file or on a command line
the user wrote them. In a checkpoint anybody may have: only modules of Gymnasium and of this package
are imported, unless the user allows more, or the checkpoint was written by this user on this
machine (its digest is then in a list that is kept outside run folders). An algorithm of an
installed package is imported by its name in the table of algorithms: whoever installed the package
registered it there.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rl_training.errors import CheckpointError, ConfigError
from rl_training.terminal import one_line

Trust: TypeAlias = bool | Sequence[str]
"""True: import whatever a file names; a list: modules at or below these."""


def trust_from_flag(named: Sequence[str] | None) -> Trust:
    """What ``--trust-modules`` allows: nothing where it is not given, any module without a name."""
    return False if named is None else tuple(named) or True


_OURS = ("gymnasium", "rl_training")
_NAMES_CODE = re.compile(r"[\w.]+:[\w.]+")
"""A setting of this form names code, whatever the setting is called."""
_CLASS_SETTINGS = ("encoder", "network")
"""Settings of algorithms that name code, whatever the form of their value."""
_WRITES_FILES = ("RecordVideo",)
"""Gymnasium's wrappers that write where their arguments say."""


class Named(NamedTuple):
    """Something a config names that would be imported."""

    setting: str
    path: str

    @property
    def module(self) -> str:
        """The module that would be imported."""
        return self.path.partition(":")[0]


def foreign_names(settings: Any) -> list[Named]:
    """What a config names outside Gymnasium and this package; anything unreadable is skipped.

    What is skipped here is refused when the config is validated, before anything is imported.
    """
    if not isinstance(settings, Mapping):
        return []
    named: list[Named] = []
    env_id = settings.get("env_id")
    if isinstance(env_id, str) and ":" in env_id:
        named.append(Named("env_id", env_id.rpartition(":")[0]))
    wrappers = settings.get("wrappers")
    for wrapper in wrappers if isinstance(wrappers, (list, tuple)) else ():
        path = wrapper.get("path") if isinstance(wrapper, Mapping) else wrapper
        if isinstance(path, str):
            named.append(Named("wrappers", path))
    knobs = settings.get("algo_kwargs")
    for setting, value in knobs.items() if isinstance(knobs, Mapping) else ():
        if isinstance(value, str) and (setting in _CLASS_SETTINGS or _NAMES_CODE.fullmatch(value)):
            named.append(Named(f"algo_kwargs.{setting}", value))
    return [one for one in named if not _is_harmless(one)]


def _is_harmless(named: Named) -> bool:
    return _within(named.module, _OURS) and named.path.partition(":")[2] not in _WRITES_FILES


def _within(module: str, prefixes: Sequence[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def require_trust(settings: Any, trust: Trust, where: object, digest: str | None = None) -> None:
    """Raise unless all that the settings of the file ``where`` name may be imported."""
    if trust is True:
        return
    allowed = _checked(trust)
    refused = [one for one in foreign_names(settings) if not _within(one.module, allowed)]
    if not refused or (digest is not None and is_own(digest)):
        return
    listed = one_line(", ".join(f"{one.path} ({one.setting})" for one in refused))
    prefixes = one_line(" ".join(sorted({one.module.partition(".")[0] for one in refused})))
    raise CheckpointError(
        f"{where} names code that would be imported and run: {listed}. Nothing of it was imported,"
        " because this file was not written here by you, or was changed since. If you trust it,"
        f" allow it with --trust-modules {prefixes} (in Python trust={prefixes.split()!r}, or"
        " trust=True for all)"
    )


def require_importable(settings: Any) -> None:
    """Raise where a config names a class that only the running program has.

    Called before a config is written: another program could not load the file.
    """
    for setting, path in foreign_names(settings):
        module, _, name = path.partition(":")
        if module == "__main__" and name:
            raise ConfigError(
                f"'{setting}' is the class {name} of the running script or notebook (__main__). A"
                " saved run names the class, and other programs that load the run cannot import it"
                " from there: move the class to a module of its own, for example my_networks.py"
                " beside the script, and import it from that module (or keep the run in memory:"
                " learn(..., run_dir=None))"
            )


def _checked(trust: Trust) -> Sequence[str]:
    if isinstance(trust, bool):
        return ()
    if isinstance(trust, str) or not all(isinstance(one, str) and one for one in trust):
        raise ConfigError(f"'trust' must be true, false or a list of module names; got {trust!r}")
    return trust


def own_checkpoints_file() -> Path:
    """Where the digests of checkpoints written by this user are kept."""
    base = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return folder / "rl_training" / "own_checkpoints.txt"


def remember_own(settings: Any, digest: str) -> None:
    """Record a checkpoint that is being written, where its config names foreign modules.

    Raises where the config names a class that no other program could import.
    """
    if not foreign_names(settings):
        return
    require_importable(settings)
    try:
        path = own_checkpoints_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{digest}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # the latter: no home directory
        warnings.warn(
            f"cannot note this run as your own ({error}): loading its checkpoints will need"
            " --trust-modules",
            stacklevel=2,
        )


def is_own(digest: str) -> bool:
    """Whether a checkpoint was written by this user on this machine."""
    wanted = f"{digest}\n".encode()
    with contextlib.suppress(OSError, RuntimeError), own_checkpoints_file().open("rb") as lines:
        return any(line == wanted for line in lines)
    return False
