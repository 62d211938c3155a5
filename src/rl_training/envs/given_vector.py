"""Vector environments that a function of the user's makes (``vector_fn``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rl_training.envs import checks
from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

VectorFn: TypeAlias = Callable[[int], VectorEnv[Any, Any, Any]]
"""Takes the number of environments and returns a new vector of so many."""
SingleFn: TypeAlias = Callable[[], gym.Env[Any, Any]]


@dataclasses.dataclass(frozen=True)
class GivenVector:
    """Takes the place of an ``env_fn``: makes vectors, and single environments where it can."""

    vector_fn: VectorFn
    env_fn: SingleFn | None = None
    """Makes single environments, which are evaluated on; without it vectors are."""

    @property
    def name(self) -> str:
        """What the environments are called before one was made."""
        return checks.name_of_function(self.vector_fn)

    def __call__(self) -> gym.Env[Any, Any]:
        """Return a single environment."""
        return self.single("here")()

    def single(self, purpose: str) -> SingleFn:
        """Return the function that makes single environments, which is needed for ``purpose``."""
        if self.env_fn is None:
            raise ConfigError(
                f"'vector_fn' makes vectors, and a single environment is needed {purpose}: pass"
                " env_fn=... beside it"
            )
        return self.env_fn

    def make(self, config: TrainConfig[Any], count: int) -> VectorEnv[Any, Any, Any]:
        """Return a new vector of ``count`` environments."""
        _check_settings(config)
        try:
            vector = self.vector_fn(count)
        except TypeError as error:
            if "argument" in str(error) and error.__traceback__ and not error.__traceback__.tb_next:
                raise ConfigError(
                    "'vector_fn' is called with the number of environments, as in"
                    f" vector_fn=lambda num_envs: ...; {error}"
                ) from error
            raise
        if not isinstance(vector, VectorEnv):
            raise ConfigError(
                "'vector_fn' must return a gymnasium.vector.VectorEnv; got"
                f" {checks.described(vector)}. rl_training.envs.sb3:SB3Vector wraps a VecEnv of"
                " Stable-Baselines3"
            )
        if vector.num_envs != count:
            vector.close()
            raise ConfigError(
                f"'vector_fn' was called with {count} and returned {vector.num_envs} environments:"
                " it must make as many as its argument says"
            )
        return vector


def _check_settings(config: TrainConfig[Any]) -> None:
    """Refuse settings of single environments."""
    for name, unused in (
        ("wrappers", not config.wrappers),
        ("env_kwargs", not config.env_kwargs),
        ("preprocessing", config.preprocessing == "none"),
        ("vectorization", config.vectorization == "sync"),
    ):
        if not unused:
            raise ConfigError(
                f"'{name}' has no effect on 'vector_fn', which makes the whole vector: leave it out"
                " and do the same in the function"
            )


def with_vector_fn(env_fn: SingleFn | None, vector_fn: VectorFn | None) -> SingleFn | None:
    """Return what makes the environments of a run, where either function or both were given."""
    if vector_fn is None:
        return env_fn
    if isinstance(vector_fn, VectorEnv) or not callable(vector_fn):
        raise ConfigError(
            "'vector_fn' must be a function that takes the number of environments and returns a"
            f" vector of them; got {checks.described(vector_fn)}. Write vector_fn=lambda num_envs:"
            " ..."
        )
    return GivenVector(vector_fn, env_fn)
