"""Write the generated parts of README.md and docs/: tables and the page of the Python API.

    make docs-tables                          # or: python scripts/generate_docs.py
    python scripts/generate_docs.py --check   # exit 1 if a file would change

A page contains markers, and this script replaces what is between them:

    <!-- begin knobs: ppo -->          the hyperparameters of an algorithm
    <!-- end -->

The other markers are ``config reference`` (every config dataclass), ``support`` (what each
algorithm supports), ``results: ppo`` (returns of its presets), ``benchmark: classic``, ``tasks``
(mean returns, a column per algorithm), ``commands`` and ``api``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import docs_api
import docs_tables

from rl_training.config import algo_config_type
from rl_training.registry import ALGORITHMS
from rl_training.tools.zoo.manifest import benchmark_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = "make docs-tables"
_BLOCK = re.compile(
    r"^<!-- begin (?P<request>[^\n]*?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(r"^<!--\s*(.*?)\s*-->$", re.MULTILINE)


def filled(text: str) -> str:
    """Return a page with its generated parts as they should be.

    Raises:
        ValueError: A marker is unknown, or has no end.
    """
    result = _BLOCK.sub(_block, text)
    left = _MARKER.findall(_BLOCK.sub("", result))
    if left:
        raise ValueError(f"'<!-- {left[0]} -->' is not a marker with an end")
    return result


def _block(match: re.Match[str]) -> str:
    request = match.group("request")
    return f"<!-- begin {request} -->\n\n{generated(request)}\n\n<!-- end -->"


def generated(request: str) -> str:
    """Return the text that a marker asks for."""
    kind, _, name = (part.strip() for part in request.partition(":"))
    if kind == "knobs" and name in ALGORITHMS:
        return docs_tables.table_of_fields(algo_config_type(name))
    if kind == "results" and name in ALGORITHMS:
        return docs_tables.table_of_results(name)
    if kind == "benchmark" and name in benchmark_names():
        return docs_tables.table_of_benchmark(name)
    makers = {
        "config reference": docs_tables.config_reference,
        "support": docs_tables.table_of_support,
        "commands": docs_tables.table_of_commands,
        "tasks": docs_tables.table_of_tasks,
        "api": docs_api.api_reference,
    }
    if request not in makers:
        raise ValueError(f"nothing is generated for '<!-- begin {request} -->'")
    return makers[request]()


def main(args: list[str]) -> int:
    """Write the pages, or with ``--check`` name those that would change."""
    changed = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            changed.append(path.relative_to(ROOT).as_posix())
            if "--check" not in args:
                path.write_text(new, encoding="utf-8")
    if "--check" in args and changed:
        sys.stderr.write(f"out of date: {', '.join(changed)}; run: {COMMAND}\n")
        return 1
    sys.stdout.write(f"written: {', '.join(changed) or 'nothing; all pages are up to date'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
