"""Progress of runs on the terminal: lines updated in place, or printed at intervals."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rl_training.terminal import printable, say
from rl_training.tools.zoo.jobs import Job

_LINE_SECONDS = 10.0
"""Seconds between progress lines if the output is not a terminal."""


class LiveLines:
    """Lines about what is running, updated in place on a terminal, else printed at intervals."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._next_line = 0.0
        self._live: Any = None
        if shown and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()

    def update(self, lines: Sequence[str]) -> None:
        """Show these lines in place of the last ones."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(printable("\n".join(lines))), refresh=True)
        elif self._shown and lines and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            say("\n".join(f"  {line}" for line in lines))

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._live is not None:
            self._live.console.print(printable(line), highlight=False, markup=False)
        elif self._shown:
            say(line)

    def close(self) -> None:
        """Remove the lines that are updated in place."""
        if self._live is not None:
            self._live.stop()


def running_line(job: Job, step: int, latest: float | None) -> str:
    """Return the line of a running job."""
    share = min(1.0, step / job.steps)
    return f"{job.name}: {step:,} of {job.steps:,} steps ({share:.0%}), return {number(latest)}"


def number(value: float | None) -> str:
    """Return a return for display."""
    return "-" if value is None else f"{value:,.1f}"
