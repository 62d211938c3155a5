"""The on-policy family: a fixed-length rollout, then one learning phase on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_training.communicator import per_shard_state, state_of_each
from rl_training.data.device_rollout import DeviceRollout
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import Paused
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.sharded_source import first_env, shard_sources
from rl_training.runtime.trainer import Iteration, Setup, Trainer
from rl_training.types import EnvInfo, Progress, StopRequest, never

_SLOW_LEARNING = 0.3
"""Seconds from which a learning phase can be stopped by a signal before its end."""


class OnPolicyTrainer(Trainer):
    """Collect ``num_steps`` in every environment, learn, repeat."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(setup, callbacks)
        self.num_steps = int(setup.config.algo_kwargs.num_steps)
        self._sources = shard_sources(setup.source)
        self.buffers = [
            self.make_buffer(setup.of_shard(index)) for index in range(len(self._sources))
        ]
        """The rollouts of the shards that this process executes."""
        for buffer, source in zip(self.buffers, self._sources, strict=True):
            buffer.first_env = first_env(source)
        self._collected: int | None = None
        """Transitions of the rollout that is being collected; None between iterations."""
        self._counted_rows = 0
        """Rows of the buffer that ``_collected`` counts."""
        self._before_learning: dict[str, Any] | None = None
        self._learning_seconds: float | None = None
        self._updates = 0
        """Gradient steps of the last learning phase."""

    @property
    def buffer(self) -> RolloutBuffer:
        """The rollout of the first shard that this process executes: of an only shard, all."""
        return self.buffers[0]

    def make_buffer(self, setup: Setup) -> RolloutBuffer:
        """Return storage for one rollout of a shard."""
        kind = DeviceRollout if setup.source.info.on_device else RolloutBuffer
        return self.make_buffer_of(kind, setup)

    def make_buffer_of(
        self,
        kind: Callable[..., RolloutBuffer],
        setup: Setup,
        *,
        info: EnvInfo | None = None,
        **kwargs: Any,
    ) -> RolloutBuffer:
        """Return a buffer of some kind, in the shapes of this run, or of ``info``."""
        info = setup.source.info if info is None else info
        obs, action = info.obs_spec, info.action_spec
        dtypes = {key: getattr(torch, leaf.dtype) for key, leaf in obs.leaves.items()}
        return kind(
            self.num_steps,
            info.num_envs,
            obs.shape(),
            action.shape,
            obs_dtype=dtypes if obs.is_dict else dtypes[""],
            action_dtype=getattr(torch, action.policy_dtype),
            device=setup.device,
            masked=info.has_invalid_rows,
            **({"turns": True} if info.has_turns else {}),
            **kwargs,
        )

    def round_up(self, total: int) -> int:
        """A whole number of rollouts."""
        rollout = self.source.info.num_envs * int(self.config.algo_kwargs.num_steps)
        return -(-total // rollout) * rollout

    def iterate(self, progress: Progress) -> Iteration | None:
        """Collect one rollout and learn from it; None where it paused on the way."""
        if self._collected is None:
            for buffer in self.buffers:
                buffer.reset()
            self._collected = self._counted_rows = 0
        missing = self.num_steps - self.buffer.position
        taken = self.source.collect(self._experience, missing, progress, self.pauses)
        self._collected += taken.steps
        self._counted_rows = self.buffer.position
        self.reporter.notify_rollout(
            progress.step + self._collected, taken, complete=self.buffer.position == self.num_steps
        )
        if self.buffer.position < self.num_steps:
            return None
        for buffer, source in zip(self.buffers, self._sources, strict=True):
            buffer.check_finite(progress.step, source.episode_lengths)
        if not self._learn_from_rollout(progress):
            return None
        if self.config.normalize_reward:
            self.source.end_rollout()
        self.source.publish(self.learner.module, self.iteration + 1)
        steps = self._collected
        metrics = self.learner.pop_metrics()
        self.reporter.notify_update(progress.step + steps, self._updates, lambda: metrics)
        self._collected = None
        return Iteration(steps, {**self.source_metrics(), **metrics})

    def _learn_from_rollout(self, progress: Progress) -> bool:
        """Run the learning phase; False, and nothing learnt, where a signal stopped it.

        Only a slow phase can be stopped, because the state to return to is copied before it.
        """
        stop: StopRequest = never
        if self._learning_seconds is None or self._learning_seconds > _SLOW_LEARNING:
            self._before_learning = _copied(self.learner.state_dict())
            stop = self.stops_work
        started = time.monotonic()
        try:
            with self.stopping.at("learn"):
                self._updates = self._learn(self._experience, progress, stop)
        except Paused:
            self.learner.load_state_dict(self._before_learning or {})
            return False
        finally:
            self._before_learning = None
        self._learning_seconds = self.ranks.longest(time.monotonic() - started)
        return True

    @property
    def _experience(self) -> Any:
        """The rollout as source and learner take it."""
        return self.buffer if self.communicator.alone else self.buffers

    def current_step(self) -> int:
        """Return the global step, the rollout so far included."""
        if self._collected is None:
            return self.global_step
        uncounted = (self.buffer.position - self._counted_rows) * self.source.info.num_envs
        return self.global_step + self._collected + uncounted

    def learner_state(self) -> dict[str, Any]:
        """Return the learner's state; within a learning phase, the one from before it."""
        return self._before_learning or super().learner_state()

    def partial_state(self) -> dict[str, Any] | None:
        """Return the rollout so far."""
        if self._collected is None:
            return None
        rollouts = [buffer.state_dict() for buffer in self.buffers]
        rollout = per_shard_state(rollouts, self.communicator)
        return {"collected": self._collected, "rollout": rollout}

    def cut_episodes(self, source_state: Mapping[str, Any]) -> None:
        """End the episodes of the rollout so far as if they had been truncated there."""
        if self._collected is None or not 0 < self.buffer.position < self.num_steps:
            return
        saved = state_of_each(source_state, self.communicator)
        for buffer, source, state in zip(self.buffers, self._sources, saved, strict=True):
            if (end := source.end_of(state)) is not None:
                buffer.truncate(*end)

    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Restore the rollout so far."""
        self._collected = int(state["collected"])
        saved = state_of_each(state["rollout"], self.communicator)
        for buffer, one in zip(self.buffers, saved, strict=True):
            buffer.load_state_dict(one)
        self._counted_rows = self.buffer.position


def _copied(state: Any) -> Any:
    """A copy of a learner's state that further updates do not change."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return type(state)(_copied(value) for value in state)
    return state
