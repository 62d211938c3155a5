"""Runs of the single-file scripts in examples/, for the tests of each."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_script(path: Path) -> Any:
    """A script as a module, imported once."""
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


def printed_twice(path: Path, flags: Sequence[str], folder: Path) -> list[str]:
    """What a script prints when it is run alone, after a check that a second run prints the same.

    The second run is in this process: starting another one takes longer than the run.
    """
    done = subprocess.run(
        [sys.executable, "-I", str(path), *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with contextlib.redirect_stdout(io.StringIO()) as again:
        load_script(path).main(flags)
    assert _without_speed(done.stdout) == _without_speed(again.getvalue())
    assert not list(folder.iterdir())
    return done.stdout.splitlines()


def _without_speed(text: str) -> list[list[str]]:
    return [line.split()[:-2] if "steps/s" in line else line.split() for line in text.split("\n")]
