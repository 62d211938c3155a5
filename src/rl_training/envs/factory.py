"""Environments from a config. With the adapter, the only place that knows wrappers and vectors."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from rl_training.envs import checks, spaces
from rl_training.envs.atari import (
    AtariGame,
    atari_kwargs,
    check_atari,
    silence_greeting,
)
from rl_training.envs.episodes import SeededEpisodes
from rl_training.envs.given import claim
from rl_training.envs.native_atari import NativeAtari
from rl_training.envs.sync import FastSyncVectorEnv
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import ConfigError, EnvironmentFailure, UserError, did_you_mean
from rl_training.plugins import import_named, named_class

if TYPE_CHECKING:
    from rl_training.config import AtariConfig, TrainConfig

EnvFn = Callable[[], gym.Env[Any, Any]]
Made = TypeVar("Made")


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
    atari: AtariConfig | None = None
    max_recorded_steps: int | None = None

    @staticmethod
    def from_config(config: TrainConfig[Any], env_fn: EnvFn | None = None) -> EnvRecipe:
        """Take the parts that concern environments."""
        wrappers = tuple((w.path, w.kwargs) for w in config.wrappers)
        for path, _ in wrappers:  # here, before worker processes are started for them
            named_class(path, gym.Wrapper, "wrappers")
        source = _find_spec(config.env_id) if env_fn is None else env_fn
        atari = config.atari if config.preprocessing == "atari" else None
        if atari is not None:
            if not isinstance(source, EnvSpec):
                raise ConfigError("preprocessing: atari goes with an env_id, not with 'env_fn'")
            check_atari(source, config.env_kwargs, native=config.vectorization == "native")
        limit = config.max_recorded_steps
        return EnvRecipe(source, config.env_kwargs, wrappers, config.seed, atari, limit)

    def make(self, index: int) -> gym.Env[Any, Any]:
        """Make environment number ``index``."""
        try:
            env = self._make_wrapped()
        except (EnvironmentFailure, UserError):
            raise
        except (Exception, SystemExit) as error:
            raise checks.failure(index, "failed in its constructor", error) from error
        episodes = SeededEpisodes(env, self.seed, index, self.max_recorded_steps)
        try:
            spaces.observed(env.observation_space)  # a vector could not even store some spaces
        except ConfigError:
            episodes.close()
            raise
        return episodes

    def _make_wrapped(self) -> gym.Env[Any, Any]:
        if isinstance(self.source, EnvSpec) and "game" in self.source.kwargs:
            silence_greeting()
        if not isinstance(self.source, EnvSpec):
            env = self.source()
            if not isinstance(env, gym.Env):
                raise ConfigError(
                    f"'env_fn' must return a gymnasium.Env; got {checks.described(env)}"
                )
            claim(env)
        elif self.atari is None:
            env = _gym_make(self.source, self.env_kwargs)
        else:
            kwargs = {**self.env_kwargs, **atari_kwargs(self.source, self.atari)}
            env = AtariGame(_gym_make(self.source, kwargs), self.atari)
        for path, kwargs in self.wrappers:
            env = _wrap(env, path, kwargs)
            # Who knows what it makes of the frames.
            env.metadata = {**env.metadata, "rl_training/frame_stack": 1}
        return env

    def make_native(self, count: int, first_index: int = 0) -> VectorEnv[Any, Any, Any]:
        """Make the environment's own vector."""
        if not isinstance(self.source, EnvSpec):
            raise ConfigError("'env_fn' makes single environments: use vectorization sync or async")
        if self.atari is not None:
            settings = (self.source, self.env_kwargs, count, self.atari, first_index)
            return _explained(self.source.id, lambda: NativeAtari(*settings))
        if "game" in self.source.kwargs:
            raise ConfigError(
                f"the native vector of {self.source.id} shows frames of its own making:"
                " it is there with preprocessing: atari"
            )
        return _native(self.source, self.env_kwargs, count)


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
    recipe = EnvRecipe.from_config(config, env_fn)
    if config.vectorization == "native":
        return recipe.make_native(count, first_index)
    makers: list[EnvFn] = [functools.partial(recipe.make, first_index + i) for i in range(count)]
    if config.vectorization == "async":
        vector = WorkerVectorEnv(makers, config.worker_timeout, config.seed)
        return cast("VectorEnv[Any, Any, Any]", vector)
    return FastSyncVectorEnv(makers)


def has_single_env(config: TrainConfig[Any]) -> bool:
    """Whether the environment can be made one at a time, not only as a native vector."""
    return _find_spec(config.env_id).entry_point is not None


def _native(spec: EnvSpec, kwargs: dict[str, Any], count: int) -> VectorEnv[Any, Any, Any]:
    if spec.vector_entry_point is None:
        raise ConfigError(
            f"{spec.id} has no native vector environment (vector_entry_point);"
            " use vectorization: sync or async"
        )
    return _explained(
        spec.id,
        lambda: gym.make_vec(
            spec, num_envs=count, vectorization_mode="vector_entry_point", **kwargs
        ),
    )


def _gym_make(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    # `SeededEpisodes` refuses a step before the first reset, without a wrapper in every step.
    plain = dataclasses.replace(spec, order_enforce=False)
    return _explained(spec.id, lambda: gym.make(plain, disable_env_checker=True, **kwargs))


def _find_spec(env_id: str) -> EnvSpec:
    module, _, name = env_id.rpartition(":")
    if module:
        import_named(module, "env_id")
    if name not in gym.registry and re.match(r"ALE/|\w+(NoFrameskip|Deterministic)-v[04]$", name):
        _register_atari(env_id)
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        hint = _nearest(name) or f" {_one_line(error)}"
        raise ConfigError(f"no environment {env_id!r}.{hint}") from None


def _register_atari(env_id: str) -> None:
    try:
        import ale_py
    except ImportError:
        raise ConfigError(_needs_extra(env_id, "atari")) from None
    gym.register_envs(ale_py)


def _nearest(name: str) -> str:
    hint = did_you_mean(name, gym.registry)
    return hint if "Did you mean" in hint else ""


def _explained(env_id: str, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except gym.error.DependencyNotInstalled as error:
        extra = _extra_for(str(error))
        raise ConfigError(
            _needs_extra(env_id, extra) if extra else f"{env_id}: {_one_line(error)}"
        ) from None
    except (gym.error.Error, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"cannot make {env_id} with env_kwargs: {_one_line(error)}") from error


def _extra_for(message: str) -> str | None:
    for extra in ("box2d", "mujoco", "atari"):
        if re.search(extra, message, re.IGNORECASE):
            return extra
    return None


def _needs_extra(env_id: str, extra: str) -> str:
    return f"{env_id} needs an extra: pip install 'rl_training[{extra}]'"


def _one_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))
    return text or checks.summary(error)


def _wrap(env: gym.Env[Any, Any], path: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    wrapper = named_class(path, gym.Wrapper, "wrappers")
    try:
        return cast("gym.Env[Any, Any]", wrapper(env, **kwargs))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"'wrappers': {path} refuses {kwargs}: {_one_line(error)}") from error
