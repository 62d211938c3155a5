"""Create source trees of commits, and environment variables to import one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKING_TREE = "."
"""Name of the working tree, with uncommitted changes."""
_PARTS = ("src", "configs", "zoo", "tests")
"""Folders of a tree; `src` contains symbolic links to `configs` and `zoo`."""


def make_tree(commit: str, folder: Path) -> Path:
    """Write a commit, or the working tree, to a new ``folder`` and return that."""
    folder.mkdir(parents=True)
    if commit == WORKING_TREE:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for part in _PARTS:
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignore)
        return folder
    archive = folder / "tree.tar"
    _git("archive", f"--output={archive}", resolve_commit(commit), *_PARTS)
    shutil.unpack_archive(archive, folder, filter="data")
    archive.unlink()
    return folder


def resolve_commit(commit: str) -> str:
    """Return the full hash of a commit; exit if it does not exist."""
    return _git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def tree_environment(tree: Path, state_folder: Path, **variables: str) -> dict[str, str]:
    """Return environment variables of a process that imports ``rl_training`` from ``tree``.

    The package writes its per-user files to ``state_folder``.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree / "tests")]),
        "XDG_STATE_HOME": str(state_folder),
        **variables,
    }


def require_imported_from(tree: Path) -> None:
    """Exit unless this process imports ``rl_training`` from ``tree``, not from an installation."""
    import rl_training

    found = Path(rl_training.__file__).resolve()
    if not found.is_relative_to(tree.resolve()):
        sys.exit(f"rl_training was imported from {found}, not from {tree}")
