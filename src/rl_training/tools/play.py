"""``rl-training play``: show an environment, played by a policy, at random or by keyboard."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from rl_training.errors import ConfigError, UserError
from rl_training.seeding import stream_seed
from rl_training.terminal import say, show
from rl_training.trust import trust_from_flag

if TYPE_CHECKING:
    from rl_training.config import TrainConfig


_WINDOW = 480
"""Minimum width in pixels of the window of a game played by keyboard."""


@dataclasses.dataclass(frozen=True)
class PlayArgs:
    """Show an environment on the screen: random actions, a trained policy, or the keyboard."""

    env_id: tyro.conf.Positional[str | None] = None
    """Gymnasium id, or 'my_package:MyEnv-v0'; not together with --checkpoint."""
    _: dataclasses.KW_ONLY
    checkpoint: Path | None = None
    """A checkpoint file, or a run folder (uses its last checkpoint), whose policy plays."""
    keyboard: bool = False
    """Play by keyboard, if the environment defines keys (Atari does)."""
    num_episodes: int = 1
    """Number of episodes to play."""
    seed: int | None = None
    """Seed of the episodes; unset: 1, or derived from the run's seed."""
    deterministic: bool | None = None
    """Take the most likely action; --no-deterministic: sample one. Unset: the run's own setting
    (eval_deterministic)."""
    max_steps: int | None = None
    """Maximum number of steps per episode; unset: no limit."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Modules that may be imported if the checkpoint names them; without a value: all."""


def main(args: list[str]) -> int:
    """Entry point."""
    from rl_training._internal.flags import parse_flags

    options: PlayArgs = parse_flags(PlayArgs, args, "rl-training play")
    if (options.env_id is None) == (options.checkpoint is None):
        raise ConfigError("play needs either the id of an environment or --checkpoint PATH")
    if options.keyboard and options.checkpoint is not None:
        raise ConfigError("--keyboard needs the id of an environment instead of --checkpoint")
    from rl_training.tools import episodes

    episodes.check_counts(options.num_episodes, options.max_steps, None)
    if not episodes.has_display():
        raise UserError(
            "there is no display to open a window on (DISPLAY and WAYLAND_DISPLAY are unset);"
            " rl-training record --checkpoint PATH writes a video instead"
        )
    try:
        if options.keyboard:
            _by_hand(options)
        else:
            _watch(options)
    except KeyboardInterrupt:
        say("stopped")
    return 0


def _watch(options: PlayArgs) -> None:
    from rl_training.tools import episodes

    player: episodes.Player
    if options.checkpoint is not None:
        policy, _ = episodes.load_player(
            options.checkpoint, options.device, trust_from_flag(options.trust_modules)
        )
        given = policy.config.seed if options.seed is None else options.seed
        seed = stream_seed(given, "evaluation")
        env: Any = episodes.evaluation_envs(policy.config, 1, "human")[0]
        env.reseed(seed)
        player = episodes.PolicyPlayer(policy, deterministic=options.deterministic, seed=seed)
    else:
        config = _config(options, "human")
        env = _make(config)
        player = episodes.RandomPlayer(env.action_space, config.seed)
    with contextlib.closing(env):
        if env.render_mode != "human":
            raise UserError(f"{_name(env)} has no render_mode 'human'")
        for moment in episodes.played(
            env, player, options.num_episodes, max_steps=options.max_steps
        ):
            if moment.last:
                show(moment.result())
            if _window_closed():
                break


def _by_hand(options: PlayArgs) -> None:
    try:
        import pygame
        from gymnasium.utils.play import play
    except ImportError:
        raise UserError("--keyboard needs pygame: pip install 'rl_training[video]'") from None
    env = _make(_config(options, "rgb_array"))
    with contextlib.closing(env):
        if not env.has_wrapper_attr("get_keys_to_action"):
            raise UserError(
                f"{_name(env)} has no key bindings (get_keys_to_action): omit --keyboard for random"
                " actions"
            )
        keys = env.get_wrapper_attr("get_keys_to_action")()
        shown = (
            f"{'+'.join(_key(k) for k in combination)}: {a}" for combination, a in keys.items()
        )
        say(f"keys (Escape ends): {', '.join(shown)}")
        count = _Count(options)

        def after_step(*step: Any) -> None:
            if count.add(float(step[3]), over=bool(step[4] or step[5])):
                pygame.event.post(pygame.event.Event(pygame.QUIT))

        env.reset()
        play(env, callback=after_step, zoom=max(1.0, _WINDOW / env.render().shape[1]))


class _Count:
    """Score of a game played by keyboard; counts the episodes."""

    def __init__(self, options: PlayArgs) -> None:
        self._options = options
        self._episode, self._step, self._return = 1, 0, 0.0

    def add(self, reward: float, *, over: bool) -> bool:
        self._step += 1
        self._return += reward
        if not over and self._step != self._options.max_steps:
            return False
        show(f"episode {self._episode}: return {self._return:.2f} in {self._step} steps\n")
        self._episode, self._step, self._return = self._episode + 1, 0, 0.0
        return self._episode > self._options.num_episodes


def _config(options: PlayArgs, mode: str) -> TrainConfig[Any]:
    from rl_training.config import TrainConfig

    seed = 1 if options.seed is None else options.seed
    return TrainConfig(env_id=str(options.env_id), seed=seed, env_kwargs={"render_mode": mode})


def _make(config: TrainConfig[Any]) -> Any:
    from rl_training.envs.factory import make_env

    return make_env(config)


def _key(key: str | int) -> str:
    text = chr(key) if isinstance(key, int) else key
    return "space" if text == " " else text


def _name(env: Any) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _window_closed() -> bool:
    """Whether the user closed a pygame window; environments themselves take no notice."""
    pygame = sys.modules.get("pygame")
    if pygame is None or not pygame.display.get_init():
        return False
    return bool(pygame.event.peek(pygame.QUIT))
