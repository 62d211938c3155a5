"""Ends the processes of a cluster whose driver was killed. Run as a script, beside the driver.

Ray's own processes end with the driver, but for the agents of its raylet: they try to report the
death to a server that is gone, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

_GRACE_SECONDS = 2.0


def descendants(root: int) -> dict[int, str]:
    """Return the processes below one, with when they started; empty where ``ps`` is missing."""
    children: dict[int, list[int]] = {}
    started = {}
    for pid, parent, when in _processes():
        children.setdefault(parent, []).append(pid)
        started[pid] = when
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found[pid] = started[pid]
            waiting.append(pid)
    return found


def _processes() -> list[tuple[int, int, str]]:
    command = ["ps", "-A", "-o", "pid=,ppid=,lstart="]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed words
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = (line.split(None, 2) for line in done.stdout.splitlines())
    return [(int(pid), int(parent), when.strip()) for pid, parent, when in rows]


class ClusterGuard:
    """Watches over the processes that began below this one since it was made."""

    def __init__(self) -> None:
        self._before = descendants(os.getpid())
        self._process: subprocess.Popen[str] | None = None

    def watch(self) -> None:
        """From now on end those processes if this one is killed."""
        now = descendants(os.getpid())
        new = {pid: when for pid, when in now.items() if pid not in self._before}
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, __file__, json.dumps(new)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C in a terminal is not for it
        )

    def close(self) -> None:
        """End what is left of them."""
        if self._process is not None:
            self._process.communicate()


def main() -> None:
    """Wait for the end of standard input, which is that of the driver."""
    expected = {int(pid): when for pid, when in json.loads(sys.argv[1]).items()}
    sys.stdin.read()
    end = time.monotonic() + _GRACE_SECONDS
    while left := _alive(expected):
        if time.monotonic() > end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def _alive(expected: dict[int, str]) -> list[int]:
    return [pid for pid, _, when in _processes() if expected.get(pid) == when]


if __name__ == "__main__":
    main()
