"""Episodes for recordings and windows: evaluation environments, stepped one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium as gym
import numpy as np

from rl_training._internal.tree import tree_map
from rl_training.checkpointing import find_checkpoint
from rl_training.envs import TeamAdapter
from rl_training.envs.team_env import team_of
from rl_training.envs.team_layout import TeamLayout
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.eval import make_eval_env
from rl_training.registry import find_entry
from rl_training.runtime.stored import load_state, with_environment
from rl_training.runtime.workflows import policy_from_state
from rl_training.seeding import stream_seed
from rl_training.trust import Trust
from rl_training.types import ACTION_MASK, Array, Progress

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.policy import TrainedPolicy

RenderMode = Literal["human", "rgb_array"]
_CONSOLE_FPS = 60
_USUAL_FPS = 30


@dataclasses.dataclass(frozen=True)
class Moment:
    """The state of an episode after a step, or after a reset (step 0)."""

    episode: int
    """Number of the episode, from 1."""
    step: int
    ret: float
    """Return so far; for Atari the raw score."""
    over: bool
    """Whether the episode ended."""
    last: bool
    """Whether this is the episode's last moment: it ended or reached ``max_steps``."""

    def caption(self) -> str:
        """Return the text above a picture."""
        return f"episode {self.episode}   step {self.step}   return {self.ret:.1f}"

    def result(self) -> str:
        """Return the line that is printed when the episode ends."""
        cut = "" if self.over else " (stopped by --max-steps)"
        return f"{episode_line(self.episode, self.ret, self.step)}{cut}\n"


def episode_line(episode: int, ret: float, steps: int) -> str:
    """Return the number, return and length of an episode in words."""
    return f"episode {episode}: return {ret:.2f} in {steps} step{'' if steps == 1 else 's'}"


class Player(Protocol):
    """Chooses actions."""

    def begin(self) -> None:
        """Reset for a new episode."""
        ...

    def act(self, obs: Any) -> Any:
        """Return the action for one observation, both in the environment's format."""
        ...


class PolicyPlayer:
    """A trained policy, acting as in evaluation."""

    def __init__(self, policy: TrainedPolicy, *, deterministic: bool | None, seed: int) -> None:
        self._actor = policy.evaluation_actor(deterministic, seed)
        self._policy = policy

    def begin(self) -> None:
        """Reset the recurrent state."""
        self._actor.reset(np.ones(1, bool))

    def act(self, obs: Any) -> Any:
        """Return the action for one observation, computed as a batch of one."""
        batch = tree_map(lambda leaf: leaf[None], self._policy.obs_spec.cast(obs))
        action, _ = self._actor.act(batch, Progress(1, 1))
        return self._policy.action_spec.to_env(action)[0]


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


def check_counts(num_episodes: int, max_steps: int | None, fps: float | None) -> None:
    """Raise ConfigError for counts below 1 and frame rates out of range."""
    for name, value in (("num-episodes", num_episodes), ("max-steps", max_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1; got {value}")
    if fps is not None and not 0 < fps <= 1000:
        raise ConfigError(f"--fps must be above 0, and at most 1000; got {fps:g}")


def natural_fps(config: TrainConfig[Any], env: gym.Env[Any, Any]) -> float:
    """Return the steps per second at which the environment runs in real time."""
    if config.preprocessing == "atari":
        return _CONSOLE_FPS / config.atari.frame_skip
    fps = env.metadata.get("render_fps")
    return float(fps) if fps else _USUAL_FPS


def has_display() -> bool:
    """Return whether a window can be opened (with SDL's dummy driver an invisible one)."""
    if sys.platform != "linux":
        return True
    names = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    return any(os.environ.get(name) for name in names)


@contextlib.contextmanager
def sdl_without_display() -> Iterator[None]:
    """Select SDL's dummy video driver if there is no display, so that pygame prints no error."""
    if has_display():
        yield
        return
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    try:
        yield
    finally:
        del os.environ["SDL_VIDEODRIVER"]


def prefer_offscreen() -> None:
    """Make MuJoCo render off screen if there is no display and MUJOCO_GL is not set."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def picture_of(env: gym.Env[Any, Any]) -> Array:
    """Return a picture of the environment, (height, width, 3) bytes."""
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    try:
        picture: Any = env.render()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{name} cannot be rendered ({reason[:200]}){_opengl_hint(error)}"
        ) from error
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3:
        modes = env.metadata.get("render_modes", [])
        raise UserError(
            f"{name} returns no pictures with render_mode 'rgb_array'; its metadata lists {modes}"
        )
    return picture[..., :3]


def _opengl_hint(error: Exception) -> str:
    """Return what to set if MuJoCo failed for lack of OpenGL, else nothing."""
    places = traceback.extract_tb(error.__traceback__)
    if not any("mujoco" in place.filename for place in places):
        return ""
    return (
        ": MuJoCo needs OpenGL. Without a display set MUJOCO_GL=egl (a GPU's driver, or Mesa:"
        " apt-get install libegl1) or MUJOCO_GL=osmesa (apt-get install libosmesa6); now it is"
        f" {os.environ.get('MUJOCO_GL') or 'unset'}"
    )
