"""Workers in this process, which exchange bytes with the driver as those of Ray do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_training.runtime.remote_worker import Described, Request, ShardWorker
from rl_training.runtime.supervision import Weights


def copied(value: Any) -> Any:
    """A value as another process would receive it."""
    return pickle.loads(pickle.dumps(value))


class DirectWorker:
    """A worker in this process. ``broken`` decides before every answer whether it is lost."""

    def __init__(self, worker: ShardWorker, broken: Callable[[], bool]) -> None:
        self.worker = worker
        self.broken = broken
        self.weights: int | None = None
        self.answers: Iterator[Any] = iter(())

    def describe(self) -> Described:
        return copied(self.worker.describe())  # type: ignore[no-any-return]

    def load_weights(self, weights: Weights) -> None:
        if self.weights != weights.number:
            self.worker.load_weights(weights.version, copied(weights.put))
            self.weights = weights.number

    def load_state(self, name: int, state: Mapping[str, Any]) -> bool:
        return self.worker.load_state(name, copied(dict(state)))

    def start(self, request: Request) -> None:
        self.answers = self.worker.take(copied(request))

    def poll(self) -> Any:
        answer = next(self.answers)
        return RuntimeError("lost") if self.broken() else copied(answer)

    def kill(self) -> None:
        self.worker.close()


class DirectWorkers:
    """Starts workers in this process."""

    broken: Callable[[], bool] = staticmethod(lambda: False)
    started = 0

    def __init__(self, config: Any, env_fn: Any, threads: int | None) -> None:
        self.arguments = (config, env_fn, threads)

    def start(self, shard: int) -> DirectWorker:
        config, env_fn, threads = self.arguments
        type(self).started += 1
        return DirectWorker(ShardWorker(copied(config), env_fn, shard, threads), self.broken)

    def put(self, weights: Mapping[str, Any]) -> Any:
        return copied(dict(weights))

    def wait(self, handles: Sequence[Any], seconds: float) -> None:
        del handles, seconds

    def close(self) -> None:
        pass
