"""``rl-training dataset make``: episodes of a trained policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rl_training.datasets.reading import RecordedEpisode
from rl_training.datasets.writing import stacked
from rl_training.errors import ConfigError, EnvironmentFailure
from rl_training.runtime.policy import TrainedPolicy
from rl_training.seeding import stream_seed
from rl_training.tools.episodes import Player, PolicyPlayer
from rl_training.types import ACTION_MASK, ActionSpec, Array


class PlayedEpisode(NamedTuple):
    """An episode, and whether it was played to its end."""

    episode: RecordedEpisode
    whole: bool


class RecordingPlayer:
    """A policy whose actions are replaced by random legal ones with probability ``epsilon``."""

    def __init__(
        self, policy: TrainedPolicy, *, deterministic: bool, epsilon: float, seed: int
    ) -> None:
        self._policy = PolicyPlayer(policy, deterministic=deterministic, seed=seed)
        self._actions = policy.action_spec
        self._has_mask = policy.obs_spec.has_mask
        self._epsilon = epsilon
        self._random = np.random.default_rng(stream_seed(seed, "random_actions"))
        if epsilon and self._actions.described == "unbounded Box":
            raise ConfigError(
                "--epsilon needs actions with finite bounds, and this Box is unbounded: use"
                " --stochastic"
            )

    def begin(self) -> None:
        """Reset the recurrent state."""
        self._policy.begin()

    def act(self, obs: Any) -> Any:
        """Return the action for one observation; a recurrent state is updated in any case."""
        mask = np.asarray(obs[ACTION_MASK], bool) if self._has_mask else None
        if mask is not None and self._actions.without_choice(mask):
            raise EnvironmentFailure(f"the environment allows no action: '{ACTION_MASK}' is all 0")
        action = self._policy.act(obs)
        if self._epsilon and self._random.random() < self._epsilon:
            return self._actions.to_env(random_action(self._actions, mask, self._random)[None])[0]
        return action


def random_action(spec: ActionSpec, mask: Array | None, random: np.random.Generator) -> Array:
    """Return an action of the policy, uniform over those that the mask allows (None: all)."""
    if spec.kind == "box":
        return random.uniform(-1.0, 1.0, spec.shape)
    if spec.kind == "multi_binary":
        return random.integers(0, 2, spec.shape)
    legal = np.ones(sum(spec.nvec), bool) if mask is None else mask
    parts = np.split(legal, np.cumsum(spec.nvec)[:-1])
    chosen = [int(random.choice(np.flatnonzero(part))) for part in parts]
    return np.array(chosen, np.int64).reshape(spec.shape)


def play(
    env: Any, player: Player, steps: int, on_step: Callable[[int], None]
) -> Iterator[PlayedEpisode]:
    """Yield episodes of exactly ``steps`` transitions; the last one is cut and marked truncated.

    ``on_step`` is called after each transition with the number of transitions so far.
    """
    done = index = 0
    while done < steps:
        obs, _ = env.reset()
        player.begin()
        observations, actions, rewards = [_copied(obs)], [], []
        terminated = truncated = False
        while done < steps and not (terminated or truncated):
            action = player.act(obs)
            actions.append(np.array(action))
            obs, reward, terminated, truncated, _ = env.step(action)
            observations.append(_copied(obs))
            rewards.append(float(reward))
            done += 1
            on_step(done)
        ends = np.zeros((2, len(rewards)), bool)
        ends[:, -1] = terminated, truncated or not terminated
        episode = RecordedEpisode(
            index,
            stacked(env.observation_space, observations),
            np.stack(actions),
            np.array(rewards),
            *ends,
        )
        yield PlayedEpisode(episode, whole=bool(terminated or truncated))
        index += 1


def _copied(obs: Any) -> Any:
    """Return a copy: the environment may write its next observation into the same array."""
    if isinstance(obs, dict):
        return {key: _copied(entry) for key, entry in obs.items()}
    return tuple(map(_copied, obs)) if isinstance(obs, tuple) else np.array(obs)
