"""Episodes for recordings and windows: policies of checkpoints, and their environments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rl_training.checkpointing import find_checkpoint
from rl_training.envs import TeamAdapter
from rl_training.envs.team_env import team_of
from rl_training.envs.team_layout import TeamLayout
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.eval import make_eval_env
from rl_training.errors import CheckpointError, ConfigError
from rl_training.registry import find_entry
from rl_training.runtime.playing import ActorPlayer, Moment, Player, episode_line, played, shares
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


class TeamPlayer:
    """A trained policy that acts for every agent of a team, as in evaluation."""

    def __init__(
        self, policy: TrainedPolicy, layout: TeamLayout, *, deterministic: bool | None, seed: int
    ) -> None:
        self._actor = policy.evaluation_actor(deterministic, seed)
        self._policy = policy
        self._layout = layout

    def begin(self) -> None:
        """Reset the recurrent states."""
        self._actor.reset(np.ones(len(self._layout.agents), bool))

    def act(self, obs: Any) -> Any:
        """Return the actions of all agents, given the vector of a `TeamEnv`."""
        rows = self._layout.rows(np.asarray(obs)[None]).obs
        action, _ = self._actor.act(rows, Progress(1, 1))
        return self._layout.joined_actions(action, 1)[0]


def policy_player(
    policy: TrainedPolicy, env: gym.Env[Any, Any], *, deterministic: bool | None, seed: int
) -> Player:
    """Return the player for an environment of `evaluation_envs`."""
    layout = team_of(env.metadata)
    if layout is None:
        return PolicyPlayer(policy, deterministic=deterministic, seed=seed)
    return TeamPlayer(policy, layout, deterministic=deterministic, seed=seed)


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
    config = policy.config
    shown = config.with_overrides(
        env_kwargs={**config.env_kwargs, "render_mode": mode}, vectorization="sync", overlap=False
    )
    try:
        spaces = (policy.obs_spec, policy.action_spec)
        made = make_eval_env(shown, count, spaces=spaces)
        vector: Any = made.teams.env if isinstance(made, TeamAdapter) else made.env
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        if hint := _opengl_hint(error):  # MuJoCo looks for OpenGL when it is imported
            raise UserError(f"{config.env_id} cannot be created{hint}") from error
        raise
    envs: list[gym.Env[Any, Any]] = list(vector.envs)
    return envs


def shares(episodes: int, envs: int) -> list[int]:
    """Return the number of episodes of each environment, divided as in `evaluate_actor`."""
    share, rest = divmod(episodes, envs)
    return [share + (i < rest) for i in range(envs)]


def played(
    env: gym.Env[Any, Any], player: Player, count: int, *, first: int = 1, max_steps: int | None
) -> Iterator[Moment]:
    """Yield the moments of ``count`` episodes, each stopped after ``max_steps``."""
    for number in range(first, first + count):
        obs, _ = env.reset()
        player.begin()
        step, ret, last = 0, 0.0, False
        yield Moment(number, step, ret, over=False, last=False)
        while not last:
            obs, reward, terminated, truncated, info = env.step(player.act(obs))
            step, ret = step + 1, ret + float(reward)
            over = bool(terminated or truncated)
            last = over or step == max_steps
            if "game_score" in info:  # the raw score, which evaluation reports
                ret = float(info["game_score"])
            yield Moment(number, step, ret, over, last)
    return rendering_envs(policy.config, count, mode, (policy.obs_spec, policy.action_spec))


def check_counts(num_episodes: int, max_steps: int | None, fps: float | None) -> None:
    """Raise ConfigError for counts below 1 and frame rates out of range."""
    for name, value in (("num-episodes", num_episodes), ("max-steps", max_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1; got {value}")
    if fps is not None and not 0 < fps <= 1000:
        raise ConfigError(f"--fps must be above 0, and at most 1000; got {fps:g}")
