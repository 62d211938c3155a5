"""The on-policy family: a fixed-length rollout, then one learning phase on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.collector import Collector
from rl_training.runtime.trainer import Setup, Trainer
from rl_training.types import Progress


class OnPolicyTrainer(Trainer):
    """Collect ``num_steps`` in every environment, learn, repeat."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(setup, callbacks)
        config, env = setup.config, setup.env
        knobs = config.algo_kwargs
        self.num_steps = int(knobs.num_steps)
        self.buffer = self.make_buffer(setup)
        normalizer = None
        if config.normalize_reward:
            normalizer = RewardNormalizer(env.num_envs, knobs.gamma, config.clip_reward)
        actor = setup.spec.actor(setup.algorithm, config, setup.device)
        self.collector = Collector(env, actor, self.buffer, normalizer)
        self.learner: Any = setup.algorithm

    def make_buffer(self, setup: Setup) -> RolloutBuffer:
        """Storage for one rollout."""
        obs, action = setup.env.obs_spec, setup.env.action_spec
        dtypes = {key: getattr(torch, leaf.dtype) for key, leaf in obs.leaves.items()}
        return RolloutBuffer(
            self.num_steps,
            setup.env.num_envs,
            obs.shape(),
            action.shape,
            obs_dtype=dtypes if obs.is_dict else dtypes[""],
            action_dtype=getattr(torch, action.policy_dtype),
            device=setup.device,
            masked=setup.env.has_invalid_rows,
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
