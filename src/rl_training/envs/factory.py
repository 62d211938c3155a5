"""Environments from a config. With the adapter, the only place that knows wrappers and vectors."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rl_training._lazy import resolve
from rl_training.envs.episodes import SeededEpisodes
from rl_training.envs.sync import FastSyncVectorEnv
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

EnvFn = Callable[[], gym.Env[Any, Any]]
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class EnvRecipe:
    """What a worker needs to make an environment: no config class, so no torch."""

    env_id: str
    env_kwargs: dict[str, Any]
    wrappers: tuple[tuple[str, dict[str, Any]], ...]
    seed: int
    env_fn: EnvFn | None = None

    @staticmethod
    def from_config(config: TrainConfig[Any], env_fn: EnvFn | None = None) -> EnvRecipe:
        """Take the parts that concern environments."""
        wrappers = tuple((w.path, w.kwargs) for w in config.wrappers)
        return EnvRecipe(config.env_id, config.env_kwargs, wrappers, config.seed, env_fn)

    def make(self, index: int) -> gym.Env[Any, Any]:
        """Make environment number ``index``."""
        env = self.env_fn() if self.env_fn is not None else _gym_make(self.env_id, self.env_kwargs)
        for path, kwargs in self.wrappers:
            env = _wrapper_class(path)(env, **kwargs)
        return SeededEpisodes(env, self.seed, index)


def make_env(config: TrainConfig[Any], env_index: int = 0) -> gym.Env[Any, Any]:
    """One environment: ``gymnasium.make``, the config's wrappers, seeded and counted episodes."""
    return EnvRecipe.from_config(config).make(env_index)


def make_vector_env(
    config: TrainConfig[Any], num_envs: int | None = None, *, env_fn: EnvFn | None = None
) -> VectorEnv[Any, Any, Any]:
    """The config's vector environment; ``env_fn`` makes an unregistered environment instead."""
    count = config.num_envs if num_envs is None else num_envs
    if config.vectorization == "native":
        if env_fn is not None:
            raise ConfigError("'env_fn' makes single environments: use vectorization sync or async")
        return _native(config.env_id, config.env_kwargs, count)
    recipe = EnvRecipe.from_config(config, env_fn)
    makers: list[EnvFn] = [functools.partial(recipe.make, i) for i in range(count)]
    if config.vectorization == "async":
        # Errors of the environment's own making are clearer from here than from a worker.
        recipe.make(0).close()
        return cast("VectorEnv[Any, Any, Any]", WorkerVectorEnv(makers, config.worker_timeout))
    return FastSyncVectorEnv(makers)


def _native(env_id: str, kwargs: dict[str, Any], count: int) -> VectorEnv[Any, Any, Any]:
    spec = _find_spec(env_id)
    if spec.vector_entry_point is None:
        raise ConfigError(
            f"{env_id} has no native vector environment (vector_entry_point);"
            " use vectorization: sync or async"
        )
    return _explained(
        env_id,
        lambda: gym.make_vec(
            spec, num_envs=count, vectorization_mode="vector_entry_point", **kwargs
        ),
    )


def _gym_make(env_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    spec = _find_spec(env_id)
    return _explained(env_id, lambda: gym.make(spec, disable_env_checker=True, **kwargs))


def _find_spec(env_id: str) -> gym.envs.registration.EnvSpec:
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"env_id {env_id!r}: cannot import {module!r} ({error})") from None
    if name not in gym.registry and name.startswith("ALE/"):
        _register_atari(env_id)
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        raise ConfigError(
            f"no environment {env_id!r} ({_one_line(error)}).{_nearest(name)}"
        ) from None


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
    except (gym.error.Error, TypeError) as error:
        raise ConfigError(f"cannot make {env_id} with env_kwargs: {_one_line(error)}") from error


def _extra_for(message: str) -> str | None:
    for extra in ("box2d", "mujoco", "atari"):
        if re.search(extra, message, re.IGNORECASE):
            return extra
    return None


def _needs_extra(env_id: str, extra: str) -> str:
    return f"{env_id} needs an extra: pip install 'rl_training[{extra}]'"


def _one_line(error: Exception) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))


def _wrapper_class(path: str) -> Callable[..., gym.Env[Any, Any]]:
    try:
        return cast("Callable[..., gym.Env[Any, Any]]", resolve(path))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"'wrappers': cannot find {path!r} ({error})") from None
