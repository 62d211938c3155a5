"""Signals that stop a run: recorded when they arrive, handled between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def stop_message(name: str) -> str:
    """Return the line that is printed when the signal ``name`` arrives."""
    return f"{name}: saving a checkpoint, then stopping (again: stop at once)"


class StopSignals:
    """Records the first SIGINT, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that arrived, if any."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record signals within this context; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
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
        if self.received is not None:
            raise KeyboardInterrupt(f"{name} after {self.received}")
        self.received = name
        with contextlib.suppress(OSError):  # standard error may be closed
            os.write(2, f"\n{stop_message(name)}\n".encode())  # a buffered write may be interrupted
