"""`Collector`: a source of experience bound to one buffer, for use outside a trainer."""

from __future__ import annotations

from typing import Any

from rl_training.envs import Adapter
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.actors import Actor
from rl_training.runtime.experience import Buffer, Collected
from rl_training.runtime.sources import local_source
from rl_training.types import Progress, StopRequest, never

CollectResult = Collected


class Collector:
    """Steps environments with an actor and stores each step in a buffer."""

    def __init__(
        self,
        env: Adapter,
        actor: Actor,
        buffer: Buffer,
        reward_normalizer: RewardNormalizer | None = None,
    ) -> None:
        self.source = local_source(env, actor, reward_normalizer)
        self.buffer = buffer

    def collect(self, num_steps: int, progress: Progress, stop: StopRequest = never) -> Collected:
        """Step every environment ``num_steps`` times, or fewer if ``stop`` requests it."""
        return self.source.collect(self.buffer, num_steps, progress, stop)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the source: its environments, actor, episode statistics, state."""
        if name == "source":  # not set yet
            raise AttributeError(name)
        return getattr(self.source, name)
