"""The processes of a run: rank 0 leads, and all of them take every decision together.

Rank 0 has the run folder, the log, the callbacks and the display. The parts of a run in which it
decides what to do (a report, the ending) are *led*: the other ranks execute what it asks for until
it is done. `Ranks` is a run in one process, where all of this does nothing; `ProcessRanks` is a run
under torchrun.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from rl_training.communicator import Communicator
from rl_training.errors import Paused
from rl_training.runtime.process_group import ProcessGroup
from rl_training.runtime.signals import SIGNALS

Value = TypeVar("Value")

_SECONDS_BETWEEN_POLLS = 0.25
_MOST_CALLS = 500
"""Most calls of `Ranks.poll` between two exchanges: what was fast may become slow at any time."""
PLACES = ("collect", "learn", "evaluate")
"""Kinds of work in which the ranks poll, whose calls take times of their own."""
_DONE, _COMMAND, _PAUSED = range(3)
"""What rank 0 sends in a led part: its end, a command, or its end because work was paused."""
_RUNNING, _FINISHED, _FAILED = range(3)


class Decision(NamedTuple):
    """What all ranks decided together."""

    signal: str | None
    """Name of the signal that stops the run."""
    overdue: bool = False
    """Whether a checkpoint must be written now."""
    waiting: bool = False
    """Whether a rank still works on its own part."""
    failed: bool = False
    """Whether a rank's own part failed."""


class Ranks:
    """One process: it leads, and it decides alone."""

    several = False
    """Whether decisions have to be taken together with other processes."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @property
    def leads(self) -> bool:
        """Whether this process has the folder, the log, the callbacks and the display."""
        return self.communicator.rank == 0

    def lead(
        self,
        work: Callable[[], None],
        commands: Mapping[str, Callable[..., Any]],
        outcome: Callable[[], Value],
    ) -> Value:
        """Do a part of the run that rank 0 leads; return its ``outcome`` on every rank.

        Other ranks execute the ``commands`` that rank 0 sends. `Paused` is raised on all of them.
        """
        del commands
        work()
        return outcome()

    @contextlib.contextmanager
    def together(self, name: str, *args: Any) -> Iterator[None]:
        """Execute something on all ranks: within a part that is led, others get the command.

        Only within this context may rank 0 communicate in such a part.
        """
        del name, args
        yield

    @contextlib.contextmanager
    def only_here(self) -> Iterator[None]:
        """Refuse communication: the other ranks do not execute what this context contains."""
        yield

    def poll(self, signal: str | None, overdue: bool, place: str) -> Decision:
        """Decide whether to stop; every rank must call it at the same points of its work."""
        del place
        return Decision(signal, overdue)

    def wait(self, signal: str | None, overdue: bool, *, failed: bool) -> Decision:
        """Decide once, after this rank's own part of work in which the others may still `poll`.

        To be called again while others are `Decision.waiting`, that is, still work.
        """
        del overdue
        return Decision(signal, failed=failed)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise ``error``; on a rank without one, raise that another rank failed."""
        if error is not None:
            raise error

    def share(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        return value

    def everywhere(self, flag: bool) -> bool:
        """Return whether a flag is true on every rank."""
        return flag

    def longest(self, seconds: float) -> float:
        """Return the largest of the ranks' durations."""
        return seconds

    def fail(self, error: BaseException) -> None:
        """Send the other ranks the reason why this one fails, and close the connections."""


class ProcessRanks(Ranks):
    """Several processes, or one, under torchrun."""

    several = True

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._group = group
        self._only_here = False
        self._steps = [1.0] * len(PLACES)
        """For each place, the part of the time between two exchanges that a call takes."""
        self._elapsed = 0.0
        """The sum of these parts since the last exchange."""
        self._seconds = [0.0] * len(PLACES)
        self._calls = [0] * len(PLACES)
        self._polled_at = time.monotonic()

    # -- parts that rank 0 leads ---------------------------------------------------------------

    def lead(
        self,
        work: Callable[[], None],
        commands: Mapping[str, Callable[..., Any]],
        outcome: Callable[[], Value],
    ) -> Value:
        """Do a part of the run that rank 0 leads; return its ``outcome`` on every rank."""
        if not self.leads:
            return self._follow(commands)  # type: ignore[no-any-return]
        before, self._group.led = self._group.led, True
        try:
            work()
        except Paused:
            self._group.led = before
            self._group.broadcast(_PAUSED)
            raise
        finally:
            self._group.led = before
        found = outcome()
        self._group.broadcast(_DONE, int(found is not None))
        return found if found is None else self._group.share(found)

    def _follow(self, commands: Mapping[str, Callable[..., Any]]) -> Any:
        while True:
            code, more = self._group.broadcast(0, 0)
            if code == _DONE:
                return self._group.share(None) if more else None
            if code == _PAUSED:
                raise Paused
            name, args = self._group.share(None)
            try:
                commands[name](*args)
            except Paused:
                continue  # rank 0 is paused at the same place, and decides what follows

    @contextlib.contextmanager
    def together(self, name: str, *args: Any) -> Iterator[None]:
        """Execute something on all ranks: within a part that is led, others get the command."""
        if not self._group.led:
            yield
            return
        if self._only_here:
            raise RuntimeError(
                f"a callback cannot call this ({name}) in on_step, on_rollout, on_update or"
                " on_progress, where other ranks are at work: use on_iteration"
            )
        self._group.led = False
        try:
            self._group.broadcast(_COMMAND)
            self._group.share((name, args))
            yield
        finally:
            self._group.led = True

    @contextlib.contextmanager
    def only_here(self) -> Iterator[None]:
        """Refuse communication: the other ranks do not execute what this context contains."""
        before = self._group.led, self._only_here
        self._group.led = self._only_here = True
        try:
            yield
        finally:
            self._group.led, self._only_here = before

    # -- decisions -----------------------------------------------------------------------------

    def poll(self, signal: str | None, overdue: bool, place: str) -> Decision:
        """Decide whether to stop; every rank must call it at the same points of its work.

        The ranks communicate only every so many calls, as many as take a quarter of a second. How
        long a call takes is measured for each kind of work and agreed upon, so that all ranks
        communicate at the same call.
        """
        now, index = time.monotonic(), PLACES.index(place)
        self._seconds[index] += now - self._polled_at
        self._calls[index] += 1
        self._polled_at = now
        self._elapsed += self._steps[index]
        if self._elapsed < 1.0:
            return Decision(None)
        return self._exchange(signal, overdue, _RUNNING)

    def wait(self, signal: str | None, overdue: bool, *, failed: bool) -> Decision:
        """Decide once, after this rank's own part of work in which the others may still `poll`."""
        return self._exchange(signal, overdue, _FAILED if failed else _FINISHED)

    def _exchange(self, signal: str | None, overdue: bool, state: int) -> Decision:
        number = SIGNALS.index(signal) + 1 if signal in SIGNALS else 0
        each = [
            round(1e6 * seconds / calls) if calls else 0
            for seconds, calls in zip(self._seconds, self._calls, strict=True)
        ]
        table = self._group.gather_ranks(torch.tensor([number, int(overdue), state, *each]))
        numbers, overdues, states, *durations = table.unbind(1)
        for index, longest in enumerate(float(duration.max()) / 1e6 for duration in durations):
            if longest > 0:
                wanted = longest / _SECONDS_BETWEEN_POLLS
                shortest = max(self._steps[index] / 4, 1 / _MOST_CALLS)
                self._steps[index] = min(max(wanted, shortest), 1.0)
        self._elapsed, self._polled_at = 0.0, time.monotonic()
        self._seconds, self._calls = [0.0] * len(PLACES), [0] * len(PLACES)
        received = [int(one) for one in numbers if one]
        return Decision(
            SIGNALS[received[0] - 1] if received else None,
            bool(overdues.any()),
            bool((states == _RUNNING).any()),
            bool((states == _FAILED).any()),
        )

    def raise_together(self, error: BaseException | None) -> None:
        """Raise ``error``; on a rank without one, raise that another rank failed."""
        found = self._group.gather_ranks(torch.tensor([int(error is not None)]))
        if error is not None:
            self._group.report_failure(error, everywhere=bool(found.all()))
            raise error
        if found.any():
            raise self._group.failure_elsewhere()

    def share(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        return self._group.share(value)  # type: ignore[no-any-return]

    def everywhere(self, flag: bool) -> bool:
        """Return whether a flag is true on every rank."""
        return bool(self._group.gather_ranks(torch.tensor([int(flag)])).all())

    def longest(self, seconds: float) -> float:
        """Return the largest of the ranks' durations."""
        return float(self._group.gather_ranks(torch.tensor([seconds], dtype=torch.float64)).max())

    def fail(self, error: BaseException) -> None:
        """Send the other ranks the reason why this one fails, and close the connections."""
        self._group.report_failure(error)
        self._group.leave()
