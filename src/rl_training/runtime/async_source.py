"""Experience of workers that collect all the time, taken in the order in which it arrives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rl_training.algorithms.moments import Moments
from rl_training.communicator import Communicator, shards_of
from rl_training.config import TrainConfig
from rl_training.runtime.experience import Collected, Timed
from rl_training.runtime.remote_source import SECONDS_BETWEEN_STOPS, WorkerSource
from rl_training.runtime.remote_worker import Request, Taken
from rl_training.runtime.supervision import SupervisedWorker, Weights, Workers
from rl_training.types import Progress, StopRequest, never

REPLAY_BLOCK = 16
"""Steps of each environment that a worker of a replay learner takes with the same weights."""
_MOST = 2
_SECONDS_TO_END = 10.0


def block_steps(config: TrainConfig[Any]) -> int:
    """Return the steps of each environment in a request: a rollout, or a part of a replay."""
    return int(getattr(config.algo_kwargs, "num_steps", REPLAY_BLOCK))


class _Arrived(NamedTuple):
    """The answer to a request."""

    shard: int
    taken: Taken
    version: int
    """The version of the weights that acted."""


class AsyncSource(WorkerSource):
    """Takes blocks of steps from a queue that the workers fill.

    A thread hands the newest weights to every worker that is ready and sends it the next request.
    At most `_MOST` blocks per worker are under way or in the queue: while there are so many,
    workers that are ready wait, so that a block of a rollout is at most that many versions behind.
    A block of a rollout learner fills the next free buffer, so that a fast worker may fill two and
    a slow one none; a block of a replay learner is added to the replay of its shard.

    Blocks that are in the queue or under way are not part of a checkpoint: a resume continues from
    the environments' states after the last block that was taken from the queue.
    """

    def __init__(
        self, workers: Workers, config: TrainConfig[Any], communicator: Communicator
    ) -> None:
        self._block = block_steps(config)
        self._fills_rollouts = hasattr(config.algo_kwargs, "num_steps")
        self._arrived: deque[_Arrived] = deque()
        self._taken: list[_Arrived] = []
        """Taken from the queue and not yet added to buffers, because a stop was requested."""
        self._seen: set[int] = set()
        """Shards whose replay has content."""
        self._progress = Progress(0, 0)
        self._newest: Weights | None = None
        self._moments = Moments(0.0, 0.0, 0.0)
        """Of all rewards that were taken, where they are normalised."""
        self._changed = threading.Condition()
        """Guards what both threads use: the queue, and what follows."""
        self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._collect: Callable[[StopRequest], bool] = self._wait
        super().__init__(workers, config, communicator)

    # -- the thread of the run -----------------------------------------------------------------

    def collect(
        self, buffer: Any, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add a block per worker, or more; on ``stop`` none. ``num_steps`` only requests some."""
        if not num_steps:  # a rollout that is complete, of a learning phase that was stopped
            return Collected(0, 0, (), self._version)
        self._progress = progress
        self._start()
        if not self._collect(stop):
            return Collected(0, 0, (), self._version)
        blocks, self._taken = self._taken, []
        buffers, episodes, counts = shards_of(buffer), [], [0] * len(self.shards)
        for position, (index, taken, _) in enumerate(blocks):
            shard, own = self.shards[index], buffers[position if self._fills_rollouts else index]
            own.first_env = shard.first_env
            taken.block.add_to(own)
            shard.advance(taken)
            counts[index] += self._block
            episodes += [one._replace(env=shard.first_env + one.env) for one in taken.episodes]
            if self._config.normalize_reward:
                rollout = Moments(*taken.state["reward_normalizer"]["rollout"])
                self._moments = self._moments.merged(rollout)
        versions = [one.version for one in blocks]
        self._lag = self._version - sum(versions) / len(versions)
        steps = sum(one.taken.steps for one in blocks)
        vector_steps = len(blocks) // len(self.shards) * self._block
        return Collected(vector_steps, steps, tuple(episodes), min(versions), tuple(counts))

    def _wait(self, stop: StopRequest) -> bool:
        """Take blocks from the queue until there are enough; False on ``stop``."""
        while not self._has_enough():
            with self._changed:
                if not self._arrived and self._error is None:
                    self._changed.wait(SECONDS_BETWEEN_STOPS)
                if self._error is not None:
                    raise self._error
                if self._arrived:
                    block = self._arrived.popleft()
                    self._taken.append(block)
                    self._seen.add(block.shard)
                    self._changed.notify_all()
                    continue
            if stop():
                return False
        return True

    def _has_enough(self) -> bool:
        """Whether the blocks that were taken make up whole steps of all environments."""
        if not self._taken or len(self._taken) % len(self.shards):
            return False
        return self._fills_rollouts or len(self._seen) == len(self.shards)

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Act with these weights in requests that are sent from now on."""
        super().publish(module, version)
        self._newest = self._published()  # copied here: the learner changes them

    def end_rollout(self) -> None:
        """Do nothing: moments of rewards were merged when their block was taken."""

    def measure(self, timed: Timed) -> None:
        """Count the time that workers are waited for as that of the environments."""
        self._collect = timed("environment", self._wait)

    def state_dict(self) -> Any:
        """Return the states of the shards after the last block that was taken."""
        if self._config.normalize_reward:
            for shard in self.shards:
                shard.state = {**shard.state, "reward_normalizer": self._reward_state(shard.state)}
        return {"shards": super().state_dict(), "flight": None}

    def load_state_dict(self, state: Any) -> bool:
        """Restore the shards."""
        for shard in self.shards:
            shard.worker.handle.load_weights(self._published())
        exact = super().load_state_dict(state["shards"])
        if self._config.normalize_reward:
            self._moments = Moments(*self.shards[0].state["reward_normalizer"]["moments"])
        for shard in self.shards:
            shard.worker.state = shard.state
        return exact

    def close(self) -> None:
        """End the thread and the workers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)
        super().close()

    # -- the thread of the workers -------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread at the first call."""
        if self._thread is None:
            for shard in self.shards:
                shard.worker.state = shard.state
            self._thread = threading.Thread(target=self._supervise, name="workers", daemon=True)
            self._thread.start()

    def _supervise(self) -> None:
        """Receive blocks and send requests, until the source is closed or an error is raised."""
        try:
            while not self._closing:
                for shard in self.shards:
                    self._serve(shard.worker)
                waiting = [one.worker for one in self.shards if one.worker.request is not None]
                if len(waiting) == len(self.shards):
                    handles = [one.handle for one in waiting]
                    self._workers.wait(handles, SECONDS_BETWEEN_STOPS)
                else:  # the queue is full
                    with self._changed:
                        self._changed.wait(SECONDS_BETWEEN_STOPS)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the run
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _serve(self, worker: SupervisedWorker) -> None:
        """Put a worker's block into the queue, if it is there; send the next request."""
        if worker.request is not None:
            taken = worker.receive()
            if taken is None:
                return
            assert worker.weights is not None  # noqa: S101 - narrows the type
            block = _Arrived(worker.index, taken, worker.weights.version)
            worker.continue_from(worker.request.next_name, taken.state)
            with self._changed:
                self._arrived.append(block)
                self._changed.notify_all()
        under_way = sum(one.worker.request is not None for one in self.shards)
        if len(self._arrived) + under_way < _MOST * len(self.shards):
            assert self._newest is not None  # noqa: S101 - narrows the type
            rewards = self._reward_state(worker.state) if self._config.normalize_reward else None
            name = worker.next_name()
            request = Request(worker.state_name, name, self._block, self._progress, rewards)
            worker.send(request, self._newest)

    def _reward_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a shard's reward normaliser with the moments of all shards."""
        returns = state["reward_normalizer"]["returns"]
        return {"returns": returns, "moments": list(self._moments), "rollout": [0.0, 0.0, 0.0]}
