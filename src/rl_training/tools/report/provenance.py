"""Where runs came from: machines, versions, commits and commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.tools.report.data import StoredRun
from rl_training.tools.report.format import NONE, html
from rl_training.tools.report.tables import Column, table

_HARDWARE = ("machine", "system", "cpu_count")


def provenance_table(runs: Sequence[StoredRun]) -> str:
    """Return a table of the machines and versions of runs; equal ones share a column."""
    together: dict[str, list[StoredRun]] = {}
    for run in runs:
        together.setdefault(json.dumps(_origin(run), sort_keys=True), []).append(run)
    origins = [_origin(members[0]) for members in together.values()]
    columns = [Column("What"), *(Column(_how_many(members)) for members in together.values())]
    rows = [
        [html(key), *(f"<code>{html(origin.get(key, NONE))}</code>" for origin in origins)]
        for key in dict.fromkeys(key for origin in origins for key in origin)
    ]
    if len(together) > 1:
        rows.append(["runs", *(_names(members) for members in together.values())])
    return table("Hardware and versions", columns, rows)


def _names(members: Sequence[StoredRun]) -> str:
    return "<br>".join(f"<code>{html(run.path.name)}</code>" for run in members)


def _how_many(members: Sequence[StoredRun]) -> str:
    return f"{len(members)} runs" if len(members) != 1 else "1 run"


def _origin(run: StoredRun) -> dict[str, str]:
    metadata = run.metadata
    origin = {"git commit": str(metadata.get("git_commit") or "none")}
    for key in ("device", "torch_threads", "resume"):
        if key in metadata:
            origin[key.replace("_", " ")] = str(metadata[key])
    hardware, versions = _mapping(metadata, "hardware"), _mapping(metadata, "versions")
    named = [key for key in _HARDWARE if key in hardware]
    for key in [*named, *sorted(hardware.keys() - set(_HARDWARE))]:
        origin[key.replace("_", " ")] = str(hardware[key])
    return origin | {str(key): str(value) for key, value in versions.items()}


def _mapping(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = metadata.get(key)
    return value if isinstance(value, dict) else {}


def commands(runs: Sequence[StoredRun]) -> str:
    """Return the exact command of every run and of its resumes."""
    blocks = [
        _command(f"{run.path}{title}", words)
        for run in runs
        for title, words in [
            ("", run.metadata.get("command")),
            *(
                (_resumed(run, entry), entry.get("command"))
                for entry in run.metadata.get("resumes") or []
                if isinstance(entry, dict)
            ),
        ]
    ]
    return "\n".join(blocks)


def _resumed(run: StoredRun, entry: Mapping[str, Any]) -> str:
    return f", resumed at {run.unit.removesuffix('s')} {entry.get('step', NONE)}"


def _command(title: str, words: Any) -> str:
    if not isinstance(words, list):
        return f'<p class="command-title">{html(title)}: no command recorded</p>'
    return (
        f'<div class="command"><p class="command-title">{html(title)}</p>'
        f'<pre tabindex="0" aria-label="Command of {html(title)}">'
        f"<code>{html(shlex.join(str(word) for word in words))}</code></pre>"
        f'<button type="button" class="copy" hidden aria-label="Copy the command of {html(title)}">'
        "Copy</button></div>"
    )
