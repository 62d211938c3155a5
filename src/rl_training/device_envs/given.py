"""Functions of the user's that make environments: ``env_fn``, ``vector_fn``, ``device_env_fn``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from rl_training.device_envs.protocol import DeviceEnv
from rl_training.device_envs.table import DeviceEnvFn
from rl_training.device_envs.vector import DeviceVector
from rl_training.envs import checks
from rl_training.envs.given_vector import GivenVector, SingleFn, VectorFn, with_vector_fn
from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

_METHODS = ("num_envs", "device", "obs_spec", "action_spec", "reset", "step")


@dataclasses.dataclass(frozen=True)
class GivenDevice(GivenVector):
    """Takes the place of an ``env_fn``: makes environments on a device, and vectors of them."""

    device_env_fn: DeviceEnvFn = dataclasses.field(kw_only=True)

    def make_on(self, device: torch.device, count: int) -> DeviceEnv:
        """Return ``count`` environments on a device."""
        env = self.device_env_fn(count, device)
        if missing := [name for name in _METHODS if not hasattr(env, name)]:
            raise ConfigError(
                "'device_env_fn' must return a rl_training.device_envs.DeviceEnv; got"
                f" {checks.described(env)}, which has no {', '.join(missing)}"
            )
        if env.num_envs != count:
            raise ConfigError(
                f"'device_env_fn' was called with {count} and returned {env.num_envs} environments"
            )
        made: DeviceEnv = env
        return made

    def make(self, config: TrainConfig[Any], count: int) -> DeviceVector:
        """Return a vector to evaluate on, whose arrays are on the host."""
        accelerated = config.device in ("auto", "cuda") and torch.cuda.is_available()
        env = self.make_on(torch.device("cuda" if accelerated else "cpu"), count)
        return DeviceVector(env, without_finals=True)


def made_by(
    env_fn: SingleFn | None, vector_fn: VectorFn | None, device_env_fn: DeviceEnvFn | None
) -> SingleFn | None:
    """Return what makes the environments of a run, from the functions that were given."""
    if device_env_fn is None:
        return with_vector_fn(env_fn, vector_fn)
    if vector_fn is not None:
        raise ConfigError("'vector_fn' and 'device_env_fn' were given: give one of them")
    if not callable(device_env_fn):
        raise ConfigError(
            "'device_env_fn' must be a function that takes the number of environments and the"
            f" device; got {checks.described(device_env_fn)}"
        )
    return GivenDevice(_no_vector, env_fn, device_env_fn=device_env_fn)


def _no_vector(count: int) -> Any:
    raise NotImplementedError(count)
