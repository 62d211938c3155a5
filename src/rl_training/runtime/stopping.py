"""Whether a run must stop or save: signals, and decisions that all ranks take together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rl_training.errors import RankFailure
from rl_training.runtime.ranks import Decision, Ranks
from rl_training.runtime.signals import StopSignals

_SECONDS_OF_REPEATED_SIGNALS = 5.0
"""torchrun passes a signal on to ranks that the terminal has already sent it to."""


class WorkFailedElsewhere(RankFailure):
    """Another rank's part of some work failed; that rank and this one can still communicate."""


class Stopping:
    """The signals that stop a run; with several ranks, those that all of them know of."""

    def __init__(self, ranks: Ranks) -> None:
        within = _SECONDS_OF_REPEATED_SIGNALS if ranks.several else 0.0
        self.signals = StopSignals(repeated_within=within, quiet=not ranks.leads)
        """The signals that this process received."""
        self.place = "collect"
        """The kind of work that is done, one of `PLACES`."""
        self._ranks = ranks
        self._agreed: str | None = None

    @property
    def signal(self) -> str | None:
        """The name of the signal that stops the run; of several ranks, once all know of it."""
        return self._agreed if self._ranks.several else self.signals.received

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Record signals within this context."""
        return self.signals.watched()

    def poll(self, *, overdue: bool) -> bool:
        """Return whether a checkpoint must be written now, because it is ``overdue`` on rank 0.

        Every rank calls this at the same points of its work; `signal` may have changed. Raises
        `WorkFailedElsewhere` if work of another rank failed.
        """
        if not self._ranks.several:
            return overdue
        decision = self._remembered(self._ranks.poll(self.signals.received, overdue, self.place))
        if decision.failed:
            raise WorkFailedElsewhere("the work of another rank failed")
        return decision.overdue

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Do work of another kind within this context."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def wait(self, *, overdue: bool, failed: bool) -> Decision:
        """Decide together, after this rank's own part of some work; see `Ranks.wait`."""
        return self._remembered(self._ranks.wait(self.signals.received, overdue, failed=failed))

    def _remembered(self, decision: Decision) -> Decision:
        if self._agreed is None:
            self._agreed = decision.signal
        return decision
