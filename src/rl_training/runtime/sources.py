"""Experience from environments of this process: the only loop that steps them in training."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map, tree_stack
from rl_training.algorithms.moments import Moments
from rl_training.envs import Adapter, HalvedAdapter, PlainAdapter, TeamAdapter, VectorAdapter
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.actors import Actor, after_step
from rl_training.runtime.episode_info import WINDOW, EpisodeInfo
from rl_training.runtime.experience import Buffer, Collected, OnStep, Timed
from rl_training.types import Array, EnvInfo, Episode, Obs, Progress, StopRequest, VectorStep, never

Taken: TypeAlias = tuple[Array, Mapping[str, Any], VectorStep]
"""Actions, what the actor recorded with them, and the step that they led to."""


class LocalSource:
    """Steps a vector environment with an actor."""

    def __init__(
        self,
        env: Adapter,
        actor: Actor,
        reward_normalizer: RewardNormalizer | None = None,
        window: int = WINDOW,
    ) -> None:
        self.env = env
        self.actor = actor
        self.reward_normalizer = reward_normalizer
        self.info = env_info(env)
        self.obs: Obs | None = None
        self.recent: deque[tuple[float, int]] = deque(maxlen=window)
        """Return and length of the last episodes."""
        self.policy_version = 0
        self._act = actor.act
        self._step: Callable[[Array], VectorStep] = env.step
        self._timed: Timed | None = None
        self._on_step: OnStep | None = None
        self._episode_info: EpisodeInfo | None = None

    def watch_steps(self, on_step: OnStep | None) -> None:
        """Call ``on_step(obs, actions, step, infos)`` for every step; None: no longer."""
        self._on_step = on_step

    def watch_info(self, keys: Sequence[str]) -> None:
        """Average the values of ``keys`` in the info of each episode's last step."""
        if self._episode_info is not None and self._episode_info.keys == tuple(keys):
            return
        self._episode_info = info = EpisodeInfo(keys, window=self.recent.maxlen or WINDOW)
        for first, env in _vectors(self.env):
            env.watch_episodes(functools.partial(_add_info, info, first))

    def _infos_reader(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that returns the infos of the last step until now."""
        readers = [env.infos_reader() for _, env in _vectors(self.env)]
        return lambda: [info for read in readers for info in read()]

    @property
    def first_env(self) -> int:
        """The index in the run of the first of these environments."""
        return int(self.env.first_index)

    @property
    def episode_lengths(self) -> Array:
        """Steps so far of each environment's current episode."""
        return self.env.episode_lengths

    @property
    def exactly_resumable(self) -> bool:
        """Whether the environments can be restored bit for bit."""
        return self.env.exactly_resumable

    def collect(
        self, buffer: Buffer, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add ``num_steps`` steps of every environment to the buffer, or fewer on ``stop``."""
        obs = self.env.reset() if self.obs is None else self.obs
        add = buffer.add if self._timed is None else self._timed("storing", buffer.add)
        vector_steps = steps = 0
        episodes: list[Episode] = []
        for action, record, taken in self._steps(obs, num_steps, progress, stop):
            step = taken
            vector_steps += 1
            steps += self.info.num_envs
            resets = self.info.has_invalid_rows and not step.valid.all()
            if resets:
                steps -= int(np.count_nonzero(~step.valid))
            episodes += step.episodes
            after_step(self.actor, step)
            if self.reward_normalizer is not None:
                done = step.terminated | step.truncated
                reward = self.reward_normalizer(step.reward, done, step.valid)
                step = step._replace(reward=reward)
            add(obs, action, record, step)
            if self._on_step is not None:
                received = self.env.action_spec.joined(self.env.action_spec.to_env(action))
                self._on_step(obs, received, taken, self._infos_reader())
            obs = step.obs
        self.obs = obs
        self.recent.extend((episode.ret, episode.length) for episode in episodes)
        return Collected(vector_steps, steps, tuple(episodes), self.policy_version)

    def _steps(
        self, obs: Obs, num_steps: int, progress: Progress, stop: StopRequest
    ) -> Iterator[Taken]:
        """Choose actions, step the environments, repeat."""
        for _ in range(num_steps):
            if stop():
                return
            action, record = self._act(obs, progress)
            step = self._step(action)
            yield action, record, step
            obs = step.obs

    def end_rollout(self) -> None:
        """Add the moments of the rollout's rewards to those before it."""
        self.merge_rewards([self.reward_moments()])

    def reward_moments(self) -> Moments:
        """Return the moments of the rewards since the last `merge_rewards`."""
        assert self.reward_normalizer is not None  # noqa: S101 - narrows the type
        return self.reward_normalizer.rollout_moments

    def merge_rewards(self, shards: Sequence[Moments]) -> None:
        """Add the moments of the rewards of every shard to those before the rollout."""
        assert self.reward_normalizer is not None  # noqa: S101 - narrows the type
        self.reward_normalizer.end_rollout(shards)

    def episode_sums(self) -> list[float]:
        """Return sums over the last episodes: their number, returns, lengths, and `log_info`."""
        returns, lengths = zip(*self.recent, strict=True) if self.recent else ((), ())
        info = self._episode_info.sums() if self._episode_info is not None else []
        own = [len(self.recent), float(np.sum(returns)), float(np.sum(lengths))]
        return [*own, *(number for pair in info for number in pair)]

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Record the version; the actor reads the learner's own weights."""
        del module
        self.policy_version = version

    def metrics(self) -> dict[str, float]:
        """Return the means over the last hundred training episodes."""
        if not self.recent:
            return {}
        returns, lengths = zip(*self.recent, strict=True)
        info = self._episode_info.means("rollout") if self._episode_info is not None else {}
        return {
            "rollout/return_mean": float(np.mean(returns)),
            "rollout/length_mean": float(np.mean(lengths)),
            **info,
        }

    def measure(self, timed: Timed) -> None:
        """Call the parts through ``timed`` from now on."""
        self._timed = timed
        self._act = timed("inference", self.actor.act)
        self._step = timed("environment", self.env.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of actor, environments, normaliser and episode statistics."""
        info = self._episode_info
        return {
            "actor": self.actor.state_dict(),
            "obs": self.obs,
            "env": self.env.state_dict(),
            "recent": [list(episode) for episode in self.recent],
            "reward_normalizer": (
                self.reward_normalizer.state_dict() if self.reward_normalizer else None
            ),
            **({"episode_info": info.state_dict()} if info is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; False where the environments could not be restored exactly."""
        self.actor.load_state_dict(state["actor"])
        self.recent.clear()
        self.recent.extend((float(ret), int(length)) for ret, length in state["recent"])
        if self._episode_info is not None:
            self._episode_info.load_state_dict(state.get("episode_info", {}))
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(as_arrays(state["reward_normalizer"]))
        if state["obs"] is None:
            return True
        expected = tree_map(np.asarray, state["obs"])
        self.obs, exact = self.env.load_state_dict(as_arrays(state["env"]), expected)
        if not exact:  # a recurrent state may belong to other episodes
            self.actor.reset(np.ones(self.info.num_envs, bool))
        return exact

    def end_of(self, state: Mapping[str, Any]) -> tuple[Obs, Mapping[str, Any]] | None:
        """Return the last observations and the actor's state in a saved state."""
        if state["obs"] is None:
            return None
        obs: Any = tree_map(np.asarray, state["obs"])
        return obs, state["actor"]

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


class OverlappedSource(LocalSource):
    """Steps one half of the environments while actions of the other half are chosen.

    The halves are fixed, alternate, and all steps are waited for at the end of a call: the result
    does not depend on which half is faster.
    """

    env: HalvedAdapter

    def __init__(
        self,
        env: HalvedAdapter,
        actor: Actor,
        reward_normalizer: RewardNormalizer | None = None,
        window: int = WINDOW,
    ) -> None:
        super().__init__(env, actor, reward_normalizer, window)
        self._send: Callable[..., None] = VectorAdapter.send
        self._receive: Callable[..., VectorStep] = VectorAdapter.recv

    def measure(self, timed: Timed) -> None:
        """Call the parts through ``timed`` from now on."""
        super().measure(timed)
        self._send = timed("environment", VectorAdapter.send)
        self._receive = timed("environment", VectorAdapter.recv)

    def _steps(
        self, obs: Obs, num_steps: int, progress: Progress, stop: StopRequest
    ) -> Iterator[Taken]:
        if not num_steps or stop():
            return

        def send(half: VectorAdapter, seen: Obs) -> tuple[Array, Mapping[str, Any]]:
            action, record = self._act(seen, progress)
            self._send(half, action)
            # The other half acts before this record is stored.
            return action, {k: tree_map(torch.clone, v) for k, v in record.items()}

        parts = [tree_map(lambda leaf, rows=rows: leaf[rows], obs) for rows in self.env.rows]
        chosen = [send(half, part) for half, part in zip(self.env.halves, parts, strict=True)]
        for left in reversed(range(num_steps)):
            following, steps = [], []
            continues = left > 0 and not stop()
            for half in self.env.halves:
                steps.append(self._receive(half))
                if continues:
                    following.append(send(half, steps[-1].obs))
            actions, records = zip(*chosen, strict=True)
            yield np.concatenate(actions), _joined(records), self.env.join(steps)
            if not continues:
                return
            chosen = following


def env_info(env: Adapter) -> EnvInfo:
    """Return what a learner may know of environments."""
    rows: dict[str, Any] = {}
    if isinstance(env, TeamAdapter):
        rows = {
            "has_turns": env.has_turns,
            "agents": {one.name: one.agents for one in env.layout.groups},
            "log_info": env.log_info,
        }
    return EnvInfo(
        env.obs_spec, env.action_spec, env.num_envs, env.frame_stack, env.has_invalid_rows, **rows
    )


def local_source(
    env: Adapter,
    actor: Actor,
    reward_normalizer: RewardNormalizer | None = None,
    window: int = WINDOW,
) -> LocalSource:
    """Return the source for environments of this process, overlapped where they are halves."""
    if isinstance(env, HalvedAdapter):
        return OverlappedSource(env, actor, reward_normalizer, window)
    return LocalSource(env, actor, reward_normalizer, window)


def _vectors(env: Adapter) -> list[tuple[int, PlainAdapter]]:
    """The vectors that an adapter steps, each with the index of its first environment."""
    if not isinstance(env, HalvedAdapter):
        return [(0, env)]
    return [(rows.start, half) for half, rows in zip(env.halves, env.rows, strict=True)]


def _add_info(info: EpisodeInfo, first: int, env: int, values: Mapping[str, Any]) -> None:
    info.add(first + env, values)


def _joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records of both halves as one."""
    return {
        name: tree_stack(torch.cat, [record[name] for record in records]) for name in records[0]
    }


def as_arrays(value: Any) -> Any:
    """Stored tensors as the arrays that environments use."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: as_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_arrays(item) for item in value]
    return value
