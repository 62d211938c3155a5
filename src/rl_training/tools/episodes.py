"""Episodes for recordings and windows: policies of checkpoints, and their environments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rl_training.checkpointing import find_checkpoint
from rl_training.errors import CheckpointError, ConfigError
from rl_training.registry import find_entry
from rl_training.runtime.playing import (
    ActorPlayer,
    Moment,
    Player,
    actor_player,
    episode_line,
    played,
    shares,
)
from rl_training.runtime.rendering import (
    RenderMode,
    has_display,
    natural_fps,
    picture_of,
    prefer_offscreen,
    rendering_envs,
    sdl_without_display,
)
from rl_training.runtime.stored import load_state, with_environment
from rl_training.runtime.workflows import policy_from_state
from rl_training.seeding import stream_seed
from rl_training.trust import Trust
from rl_training.types import ACTION_MASK

if TYPE_CHECKING:
    from rl_training.runtime.policy import TrainedPolicy

__all__ = [
    "Moment",
    "Player",
    "PolicyPlayer",
    "RandomPlayer",
    "check_counts",
    "episode_line",
    "evaluation_envs",
    "has_display",
    "load_player",
    "natural_fps",
    "picture_of",
    "played",
    "prefer_offscreen",
    "sdl_without_display",
    "shares",
]


class PolicyPlayer(ActorPlayer):
    """A trained policy, acting as in evaluation."""

    def __init__(self, policy: TrainedPolicy, *, deterministic: bool | None, seed: int) -> None:
        actor = policy.evaluation_actor(deterministic, seed)
        super().__init__(actor, policy.obs_spec, policy.action_spec)


def policy_player(
    policy: TrainedPolicy, env: gym.Env[Any, Any], *, deterministic: bool | None, seed: int
) -> Player:
    """Return a trained policy as the player for an environment of `evaluation_envs`."""
    actor = policy.evaluation_actor(deterministic, seed)
    return actor_player(actor, env, policy.obs_spec, policy.action_spec)


class RandomPlayer:
    """Samples actions that the action space and an action mask allow."""

    def __init__(self, space: gym.Space[Any], seed: int) -> None:
        self._space = space
        space.seed(stream_seed(seed, "random_player") >> 32)

    def begin(self) -> None:
        """Do nothing: there is no state."""

    def act(self, obs: Any) -> Any:
        """Return a random action."""
        if isinstance(obs, dict) and ACTION_MASK in obs:
            return self._space.sample(np.asarray(obs[ACTION_MASK], np.int8))
        return self._space.sample()


def load_player(
    checkpoint: Path,
    device: str | None,
    trust: Trust = False,
    *,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> tuple[TrainedPolicy, int | None]:
    """Return the policy of a checkpoint and its step (None for a portable policy file).

    ``env_id`` and ``env_kwargs`` replace the environment of its config.
    """
    state = load_state(find_checkpoint(checkpoint), trust=trust)
    state = with_environment(state, env_id, env_kwargs)
    if state["custom_env"]:
        algo = state["config"]["algo"]
        load = f"{find_entry(algo).class_name_of(algo)}.load({str(checkpoint)!r}, env_fn=MyEnv)"
        raise CheckpointError(
            f"{checkpoint} was trained with env_fn, and the command line cannot create that"
            f" environment. Run episodes in Python with {load} and model.predict, or name a"
            " registered environment: --env-id my_package:MyEnv-v0"
        )
    step = state["training"]["counters"]["global_step"] if "training" in state else None
    return policy_from_state(state, device), step


def evaluation_envs(policy: TrainedPolicy, count: int, mode: RenderMode) -> list[gym.Env[Any, Any]]:
    """Return the environments that an evaluation of ``count`` episodes uses, one by one.

    Raises `ConfigError` where their spaces are not those of the policy.
    """
    return rendering_envs(policy.config, count, mode, (policy.obs_spec, policy.action_spec))


def check_counts(num_episodes: int, max_steps: int | None, fps: float | None) -> None:
    """Raise ConfigError for counts below 1 and frame rates out of range."""
    for name, value in (("num-episodes", num_episodes), ("max-steps", max_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1; got {value}")
    if fps is not None and not 0 < fps <= 1000:
        raise ConfigError(f"--fps must be above 0, and at most 1000; got {fps:g}")
