"""The on-policy family: a fixed-length rollout, then one learning phase on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.trainer import Setup, Trainer, make_collector
from rl_training.types import Progress


class OnPolicyTrainer(Trainer):
    """Collect ``num_steps`` in every environment, learn, repeat."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(setup, callbacks)
        self.num_steps = int(setup.config.algo_kwargs.num_steps)
        self.buffer = self.make_buffer(setup)
        self.collector = make_collector(setup, self.buffer)
        self.learner: Any = setup.algorithm

    def make_buffer(self, setup: Setup) -> RolloutBuffer:
        """Storage for one rollout."""
        return self.fill_in(RolloutBuffer, setup)

    def fill_in(
        self, kind: Callable[..., RolloutBuffer], setup: Setup, **kwargs: Any
    ) -> RolloutBuffer:
        """A buffer of some kind, in the shapes of this run."""
        obs, action = setup.env.obs_spec, setup.env.action_spec
        dtypes = {key: getattr(torch, leaf.dtype) for key, leaf in obs.leaves.items()}
        return kind(
            self.num_steps,
            setup.env.num_envs,
            obs.shape(),
            action.shape,
            obs_dtype=dtypes if obs.is_dict else dtypes[""],
            action_dtype=getattr(torch, action.policy_dtype),
            device=setup.device,
            masked=setup.env.has_invalid_rows,
            **kwargs,
        )

    def round_up(self, total: int) -> int:
        """A whole number of rollouts."""
        rollout = self.config.num_envs * int(self.config.algo_kwargs.num_steps)
        return -(-total // rollout) * rollout

    def iterate(self, progress: Progress) -> tuple[int, dict[str, float]]:
        """One rollout and its learning phase."""
        self.buffer.reset()
        collected = self.collector.collect(self.num_steps, progress)
        self.buffer.check_finite(progress.step)
        metrics = self.learner.learn(self.buffer, progress)
        return collected.steps, {**self.collector.metrics(), **metrics}
