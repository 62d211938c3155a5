"""Environments from a config: single ones with their wrappers, and vectors of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from rl_training.envs import checks, spaces
from rl_training.envs.action_masks import METHOD, with_action_masks
from rl_training.envs.atari import (
    AtariGame,
    atari_kwargs,
    check_atari,
    silence_greeting,
)
from rl_training.envs.episodes import SeededEpisodes
from rl_training.envs.given import GivenEnvironment, claim, release
from rl_training.envs.given_vector import GivenVector
from rl_training.envs.ids import find_spec, needs_extra
from rl_training.envs.native_atari import NativeAtari
from rl_training.envs.sync import FastSyncVectorEnv
from rl_training.envs.team_env import TeamEnv, TeamOptions, is_pettingzoo, is_team_spec
from rl_training.envs.time_limits import limit_advice, limit_metadata
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import ConfigError, EnvironmentFailure, UserError
from rl_training.plugins import named_class
from rl_training.registry import ALGORITHMS, find_entry

if TYPE_CHECKING:
    from rl_training.config import AtariConfig, TrainConfig

EnvFn = Callable[[], gym.Env[Any, Any]]
Made = TypeVar("Made")
_GYMNASIUMS_ADDITION = r" was raised from the environment creator for .* with kwargs \(.*\)$"


class ConstructorError(ConfigError):
    """The constructor of a registered environment raised an error."""


@dataclasses.dataclass(frozen=True)
class EnvRecipe:
    """What a worker needs to make an environment, without torch.

    It holds the environment's registered spec, not its id: a script may have registered it for
    itself alone.
    """

    source: EnvSpec | EnvFn
    env_kwargs: dict[str, Any]
    wrappers: tuple[tuple[str, dict[str, Any]], ...]
    seed: int
    algo: str
    atari: AtariConfig | None = None
    max_recorded_steps: int | None = None
    team: TeamOptions | None = None
    """Of an algorithm for several agents: what their rows contain."""

    @staticmethod
    def from_config(config: TrainConfig[Any], env_fn: EnvFn | None = None) -> EnvRecipe:
        """Take the parts that concern environments."""
        wrappers = tuple((w.path, w.kwargs) for w in config.wrappers)
        for path, _ in wrappers:  # here, before worker processes are started for them
            named_class(path, gym.Wrapper, "wrappers")
        source = _registered(config) if env_fn is None else env_fn
        if env_fn is not None:
            check_env_fn(env_fn, config.env_kwargs)
        atari = config.atari if config.preprocessing == "atari" else None
        if atari is not None:
            if not isinstance(source, EnvSpec):
                raise ConfigError("preprocessing: atari goes with an env_id, not with 'env_fn'")
            check_atari(source, config.env_kwargs, native=config.vectorization == "native")
        team = None
        if find_entry(config.algo).multi_agent:
            knobs = config.algo_kwargs
            team = TeamOptions(
                agent_id=knobs.agent_id,
                state=knobs.uses_state,
                policies=knobs.policies,
                groups=knobs.groups,
                observes_waiting=bool(wrappers),
                alive=knobs.learns_jointly,
            )
        if isinstance(source, EnvSpec) and (is_team_spec(source) != (team is not None)):
            raise _wrong_number_of_agents(source.id, config.algo)
        limit = config.max_recorded_steps
        return EnvRecipe(
            source, config.env_kwargs, wrappers, config.seed, config.algo, atari, limit, team
        )

    def make(self, index: int) -> gym.Env[Any, Any]:
        """Make environment number ``index``, with seeded and recorded episodes."""
        env = self.make_plain(index)
        try:
            check_env_spaces(env)  # a vector could not even store some spaces
            masked = with_action_masks(spaces.with_rows_of_actions(env), self.algo)
            made = SeededEpisodes(masked, self.seed, index, self.max_recorded_steps)
        except ConfigError as error:
            release(env)
            with contextlib.suppress(Exception):
                env.close()
            raise ConfigError(f"{checks.name_of(env)}: {error}") from None
        limit = limit_metadata(env, registered=isinstance(self.source, EnvSpec))
        made.metadata = {**made.metadata, **limit}
        return made

    def make_plain(self, index: int) -> gym.Env[Any, Any]:
        """Make environment number ``index`` with the config's wrappers alone."""
        try:
            return self._make_wrapped()
        except (EnvironmentFailure, UserError):
            raise
        except (Exception, SystemExit) as error:
            doing = "failed in its constructor"
            raise checks.failure(index, doing, error, "", self.name) from error

    @property
    def name(self) -> str:
        """What the environment is called where none could be made."""
        if isinstance(self.source, EnvSpec):
            return self.source.id
        return checks.name_of_function(self.source)

    def _make_wrapped(self) -> gym.Env[Any, Any]:
        env: gym.Env[Any, Any]
        if isinstance(self.source, EnvSpec) and self.source.entry_point is None:
            raise ConfigError(
                f"{self.source.id} is a vector without single environments: use vectorization:"
                " native"
            )
        if isinstance(self.source, EnvSpec) and "game" in self.source.kwargs:
            silence_greeting()
        if not isinstance(self.source, EnvSpec):
            env = self._from_function()
            if not isinstance(env, gym.Env):
                raise ConfigError(
                    f"'env_fn' must return a gymnasium.Env; got {checks.described(env)}"
                )
            claim(env)
        elif self.team is not None:
            env = _gym_make(self.source, {**self.env_kwargs, "options": self.team})
        elif self.atari is None:
            env = _gym_make(self.source, self.env_kwargs)
        else:
            kwargs = {**self.env_kwargs, **atari_kwargs(self.source, self.atari)}
            env = AtariGame(_gym_make(self.source, kwargs), self.atari)
        made = env
        try:
            for path, kwargs in self.wrappers:
                env = _wrap(env, path, kwargs)
                # The wrapper may change what frames an observation contains.
                env.metadata = {**env.metadata, "rl_training/frame_stack": 1}
        except BaseException:
            release(made)
            raise
        return env

    def _from_function(self) -> Any:
        """Return what the user's function makes, a team's as one environment."""
        env: Any = self.source()  # type: ignore[operator]
        if is_pettingzoo(env) != (self.team is not None):
            raise _wrong_number_of_agents(checks.described(env), self.algo)
        return env if self.team is None else TeamEnv(env, self.team)

    def make_native(self, count: int, first_index: int = 0) -> VectorEnv[Any, Any, Any]:
        """Make the environment's own vector."""
        if not isinstance(self.source, EnvSpec):
            raise ConfigError("'env_fn' makes single environments: use vectorization sync or async")
        if self.atari is not None:
            settings = (self.source, self.env_kwargs, count, self.atari, first_index)
            return _explained(self.source.id, self.env_kwargs, lambda: NativeAtari(*settings))
        if "game" in self.source.kwargs:
            raise ConfigError(
                f"the native vector of {self.source.id} shows frames of its own making:"
                " it is there with preprocessing: atari"
            )
        return _native(self.source, self.env_kwargs, count)


def _wrong_number_of_agents(name: str, algo: str) -> ConfigError:
    """The error for an algorithm of one agent with several, or the other way round."""
    several = find_entry(algo).multi_agent
    names = [one for one, entry in ALGORITHMS.items() if entry.multi_agent != several]
    if several:
        return ConfigError(
            f"{algo} trains several agents, and {name} has one: give an id such as"
            " pettingzoo:mpe2/simple_spread_v3, or an env_fn that returns a PettingZoo environment;"
            f" or use {', '.join(names[:2])} or another algorithm for one agent"
        )
    return ConfigError(f"{algo} trains one agent, and {name} has several: use {' or '.join(names)}")


def check_env_fn(env_fn: Any, env_kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where ``env_fn`` cannot be called, or ``env_kwargs`` are set for it."""
    if isinstance(env_fn, gym.Env):
        raise ConfigError(
            "'env_fn' must be a function or class that makes environments; got an environment"
            f" ({checks.name_of(env_fn)}). Pass what makes it, as in env_fn=MyEnv or"
            " env_fn=lambda: MyEnv(size=8), or pass the environment as the first argument"
        )
    if not callable(env_fn):
        raise ConfigError(
            "'env_fn' must be a function or class that makes environments; got"
            f" {checks.described(env_fn)}"
        )
    if env_kwargs:
        raise _without_effect(env_kwargs, env_fn)


def _without_effect(env_kwargs: Mapping[str, Any], env_fn: Any) -> ConfigError:
    """The error for ``env_kwargs`` beside an environment that is not given by its id."""
    given_env = isinstance(env_fn, GivenEnvironment)
    limit = "max_episode_steps"
    given = ", ".join(f"{key}={value!r}" for key, value in env_kwargs.items() if key != limit)
    advice = []
    if limit in env_kwargs:
        advice.append(f"to limit episodes, set {limit_advice(registered=False)}")
    if given and given_env:
        advice.append("pass arguments where you make the environment")
    elif given:
        name = checks.name_of_function(env_fn)
        call = f"env_fn=lambda: {'MyEnv' if name == 'env_fn' else name}({given})"
        advice.append(f"pass arguments in the function, as in {call}")
    return ConfigError(
        f"'env_kwargs' have no effect on {'a given environment' if given_env else 'env_fn'}: they"
        f" are for an environment given by its id. Remove them; {', and '.join(advice)}"
    )


def _registered(config: TrainConfig[Any]) -> EnvSpec:
    if not config.env_id:
        raise ConfigError(
            "there is no environment to play: the policy was trained from a dataset alone. Name one"
            " with --env-id ENV, in Python with env_fn=MyEnv"
        )
    try:
        return find_spec(config.env_id)
    except ConfigError as error:
        if config.init_from is None:
            raise
        raise ConfigError(
            f"{error} If the policy of {config.init_from} was trained with env_fn, pass the"
            " function again, as in PPO.load(path, env_fn=MyEnv)."
        ) from None


def make_env(config: TrainConfig[Any], env_index: int = 0) -> gym.Env[Any, Any]:
    """One environment: ``gymnasium.make``, the config's wrappers, seeded and counted episodes."""
    return EnvRecipe.from_config(config).make(env_index)


def make_vector_env(
    config: TrainConfig[Any],
    num_envs: int | None = None,
    *,
    env_fn: EnvFn | None = None,
    first_index: int = 0,
) -> VectorEnv[Any, Any, Any]:
    """The config's vector environment; ``env_fn`` makes an unregistered environment instead."""
    count = config.num_envs if num_envs is None else num_envs
    if isinstance(env_fn, GivenVector):
        return _given_vector(config, env_fn, count)
    recipe = EnvRecipe.from_config(config, env_fn)
    if config.vectorization == "native":
        return recipe.make_native(count, first_index)
    makers: list[EnvFn] = [functools.partial(recipe.make, first_index + i) for i in range(count)]
    if config.vectorization == "async":
        vector = WorkerVectorEnv(makers, config.worker_timeout, config.seed)
        return cast("VectorEnv[Any, Any, Any]", vector)
    return FastSyncVectorEnv(makers)


def _given_vector(
    config: TrainConfig[Any], given: GivenVector, count: int
) -> VectorEnv[Any, Any, Any]:
    """Return a vector that the user's function makes."""
    if find_entry(config.algo).multi_agent:
        raise _wrong_number_of_agents("the vector of 'vector_fn'", config.algo)
    vector = given.make(config, count)
    for name in ("single_observation_space", "single_action_space"):
        if not isinstance(getattr(vector, name, None), gym.Space):
            vector.close()
            raise ConfigError(f"the vector that 'vector_fn' returned has no {name}")
    try:
        spaces.observed(vector.single_observation_space)
    except ConfigError:
        vector.close()
        raise
    return vector


def has_single_env(config: TrainConfig[Any]) -> bool:
    """Whether the environment can be made one at a time, not only as a native vector."""
    return find_spec(config.env_id).entry_point is not None


def _native(spec: EnvSpec, kwargs: dict[str, Any], count: int) -> VectorEnv[Any, Any, Any]:
    if spec.vector_entry_point is None:
        raise ConfigError(
            f"{spec.id} has no native vector environment (vector_entry_point);"
            " use vectorization: sync or async"
        )
    vector = _explained(
        spec.id,
        kwargs,
        lambda: gym.make_vec(
            spec, num_envs=count, vectorization_mode="vector_entry_point", **kwargs
        ),
    )
    if callable(getattr(vector.unwrapped, METHOD, None)):
        vector.close()
        raise ConfigError(
            f"{spec.id}: {METHOD}() of a native vector is not used; use vectorization: sync or"
            " async, or put the mask into the observation (a Dict with the key 'action_mask')"
        )
    return vector


def _gym_make(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    # `SeededEpisodes` refuses a step before the first reset, without a wrapper in every step.
    plain = dataclasses.replace(spec, order_enforce=False)
    return _explained(spec.id, kwargs, lambda: gym.make(plain, disable_env_checker=True, **kwargs))


def check_env_spaces(env: gym.Env[Any, Any]) -> None:
    """Raise `ConfigError` unless an environment has spaces, of kinds that can be stored."""
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gym.Space):
            found = (
                f"{checks.name_of(env)} has none"
                if space is None
                else f"it is {checks.described(space)}"
            )
            raise ConfigError(
                f"{name} must be a gymnasium space; {found}. Set self.{name} in the constructor,"
                " for example to gymnasium.spaces.Box(-1.0, 1.0, (3,))"
            )
    spaces.observed(env.observation_space)


def _explained(env_id: str, kwargs: dict[str, Any], make: Callable[[], Made]) -> Made:
    try:
        return make()
    except gym.error.DependencyNotInstalled as error:
        extra = _extra_for(str(error))
        raise ConfigError(
            needs_extra(env_id, extra) if extra else f"{env_id}: {_one_line(error)}"
        ) from None
    except (gym.error.Error, TypeError, ValueError, AssertionError) as error:
        given = f" with env_kwargs {kwargs}" if kwargs else ""
        names = missing_arguments(error, ": ...")
        command = f"(on the command line, --env-kwargs '{{{names}}}')"
        advice = f". Set env_kwargs: {{{names}}} {command}" if names else ""
        raise ConstructorError(f"cannot make {env_id}{given}: {_placed(error)}{advice}") from error


def missing_arguments(error: BaseException | None, end: str) -> str:
    """Return the arguments that a constructor requires and did not get, each with ``end``.

    It is empty if ``error`` has another reason.
    """
    if not isinstance(error, TypeError):
        return ""
    found = re.search(r"missing \d+ required .*arguments?: (.*)", _one_line(error))
    return ", ".join(f"{name}{end}" for name in re.findall(r"'(\w+)'", found[1] if found else ""))


def _extra_for(message: str) -> str | None:
    for extra in ("box2d", "mujoco", "atari"):
        if re.search(extra, message, re.IGNORECASE):
            return extra
    return None


def _one_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))
    return re.sub(_GYMNASIUMS_ADDITION, "", text) or checks.summary(error)


def _placed(error: Exception) -> str:
    """An exception in one line, with the place of the environment's own code that raised it."""
    text = _one_line(error)
    where = checks.users_place(error)
    return f"{text} ({where})" if where and where not in text else text


def _wrap(env: gym.Env[Any, Any], path: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    wrapper = named_class(path, gym.Wrapper, "wrappers")
    try:
        return cast("gym.Env[Any, Any]", wrapper(env, **kwargs))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"'wrappers': {path} refuses {kwargs}: {_one_line(error)}") from error
