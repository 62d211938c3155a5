"""`check_env`: whether an environment can be trained on, found by playing it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from rl_training.config import WrapperConfig
from rl_training.envs import checks, spaces
from rl_training.envs.action_masks import METHOD, masks_of, with_action_masks
from rl_training.envs.env_player import EnvPlayer
from rl_training.envs.env_report import EnvReport, Finding, Played, Severity, in_order
from rl_training.envs.factory import (
    ConstructorError,
    EnvFn,
    EnvRecipe,
    check_env_fn,
    check_env_spaces,
    missing_arguments,
)
from rl_training.envs.given import GivenEnvironment, release
from rl_training.envs.ids import find_spec
from rl_training.envs.team_env import PREFIX
from rl_training.envs.time_limits import has_time_limit, limit_advice
from rl_training.errors import ConfigError, EnvironmentFailure
from rl_training.registry import ALGORITHMS, check_spaces
from rl_training.types import ActionSpec, ObsSpec

_LARGE = 100.0
"""Observations beyond this are better normalised."""
_WITH_MASKS = "ppo"
"""An algorithm that supports action masks: its environments are the ones that are checked."""
_DEFAULT_STEPS = 1000
_SECONDS_AGAIN = 5.0
"""Time for which a slow environment is played again, to compare."""
_LONGEST_SPACE = 120
"""Most characters of a space in a report."""
_RETURN_WHAT_THE_SPACE_DESCRIBES = "Return what observation_space describes, or change the space."
_ADVICE = {
    "an observation that is finite": "Training stops where an observation is not finite.",
    "the observation ": _RETURN_WHAT_THE_SPACE_DESCRIBES,
    "observation[": _RETURN_WHAT_THE_SPACE_DESCRIBES,
    "the reward ": "Return a finite float.",
    "a reward ": "Return a finite float.",
    "action_masks() ": "Return the values of all actions; of a MultiDiscrete space, component by"
    " component.",
    "an action mask ": "Allow at least one action in every state that is not terminal.",
}
"""What to do about a wrong result whose message begins with these words."""


def check_env(
    env: str | gym.Env[Any, Any] | EnvFn | None = None,
    *,
    env_fn: EnvFn | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[str | Mapping[str, Any]] = (),
    seed: int = 1,
    steps: int = _DEFAULT_STEPS,
) -> EnvReport:
    """Play an environment with random actions and report what is wrong with it.

    Checked are spaces, what reset and step return, seeding, determinism, ends of episodes, action
    masks, render modes and speed, and which algorithms can be trained on it.

    Args:
        env: the id of a registered environment, an environment, or a function (or class) that
            makes one.
        env_fn: the function (or class), in place of ``env``.
        env_kwargs: keyword arguments for an environment given by its id.
        wrappers: wrappers around it, as in a config.
        seed: seed of the first episode and of the actions.
        steps: number of steps to play.

    Returns:
        The report: ``print`` shows it, ``report.ok`` is True if there are no errors.

    Raises:
        ConfigError: the id is not registered, or an argument is wrong.
    """
    if steps < 1:
        raise ConfigError(f"'steps' must be at least 1; got {steps}")
    if (env is None) == (env_fn is None):
        raise ConfigError("check_env takes either an environment (or its id) or env_fn")
    if env_fn is not None:
        check_env_fn(env_fn, env_kwargs or {})
    source = env_fn if env is None else env
    return _Check(_recipe(source, env_kwargs, wrappers), seed, steps).run()


def _recipe(
    env: str | gym.Env[Any, Any] | EnvFn | None,
    env_kwargs: Mapping[str, Any] | None,
    wrappers: Sequence[str | Mapping[str, Any]],
) -> EnvRecipe:
    if not isinstance(env, (str, gym.Env)) and not callable(env):
        raise ConfigError(
            "check_env takes the id of an environment, an environment or a function that makes"
            f" one; got {checks.described(env)}"
        )
    named = [WrapperConfig.from_plain(one, "wrappers") for one in wrappers]
    source: Any = env
    if isinstance(env, str):
        if env.startswith(f"{PREFIX}:"):
            raise ConfigError(
                f"check_env plays environments of one agent, and {env} has several; check it with"
                " pettingzoo.test.api_test or parallel_api_test"
            )
        source = find_spec(env)
    elif isinstance(env, gym.Env):
        source = GivenEnvironment(env)
    if not isinstance(env, str):
        check_env_fn(source, env_kwargs or {})
    around = tuple((one.path, one.kwargs) for one in named)
    return EnvRecipe(source, dict(env_kwargs or {}), around, seed=0, algo=_WITH_MASKS)


class _Stop(Exception):  # noqa: N818 - it ends the checks, and reports no error itself
    """An error was found after which nothing more can be checked."""


class _Check:
    """The checks of one environment, one after the other."""

    def __init__(self, recipe: EnvRecipe, seed: int, steps: int) -> None:
        self._recipe = recipe
        self._seed = seed
        self._steps = steps
        self._findings: list[Finding] = []
        self._name = recipe.name
        self._spaces = ("unknown", "unknown")
        self._specs: tuple[ObsSpec, ActionSpec] | None = None
        self._played = Played()

    def run(self) -> EnvReport:
        with contextlib.suppress(_Stop), self._made() as env:
            self._name = checks.name_of(env)
            self._check_spaces(env)
            masked = self._with_masks(env)
            self._specs = self._described(masked)
            self._check_episodes(masked, self._specs[0])
            self._check_render_modes(env)
            self._check_atari()
        able, refused = self._algorithms()
        if self._specs is not None and not able:
            reasons = "; ".join(refused.values())
            self._add("error", "algorithms", "an algorithm for these spaces", "none", reasons)
        return EnvReport(
            self._name, *self._spaces, in_order(self._findings), able, refused, self._played
        )

    def _add(
        self, severity: Severity, check: str, expected: str, found: str = "", advice: str = ""
    ) -> None:
        finding = Finding(severity, check, expected, found, advice)
        if not any((one.check, one.severity) == (check, severity) for one in self._findings):
            self._findings.append(finding)

    def _fail(self, check: str, message: str, advice: str = "") -> _Stop:
        """Add an error whose message is "X must be Y; got Z", and return what ends the checks."""
        expected, _, found = message.partition("; got ")
        self._add("error", check, expected.replace(" must ", " to ", 1), found, advice)
        return _Stop()

    def _fail_playing(self, player: EnvPlayer, error: checks.WrongResult) -> _Stop:
        check = f"step {player.steps}" if player.doing == "step" else player.doing
        advice = next((text for start, text in _ADVICE.items() if str(error).startswith(start)), "")
        return self._fail(check, str(error), advice)

    # -- making it ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _made(self) -> Iterator[gym.Env[Any, Any]]:
        """Make an environment; errors of its constructor are findings."""
        try:
            env = self._recipe.make_plain(0)
        except (EnvironmentFailure, ConfigError) as error:
            cause = error.__cause__
            where = "" if cause is None else checks.users_place(cause)
            line = str(error).partition("\n")[0]
            # Wrong arguments, or a missing package: not the environment's fault.
            if isinstance(error, ConfigError) and not (where or _lacks_arguments(error)):
                raise
            placed = f"{line} ({where})" if where and where not in line else line
            arguments = "" if isinstance(error, ConfigError) else missing_arguments(cause, "=...")
            call = f"check_env(lambda: {self._name}({arguments}))"
            advice = f"Pass a function that passes them, as in {call}." if arguments else ""
            self._add("error", "constructor", placed, advice=advice)
            raise _Stop from None
        try:
            yield env
        finally:
            release(env)
            with contextlib.suppress(Exception):
                env.close()

    # -- spaces ------------------------------------------------------------------------------------

    def _check_spaces(self, env: gym.Env[Any, Any]) -> None:
        found = (getattr(env, name, "none") for name in ("observation_space", "action_space"))
        self._spaces = (_in_words(next(found)), _in_words(next(found)))
        try:
            check_env_spaces(env)
        except ConfigError as error:
            raise self._space_error(error) from None

    def _space_error(self, error: ConfigError) -> _Stop:
        self._add("error", "spaces", str(error))
        return _Stop()

    def _with_masks(self, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        try:
            masked = with_action_masks(spaces.with_rows_of_actions(env), _WITH_MASKS)
        except ConfigError as error:
            self._add("error", "action masks", str(error))
            raise _Stop from None
        if masks_of(env):
            self._add(
                "note",
                "action masks",
                f"the method {METHOD}() is used: only actions that it allows are chosen",
            )
        return masked

    def _described(self, env: gym.Env[Any, Any]) -> tuple[ObsSpec, ActionSpec]:
        try:
            action = spaces.action_spec(env.action_space)
            obs = spaces.obs_spec(env.observation_space, action)
        except ConfigError as error:
            raise self._space_error(error) from None
        for name, leaf in obs.encoded.items():
            if leaf.is_image and min(leaf.shape[1:]) < spaces.SMALLEST_IMAGE:
                size = " x ".join(map(str, leaf.shape[1:]))
                self._add(
                    "error",
                    "image size",
                    f"images of at least {spaces.SMALLEST_IMAGE} x {spaces.SMALLEST_IMAGE}",
                    f"{size}{f' in {name!r}' if name else ''}",
                    "Flatten it with wrappers: ['gymnasium.wrappers:FlattenObservation'], or give"
                    " the algorithm an encoder of your own.",
                )
        if action.described == "unbounded Box":
            self._add(
                "note",
                "action bounds",
                "finite bounds, which SAC and TD3 need",
                f"{env.action_space}",
                "Set low and high of the action space, or use an algorithm listed below.",
            )
        return obs, action

    # -- episodes ----------------------------------------------------------------------------------

    def _check_episodes(self, env: gym.Env[Any, Any], spec: ObsSpec) -> None:
        player = EnvPlayer(env, spec, self._seed, self._add)
        self._check_seeding(player)
        try:
            first = player.play(self._steps, announce=True)
        except checks.WrongResult as error:
            raise self._fail_playing(player, error) from None
        self._played = player.played
        self._check_ends(env, player)
        self._check_learning_signal(player)
        self._check_determinism(env, spec, first)

    @contextlib.contextmanager
    def _another(self) -> Iterator[gym.Env[Any, Any]]:
        """Make a second environment, which must not be the first one again."""
        try:
            with self._made() as env:
                yield env
        except ConfigError as error:
            self._add("error", "second environment", str(error))
            raise _Stop from None

    def _can_make_another(self) -> bool:
        source = self._recipe.source
        return not isinstance(source, GivenEnvironment) or source.can_be_copied

    def _check_seeding(self, player: EnvPlayer) -> None:
        try:
            seen = [player.digest(player.reset(self._seed)) for _ in range(2)]
        except checks.WrongResult as error:
            raise self._fail_playing(player, error) from None
        if seen[0] != seen[1]:
            self._add(
                "warning",
                "seeding",
                "equal observations after two resets with one seed",
                "different ones",
                "Call super().reset(seed=seed) and draw random numbers from self.np_random: else"
                " runs cannot be repeated, and a resumed run continues with other episodes.",
            )

    def _check_determinism(
        self, env: gym.Env[Any, Any], spec: ObsSpec, first: Sequence[bytes]
    ) -> None:
        """Play the same seed and actions again, on another instance where one can be made."""
        if any(one.check == "seeding" for one in self._findings):
            return
        with contextlib.ExitStack() as stack:
            other, where = env, "of the same environment"
            if self._can_make_another():
                other = self._with_masks(stack.enter_context(self._another()))
                where = "of two environments"
            player = EnvPlayer(other, spec, self._seed, self._add)
            try:
                second = player.play(len(first) - 1, _SECONDS_AGAIN)
            except checks.WrongResult as error:
                raise self._fail("determinism", f"two equal episodes; got {error}") from None
        differs = [t for t, (one, two) in enumerate(zip(first, second, strict=False)) if one != two]
        if differs:
            self._add(
                "warning",
                "determinism",
                f"equal steps {where} with the same seed and actions",
                f"a difference at step {differs[0]}",
                "Draw all random numbers from self.np_random and keep no state across resets: else"
                " runs cannot be repeated, and a resume is approximate.",
            )

    def _check_ends(self, env: gym.Env[Any, Any], player: EnvPlayer) -> None:
        played = player.played
        if not played.lengths and not has_time_limit(env):
            limit = limit_advice(registered=isinstance(self._recipe.source, EnvSpec))
            self._add(
                "warning",
                "end of episodes",
                "an end, or a time limit",
                f"no end within {played.steps:,} steps",
                f"Limit episodes with {limit}. Without an end no returns are reported, and"
                " evaluation stops each episode at a limit of its own.",
            )
        same = len(played.lengths) >= 3 and len({*played.lengths}) == 1 and played.lengths[0] >= 10
        if same and not player.truncations:
            self._add(
                "warning",
                "truncation",
                "truncated=True where only time ran out",
                f"terminated=True after exactly {played.lengths[0]} steps in every episode",
                "If that is a time limit, return terminated=False, truncated=True: a terminated"
                " episode has no value after its end.",
            )

    def _check_learning_signal(self, player: EnvPlayer) -> None:
        if not player.has_reward:
            self._add(
                "note",
                "reward",
                "rewards other than 0",
                f"0 in all {player.played.steps:,} random steps",
                "Rewards this sparse are hard to learn from; is the reward right?",
            )
        if player.largest > _LARGE:
            self._add(
                "note",
                "scale",
                "observations near the range -1 to 1",
                f"values up to {player.largest:.4g}",
                "Set normalize_obs: true.",
            )

    # -- the rest ----------------------------------------------------------------------------------

    def _check_render_modes(self, env: gym.Env[Any, Any]) -> None:
        modes = env.metadata.get("render_modes", [])
        if "rgb_array" not in modes:
            self._add(
                "note",
                "render modes",
                "'rgb_array' in metadata['render_modes'], which videos need",
                f"{list(modes)}",
                "Without it, rl-training record does not work; training does.",
            )

    def _check_atari(self) -> None:
        source = self._recipe.source
        if isinstance(source, EnvSpec) and "game" in source.kwargs:
            self._add(
                "note", "Atari", "set preprocessing: atari for the standard frames and rewards"
            )

    def _algorithms(self) -> tuple[tuple[str, ...], dict[str, str]]:
        able: list[str] = []
        refused: dict[str, str] = {}
        if self._specs is None:
            return (), {}
        for name in ALGORITHMS.names():
            try:
                if ALGORITHMS[name].offline or ALGORITHMS[name].multi_agent:
                    continue  # it learns from a dataset, or trains several agents
                check_spaces(name, *self._specs)
                able.append(name)
            except ConfigError as error:
                refused[name] = str(error).partition("; ")[0]
        return tuple(able), refused


def _lacks_arguments(error: ConfigError) -> bool:
    """Whether a constructor raised an error for arguments that it requires."""
    return isinstance(error, ConstructorError) and bool(missing_arguments(error.__cause__, ""))


def _in_words(space: Any) -> str:
    """A space as Gymnasium writes it, or without the bounds of each number where that is long."""
    text = " ".join(str(space).split())
    if len(text) <= _LONGEST_SPACE or not isinstance(space, gym.spaces.Box):
        return text
    return f"Box({space.low.min()} to {space.high.max()}, {space.shape}, {space.dtype})"
