"""Signals that end a run: noted when they come, obeyed between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """The first SIGINT, SIGTERM or SIGHUP is noted; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that came, if any."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note signals within this context; in another thread than the main one do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
        # What is ignored stays ignored: nohup does that with SIGHUP.
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
        text = f"\n{name}: saving a checkpoint, then stopping (again: stop at once)\n"
        with contextlib.suppress(OSError):  # nobody may be reading
            os.write(2, text.encode())  # a buffered write may be under way
