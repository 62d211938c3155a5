"""Signals that stop a run: recorded when they arrive, handled between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
"""Names of the signals that stop a run."""


def stop_message(name: str) -> str:
    """Return the line that is printed when the signal ``name`` arrives."""
    return f"{name}: saving a checkpoint, then stopping (again: stop at once)"


class StopSignals:
    """Records the first SIGINT, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt.

    torchrun passes on a signal that the terminal may have sent to this process already: with
    ``repeated_within``, signals within so many seconds of the first one count as the same. With
    ``quiet`` nothing is printed.
    """

    def __init__(self, *, repeated_within: float = 0.0, quiet: bool = False) -> None:
        self.received: str | None = None
        """Name of the signal that arrived, if any."""
        self._repeated_within = repeated_within
        self._quiet = quiet
        self._received_at = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record signals within this context; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        # Ignored signals stay ignored, such as SIGHUP under nohup.
        previous = {n: h for n in numbers if (h := signal.getsignal(n)) is not signal.SIG_IGN}
        for number in previous:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        now = time.monotonic()
        if self.received is not None:
            if now - self._received_at < self._repeated_within:
                return
            raise KeyboardInterrupt(f"{name} after {self.received}")
        self.received, self._received_at = name, now
        if self._quiet:
            return
        with contextlib.suppress(OSError):  # standard error may be closed
            os.write(2, f"\n{stop_message(name)}\n".encode())  # a buffered write may be interrupted
