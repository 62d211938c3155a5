"""Videos of runs: which there are, and a page's section with the last one of each run."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rl_training.tools.report.data import StoredRun
from rl_training.tools.report.format import html
from rl_training.untrusted_files import read_regular

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}\.mp4")
_MAX_BYTES = 2 << 20
"""Largest video that is embedded in a page."""
_MAX_BYTES_OF_PAGE = 24 << 20


def video_names(folder: Path) -> list[str]:
    """Return the names of the videos under ``videos/`` in a run folder, in order.

    Links are left out, and names that need escaping.
    """
    videos = folder / "videos"
    found: list[str] = []
    with contextlib.suppress(OSError):
        if not videos.is_symlink():
            with os.scandir(videos) as entries:
                found = [
                    entry.name
                    for entry in entries
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                ]
    return sorted(found)


def videos_section(runs: Sequence[StoredRun]) -> str:
    """Return figures with the last video of each run, embedded; empty if there are no videos."""
    figures, left = [], _MAX_BYTES_OF_PAGE
    for run in runs:
        if not (names := video_names(run.path)):
            continue
        content = _content(run.path / "videos" / names[-1], min(left, _MAX_BYTES))
        left -= len(content)
        figures.append(_figure(run, names[-1], content))
    return f'<div class="videos">{"".join(figures)}</div>' if figures else ""


def _content(path: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(path, max_bytes)
    except OSError:
        return b""


def _figure(run: StoredRun, name: str, content: bytes) -> str:
    title = f"{html(run.path.name)}, <code>{html(name)}</code>"
    caption = f"<figcaption>{title}</figcaption>"
    if not content:
        return (
            f"<figure>{caption}<p>Too large for this page:"
            f" <code>{html(run.path / 'videos' / name)}</code></p></figure>"
        )
    source = base64.b64encode(content).decode()
    return (
        f'<figure>{caption}<video controls muted playsinline preload="metadata"'
        f' aria-label="{html(name)} of {html(run.path.name)}"'
        f' src="data:video/mp4;base64,{source}"></video></figure>'
    )
