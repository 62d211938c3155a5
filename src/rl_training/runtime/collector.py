"""The only loop that steps an environment in training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map, tree_stack
from rl_training.envs import Adapter, HalvedAdapter, VectorAdapter
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.actors import Actor
from rl_training.types import Array, Episode, Obs, Progress, StopRequest, VectorStep, never

_WINDOW = 100
Taken: TypeAlias = tuple[Array, Mapping[str, Any], VectorStep]
"""Actions, what the actor wants stored beside them, and what they gave."""


class Buffer(Protocol):
    """Where transitions go."""

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Store one step of every environment."""
        ...


class CollectResult(NamedTuple):
    """What one call collected."""

    vector_steps: int
    """Steps of all environments: fewer than asked for where a stop was requested."""
    steps: int
    """Transitions that count (reset-only rows do not)."""
    episodes: tuple[Episode, ...]


class Collector:
    """Moves environments forward with an actor and stores what happened."""

    def __init__(
        self,
        env: Adapter,
        actor: Actor,
        buffer: Buffer,
        reward_normalizer: RewardNormalizer | None = None,
    ) -> None:
        self.env = env
        self.actor = actor
        self.buffer = buffer
        self.reward_normalizer = reward_normalizer
        self.obs: Obs | None = None
        self.recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        """Return and length of the last hundred episodes."""

    def collect(
        self, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> CollectResult:
        """Take ``num_steps`` steps in every environment, or fewer where ``stop`` requests it."""
        obs = self.env.reset() if self.obs is None else self.obs
        vector_steps = steps = 0
        episodes: list[Episode] = []
        walk = self._overlapped if isinstance(self.env, HalvedAdapter) else self._one_by_one
        for action, record, taken in walk(obs, num_steps, progress, stop):
            step = taken
            vector_steps += 1
            steps += self.env.num_envs
            resets = self.env.has_invalid_rows and not step.valid.all()
            if resets:
                steps -= int(np.count_nonzero(~step.valid))
            episodes += step.episodes
            # Not only where an episode is counted: a lost life ends the agent's own.
            cut = step.cut
            if cut.any():
                self.actor.reset(cut)
            if self.reward_normalizer is not None:
                done = step.terminated | step.truncated
                reward = self.reward_normalizer(step.reward, done, step.valid)
                step = step._replace(reward=reward)
            self.buffer.add(obs, action, record, step)
            obs = step.obs
        self.obs = obs
        self.recent.extend((episode.ret, episode.length) for episode in episodes)
        return CollectResult(vector_steps, steps, tuple(episodes))

    def _one_by_one(
        self, obs: Obs, num_steps: int, progress: Progress, stop: StopRequest
    ) -> Iterator[Taken]:
        """Choose, step, choose, step."""
        for _ in range(num_steps):
            if stop():
                return
            action, record = self.actor.act(obs, progress)
            step = self.env.step(action)
            yield action, record, step
            obs = step.obs

    def _overlapped(
        self, obs: Obs, num_steps: int, progress: Progress, stop: StopRequest
    ) -> Iterator[Taken]:
        """The same, but one half steps while actions of the other are chosen.

        The halves are fixed and come in turn, and all is waited for in the end: what happens does
        not depend on which is faster.
        """
        env = cast("HalvedAdapter", self.env)
        if not num_steps or stop():
            return

        def send(half: VectorAdapter, seen: Obs) -> tuple[Array, Mapping[str, Any]]:
            action, record = self.actor.act(seen, progress)
            half.send(action)
            # The other half's turn comes before this one's is stored.
            return action, {k: tree_map(torch.clone, v) for k, v in record.items()}

        parts = [tree_map(lambda leaf, rows=rows: leaf[rows], obs) for rows in env.rows]
        chosen = [send(half, part) for half, part in zip(env.halves, parts, strict=True)]
        for left in reversed(range(num_steps)):
            following, steps = [], []
            continues = left > 0 and not stop()
            for half in env.halves:
                steps.append(half.recv())
                if continues:
                    following.append(send(half, steps[-1].obs))
            actions, records = zip(*chosen, strict=True)
            yield np.concatenate(actions), _joined(records), env.join(steps)
            if not continues:
                return
            chosen = following

    def metrics(self) -> dict[str, float]:
        """Means over the last hundred training episodes."""
        if not self.recent:
            return {}
        returns, lengths = zip(*self.recent, strict=True)
        return {
            "rollout/return_mean": float(np.mean(returns)),
            "rollout/length_mean": float(np.mean(lengths)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        return {
            "obs": self.obs,
            "env": self.env.state_dict(),
            "recent": [list(episode) for episode in self.recent],
            "reward_normalizer": (
                self.reward_normalizer.state_dict() if self.reward_normalizer else None
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Bring a saved state back; False where the environments could not be, exactly."""
        self.recent.clear()
        self.recent.extend((float(ret), int(length)) for ret, length in state["recent"])
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(_as_arrays(state["reward_normalizer"]))
        if state["obs"] is None:
            return True
        expected = tree_map(np.asarray, state["obs"])
        self.obs, exact = self.env.load_state_dict(_as_arrays(state["env"]), expected)
        return exact


def _joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The halves' tensors as one."""
    return {
        name: tree_stack(torch.cat, [record[name] for record in records]) for name in records[0]
    }


def _as_arrays(value: Any) -> Any:
    """Stored tensors as the arrays that environments know."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_arrays(item) for item in value]
    return value
