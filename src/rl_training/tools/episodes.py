"""Episodes to be watched: environments as evaluation makes them, stepped one at a time."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium as gym
import numpy as np

from rl_training._internal.tree import tree_map
from rl_training.checkpointing import find_checkpoint
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.eval import make_eval_env
from rl_training.runtime.stored import load_state
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
    """What there is to see after a step, or after a reset (step 0)."""

    episode: int
    """From 1."""
    step: int
    ret: float
    """Return so far; of Atari the raw score."""
    over: bool
    """The episode is complete."""
    last: bool
    """Nothing of this episode follows: it is over, or left."""

    def caption(self) -> str:
        """What is written above a picture."""
        return f"episode {self.episode}   step {self.step}   return {self.ret:.1f}"

    def result(self) -> str:
        """What is printed at the end."""
        cut = "" if self.over else " (left there: --max-steps)"
        return f"episode {self.episode}: return {self.ret:.2f} in {self.step} steps{cut}\n"


class Player(Protocol):
    """Whoever chooses actions."""

    def begin(self) -> None:
        """An episode begins."""
        ...

    def act(self, obs: Any) -> Any:
        """The action for one observation, both as the environment knows them."""
        ...


class PolicyPlayer:
    """A trained policy, which acts as it does in evaluation."""

    def __init__(self, policy: TrainedPolicy, *, deterministic: bool | None, seed: int) -> None:
        self._actor = policy.evaluation_actor(deterministic, seed)
        self._policy = policy

    def begin(self) -> None:
        """Forget the last episode."""
        self._actor.reset(np.ones(1, bool))

    def act(self, obs: Any) -> Any:
        """A batch of one."""
        batch = tree_map(lambda leaf: leaf[None], self._policy.obs_spec.cast(obs))
        action, _ = self._actor.act(batch, Progress(1, 1))
        return self._policy.action_spec.to_env(action)[0]


class RandomPlayer:
    """Anything the action space (and an action mask) allows."""

    def __init__(self, space: gym.Space[Any], seed: int) -> None:
        self._space = space
        space.seed(stream_seed(seed, "random_player") >> 32)

    def begin(self) -> None:
        """Nothing is remembered."""

    def act(self, obs: Any) -> Any:
        """Sample."""
        if isinstance(obs, dict) and ACTION_MASK in obs:
            return self._space.sample(np.asarray(obs[ACTION_MASK], np.int8))
        return self._space.sample()


def load_player(
    checkpoint: Path, device: str | None, trust: Trust = False
) -> tuple[TrainedPolicy, int | None]:
    """The policy of a checkpoint, and the step it was saved at (None: a policy alone)."""
    state = load_state(find_checkpoint(checkpoint), trust=trust)
    if state["custom_env"]:
        raise CheckpointError(
            f"{checkpoint} was trained on an environment given as env_fn, which the command line"
            " cannot make: register it, or watch it from Python with model.predict"
        )
    step = state["training"]["counters"]["global_step"] if "training" in state else None
    return policy_from_state(state, device), step


def evaluation_envs(
    config: TrainConfig[Any], count: int, mode: RenderMode
) -> list[gym.Env[Any, Any]]:
    """The environments that evaluating ``count`` episodes would step, each by itself."""
    shown = config.with_overrides(
        env_kwargs={**config.env_kwargs, "render_mode": mode}, vectorization="sync", overlap=False
    )
    try:
        vector: Any = make_eval_env(shown, count).env
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        if hint := _opengl_hint(error):  # MuJoCo looks for OpenGL when it is imported
            raise UserError(f"{config.env_id} cannot be made{hint}") from error
        raise
    envs: list[gym.Env[Any, Any]] = list(vector.envs)
    return envs


def shares(episodes: int, envs: int) -> list[int]:
    """How many each environment plays, as `evaluate_actor` divides them."""
    share, rest = divmod(episodes, envs)
    return [share + (i < rest) for i in range(envs)]


def played(
    env: gym.Env[Any, Any], player: Player, count: int, *, first: int = 1, max_steps: int | None
) -> Iterator[Moment]:
    """Moments of ``count`` episodes; one longer than ``max_steps`` is left there."""
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
            if "game_score" in info:  # what evaluation counts, whatever wrappers make of rewards
                ret = float(info["game_score"])
            yield Moment(number, step, ret, over, last)


def check_counts(num_episodes: int, max_steps: int | None, fps: float | None) -> None:
    """Refuse what would play or show nothing."""
    for name, value in (("num-episodes", num_episodes), ("max-steps", max_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1; got {value}")
    if fps is not None and not 0 < fps <= 1000:
        raise ConfigError(f"--fps must be above 0, and at most 1000; got {fps:g}")


def natural_fps(config: TrainConfig[Any], env: gym.Env[Any, Any]) -> float:
    """Steps a second at which the environment runs as fast as it is meant to."""
    if config.preprocessing == "atari":
        return _CONSOLE_FPS / config.atari.frame_skip
    fps = env.metadata.get("render_fps")
    return float(fps) if fps else _USUAL_FPS


def has_display() -> bool:
    """Whether a window can be opened; SDL's dummy driver opens one that nobody sees."""
    if sys.platform != "linux":
        return True
    names = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    return any(os.environ.get(name) for name in names)


def prefer_offscreen() -> None:
    """Let MuJoCo draw without a window where there is no display, unless told how."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def picture_of(env: gym.Env[Any, Any]) -> Array:
    """What the environment looks like now, as (height, width, 3) bytes."""
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
            f"{name} gives no pictures with render_mode 'rgb_array'; its metadata names {modes}"
        )
    return picture[..., :3]


def _opengl_hint(error: Exception) -> str:
    """What to set, where MuJoCo is who failed."""
    places = traceback.extract_tb(error.__traceback__)
    if not any("mujoco" in place.filename for place in places):
        return ""
    return (
        ": MuJoCo needs OpenGL. Without a display set MUJOCO_GL=egl (a GPU's driver, or Mesa:"
        " apt-get install libegl1) or MUJOCO_GL=osmesa (apt-get install libosmesa6); now it is"
        f" {os.environ.get('MUJOCO_GL') or 'unset'}"
    )
