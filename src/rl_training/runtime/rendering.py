"""Environments that are drawn: on a screen, or as pictures without one."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np

from rl_training.envs import EnvFn, TeamAdapter
from rl_training.envs.given_vector import GivenVector
from rl_training.errors import UserError
from rl_training.eval import make_eval_env
from rl_training.types import ActionSpec, Array, ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

RenderMode = Literal["human", "rgb_array"]
MakeRenderingEnv = Callable[[], gym.Env[Any, Any]]
"""Makes an environment as in evaluation that renders pictures."""
_CONSOLE_FPS = 60
_USUAL_FPS = 30


def rendering_envs(
    config: TrainConfig[Any],
    count: int,
    mode: RenderMode,
    spaces: tuple[ObsSpec, ActionSpec],
    env_fn: EnvFn | None = None,
) -> list[gym.Env[Any, Any]]:
    """Return the environments that an evaluation of ``count`` episodes uses, one by one.

    They render with ``mode``, those of ``env_fn`` as the function makes them. Raises `ConfigError`
    where their spaces are not ``spaces``, those of the policy.
    """
    shown = config.with_overrides(
        env_kwargs={**config.env_kwargs, "render_mode": mode}, vectorization="sync", overlap=False
    )
    if isinstance(env_fn, GivenVector):
        env_fn = env_fn.single("to render")
    try:
        made = make_eval_env(shown, count, env_fn, spaces)
        vector: Any = made.teams.env if isinstance(made, TeamAdapter) else made.env
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        if hint := _opengl_hint(error):  # MuJoCo looks for OpenGL when it is imported
            raise UserError(f"{config.env_id} cannot be created{hint}") from error
        raise
    envs: list[gym.Env[Any, Any]] = list(vector.envs)
    return envs


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
