"""Workers in other processes: requests to them, and new ones in place of those that fail."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rl_training.config import TrainConfig
from rl_training.errors import LostWorkerError, WorkerError
from rl_training.runtime.remote_worker import (
    INITIAL_STATE,
    Described,
    Request,
    StateRequired,
    StillWorking,
    Taken,
)
from rl_training.terminal import say


class Weights(NamedTuple):
    """Weights of the policy, as they were published."""

    number: int
    """Different for all weights of a process."""
    version: int
    """The version that they were published as."""
    values: dict[str, Any]
    put: Any
    """What `Workers.put` returned for them."""


class WorkerHandle(Protocol):
    """A worker in another process. Everything but `poll` may raise what it raised."""

    def describe(self) -> Described:
        """Wait for the worker to start, and return what it reports."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Send weights, unless the worker has them."""
        ...

    def load_state(self, name: int, state: Mapping[str, Any]) -> bool:
        """Send a state, and wait until it is restored; return whether that was bit for bit."""
        ...

    def start(self, request: Request) -> None:
        """Send a request."""
        ...

    def poll(self) -> StateRequired | StillWorking | Taken | Exception | None:
        """Return the answer to the request, what went wrong, or None: it is not there yet."""
        ...

    def kill(self) -> None:
        """End the process, whatever it does."""
        ...


class Workers(Protocol):
    """What starts workers, and moves weights to them."""

    def start(self, shard: int) -> WorkerHandle:
        """Start the worker of a shard, without waiting for it."""
        ...

    def put(self, weights: Mapping[str, Any]) -> Any:
        """Make weights available to all workers; return what a worker is sent for them."""
        ...

    def wait(self, handles: Sequence[WorkerHandle], seconds: float) -> None:
        """Wait until one of the workers may have an answer, at most so long."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class SupervisedWorker:
    """The worker of a shard, the request that it was sent, and the state before that request.

    A worker that fails is replaced, and the new one gets the same request: it takes the same steps.
    """

    def __init__(self, index: int, workers: Workers, config: TrainConfig[Any]) -> None:
        self.index = index
        self.handle = workers.start(index)
        self.state: Mapping[str, Any] = {}
        """What the next request continues from; unused before the first one."""
        self.state_name = INITIAL_STATE
        self.request: Request | None = None
        """The request under way; None: there is none."""
        self.weights: Weights | None = None
        """Those of the last request."""
        self._workers = workers
        self._config = config
        self._failures = 0
        """Failures since the last answer."""
        self._deadline = 0.0
        self._last_name = INITIAL_STATE

    def next_name(self) -> int:
        """Return a name for a state that no other state has."""
        self._last_name += 1
        return self._last_name

    def send(self, request: Request, weights: Weights) -> None:
        """Send a request that continues from `state`."""
        self.request, self.weights = request, weights
        self.handle.load_weights(weights)
        self.handle.start(request)
        self.extend_deadline()

    def extend_deadline(self) -> None:
        """Expect a sign of life ``worker_timeout`` from now."""
        self._deadline = time.monotonic() + self._config.worker_timeout

    def receive(self) -> Taken | None:
        """Return the answer to the request, if it is there; replace a worker that failed."""
        answer = self.handle.poll()
        if isinstance(answer, Taken):
            self._failures = 0
            return answer
        if isinstance(answer, StateRequired):
            if self.state_name == INITIAL_STATE:
                self._renew()
            else:
                self._restore()
            self._repeat()
        elif isinstance(answer, Exception):
            self._replace(answer)
        elif isinstance(answer, StillWorking):
            self.extend_deadline()
        elif time.monotonic() > self._deadline:
            seconds = self._config.worker_timeout
            self._replace(WorkerError(f"no sign of life for {seconds:g} s (worker_timeout)"))
        return None

    def continue_from(self, name: int, state: Mapping[str, Any]) -> None:
        """Let the next request continue from a state, which the worker is in or will be sent."""
        self.state_name, self.state, self.request = name, state, None

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Send a state; return whether it was restored bit for bit."""
        self.continue_from(self.next_name(), state)
        return self.handle.load_state(self.state_name, state)

    def _repeat(self) -> None:
        assert self.request is not None  # noqa: S101 - narrows the type
        assert self.weights is not None  # noqa: S101 - narrows the type
        self.send(self.request, self.weights)

    def _replace(self, error: Exception) -> None:
        """Let a new worker do what one that failed was asked to do."""
        while True:
            self._failures += 1
            most = self._config.max_worker_failures
            if self._failures >= most:
                raise LostWorkerError(
                    f"the worker of shard {self.index} failed {self._failures} times in a row"
                    f" (max_worker_failures): {error}"
                ) from error
            first, _, _ = str(error).strip().partition("\n")
            say(
                f"the worker of shard {self.index} failed ({first}); a new one collects the same"
                f" steps again (failure {self._failures} of {most})"
            )
            try:
                self._renew()
            except Exception as failure:  # noqa: BLE001 - of a process that may run anything
                error = failure
                continue
            self._repeat()
            return

    def _renew(self) -> None:
        """Start a new worker in place of the one of a shard, in the same state."""
        self.handle.kill()
        self.handle = self._workers.start(self.index)
        self.handle.describe()
        if self.state_name != INITIAL_STATE:
            self._restore()

    def _restore(self) -> None:
        assert self.weights is not None  # noqa: S101 - narrows the type
        self.handle.load_weights(self.weights)  # first: noise is prepared with them
        if not self.handle.load_state(self.state_name, self.state):
            say(
                f"the environments of shard {self.index} could not be restored exactly: the steps"
                " differ from those that were lost"
            )
