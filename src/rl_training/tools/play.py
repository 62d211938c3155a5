"""``rl-training play``: show an environment, played by a policy, at random or by keyboard."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.errors import ConfigError, UserError
from rl_training.registry import find_entry
from rl_training.seeding import stream_seed
from rl_training.terminal import say, show
from rl_training.tools.sources import is_env_id
from rl_training.trust import trust_from_flag

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.policy import TrainedPolicy


_WINDOW = 480
"""Minimum width in pixels of the window of a game played by keyboard."""


@dataclasses.dataclass(frozen=True)
class PlayArgs:
    """Show an environment on the screen: random actions, a trained policy, or the keyboard."""

    target: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="ENV | RUN")] = None
    """Gymnasium id, also 'my_package:MyEnv-v0'; or the run folder or checkpoint whose policy
    plays."""
    _: dataclasses.KW_ONLY
    env_id: str | None = None
    """Gymnasium id of the environment to play; unset: the first argument, or that of the run. A
    run from a dataset alone may have none."""
    env_kwargs: dict[str, Any] | None = None
    """Keyword arguments of gymnasium.make (YAML: '{gravity: -5.0}'); unset: those of the run, or
    none with the id of an environment."""
    checkpoint: Path | None = None
    """The run folder or checkpoint, instead of the first argument; unset: none."""
    seat: str | None = None
    """The agent that you play in the terminal, in a game of tic-tac-toe or connect four against the
    policy of a run, or 'none' to watch its agents on the screen; unset: the first one."""
    keyboard: bool = False
    """Play by keyboard, if the environment defines keys (Atari does)."""
    num_episodes: int = 1
    """Number of episodes to play."""
    seed: int | None = None
    """Seed of the episodes; unset: 1, or derived from the run's seed."""
    deterministic: bool | None = None
    """Take the most likely action, or sample one (DQN, DRQN: random with probability
    exploration_final_eps; TD3: with exploration noise); unset: as the run's own evaluations
    (eval_deterministic)."""
    max_steps: int | None = None
    """Maximum number of steps per episode; unset: no limit."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command."""
    text = HelpText(
        "ENV | RUN [flags]",
        examples=(
            "rl-training play CartPole-v1  # random actions",
            "rl-training play runs/RUN  # a trained policy",
            "rl-training play runs/RUN --env-id Pendulum-v1  # in another environment",
            "rl-training play runs/RUN --seat player_1  # connect four, in the terminal",
            "rl-training play ALE/Pong-v5 --keyboard",
        ),
    )
    options = _with_target(parse_flags(PlayArgs, args, "rl-training play", text))
    if options.env_id is None and options.checkpoint is None:
        raise ConfigError("play needs the id of an environment, or a run folder or checkpoint")
    if options.keyboard and options.checkpoint is not None:
        raise ConfigError("--keyboard needs the id of an environment instead of a checkpoint")
    if options.seat is not None and options.checkpoint is None:
        raise ConfigError("--seat needs a run folder or checkpoint, whose policy plays the others")
    from rl_training.tools import episodes

    episodes.check_counts(options.num_episodes, options.max_steps, None)
    ended: list[_Ended] = []
    try:
        if options.keyboard:
            _by_hand(options, ended)
        else:
            _watch(options, ended)
    except KeyboardInterrupt:
        say("stopped")
    if options.json:
        results = [{"return": one.ret, "length": one.steps} for one in ended]
        show(json.dumps({"episodes": results}) + "\n")
    return 0


@dataclasses.dataclass(frozen=True)
class _Ended:
    """An episode that has ended."""

    ret: float
    steps: int


def _with_target(options: PlayArgs) -> PlayArgs:
    """Return the options with the first argument as ``env_id`` or as ``checkpoint``."""
    target = options.target
    if target is None:
        return options
    if options.env_id is not None and options.checkpoint is not None:
        raise ConfigError(f"unexpected argument {target!r}: --env-id and --checkpoint are given")
    if options.env_id is not None or (options.checkpoint is None and _names_run(target)):
        return dataclasses.replace(options, target=None, checkpoint=Path(target))
    return dataclasses.replace(options, target=None, env_id=target)


def _names_run(target: str) -> bool:
    path = Path(target)
    is_run = path.suffix == ".pt" or (path / "checkpoints").is_dir()
    return is_run or (path.is_dir() and not is_env_id(target))


def _require_env(env_id: str) -> None:
    """Raise ConfigError if there is no such environment."""
    from rl_training.envs.ids import find_spec

    try:
        find_spec(env_id)
    except ConfigError as error:
        if is_env_id(env_id):
            raise
        raise ConfigError(f"no run folder or checkpoint {env_id!r}, and {error}") from None


def _require_display() -> None:
    """Raise UserError if no window can be opened."""
    from rl_training.tools import episodes

    if not episodes.has_display():
        raise UserError(
            "there is no display to open a window on (DISPLAY and WAYLAND_DISPLAY are unset);"
            " rl-training record RUN writes a video instead"
        )


def _watch(options: PlayArgs, ended: list[_Ended]) -> None:
    from rl_training.tools import episodes

    player: episodes.Player
    if options.checkpoint is not None:
        policy, _ = episodes.load_player(
            options.checkpoint,
            options.device,
            trust_from_flag(options.trust_modules),
            env_id=options.env_id,
            env_kwargs=options.env_kwargs,
        )
        given = policy.config.seed if options.seed is None else options.seed
        if _in_terminal(options, policy, given, ended):
            return
        _require_display()
        seed = stream_seed(given, "evaluation")
        env: Any = episodes.evaluation_envs(policy, 1, "human")[0]
        env.reseed(seed)
        player = episodes.policy_player(policy, env, deterministic=options.deterministic, seed=seed)
    else:
        _require_env(str(options.env_id))
        _require_display()
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
                ended.append(_Ended(moment.ret, moment.step))
            if _window_closed():
                break


def _in_terminal(options: PlayArgs, policy: TrainedPolicy, seed: int, ended: list[_Ended]) -> bool:
    """Let a person play against the policy in the terminal; False where the game is not one."""
    if not find_entry(policy.config.algo).multi_agent:
        if options.seat is not None:
            raise ConfigError("--seat is for games of two agents; this run trained one agent")
        return False
    from rl_training.tools.terminal_games import InputEndedError, opened_game

    with opened_game(policy, options.seat) as game:
        if game is None:
            return False
        played = game.play(
            options.num_episodes,
            seed,
            deterministic=options.deterministic,
            max_steps=options.max_steps,
        )
        try:
            ended.extend(_Ended(one.ret, one.moves) for one in played)
        except InputEndedError:
            say("stopped: the input ended")
    return True


def _by_hand(options: PlayArgs, ended: list[_Ended]) -> None:
    _require_env(str(options.env_id))
    _require_display()
    try:
        import pygame
        from gymnasium.utils.play import play
    except ImportError:
        raise UserError(
            "--keyboard needs pygame, of the extra 'video'; in the clone: pip install '.[video]'"
        ) from None
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
        count = _Count(options, ended)

        def after_step(*step: Any) -> None:
            if count.add(float(step[3]), over=bool(step[4] or step[5])):
                pygame.event.post(pygame.event.Event(pygame.QUIT))

        env.reset()
        play(env, callback=after_step, zoom=max(1.0, _WINDOW / env.render().shape[1]))


class _Count:
    """Score of a game played by keyboard; counts the episodes."""

    def __init__(self, options: PlayArgs, ended: list[_Ended]) -> None:
        self._options, self._ended = options, ended
        self._episode, self._step, self._return = 1, 0, 0.0

    def add(self, reward: float, *, over: bool) -> bool:
        self._step += 1
        self._return += reward
        if not over and self._step != self._options.max_steps:
            return False
        from rl_training.tools import episodes

        show(f"{episodes.episode_line(self._episode, self._return, self._step)}\n")
        self._ended.append(_Ended(self._return, self._step))
        self._episode, self._step, self._return = self._episode + 1, 0, 0.0
        return self._episode > self._options.num_episodes


def _config(options: PlayArgs, mode: str) -> TrainConfig[Any]:
    from rl_training.config import TrainConfig

    seed = 1 if options.seed is None else options.seed
    kwargs = {**(options.env_kwargs or {}), "render_mode": mode}
    return TrainConfig(env_id=str(options.env_id), seed=seed, env_kwargs=kwargs)


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
