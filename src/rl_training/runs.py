"""Run folders: where they are, what describes them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import UserError
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

FORMAT = 1
_PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "box2d", "ale-py")


def make_run_dir(config: TrainConfig[Any]) -> Path:
    """Create ``ALGO__ENV__seedN__UTC-STAMP`` under ``config.output_dir``; never one that exists."""
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", config.env_id).strip("-.") or "env"
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    base = f"{config.algo}__{env[:80]}__seed{config.seed}__{stamp}"
    for attempt in range(1000):
        path = config.output_dir / (base if attempt == 0 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                continue
            raise UserError(f"cannot make a run folder: {path} is in the way") from None
        except OSError as error:
            raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
        return path
    raise UserError(f"cannot find a free name for a run folder like {base}")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping; empty where there is no readable one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    found = {"rl_training": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def describe_run(config: TrainConfig[Any], **extra: Any) -> dict[str, Any]:
    """The metadata a run folder starts with."""
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
    """Add a line to the run's lineage."""
    path = run_dir / "metadata.json"
    content = read_json(path)
    entry = {"at": _now(), "command": sys.argv, "versions": versions(), **details}
    content.setdefault("resumes", []).append(entry)
    write_json(path, content)


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
