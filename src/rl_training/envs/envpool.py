"""EnvPool's vectors, which step environments in C++ threads (``env_id: envpool:CartPole-v1``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_training.errors import ConfigError

PREFIX = "envpool"
_SEEDS = 2**31
"""EnvPool takes seeds below this."""


class EnvPoolVector(VectorEnv[Any, Any, Any]):
    """A pool of one task, made anew for every seed: EnvPool takes a seed only when it is made.

    EnvPool resets an environment in the step after its episode ended (NEXT_STEP), so that final
    observations are those that it returns. It does not offer its state.
    """

    def __init__(
        self, task_id: str, num_envs: int, max_episode_steps: int | None = None, **kwargs: Any
    ) -> None:
        limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
        self._task_id, self._settings = task_id, {**kwargs, **limit, "num_envs": num_envs}
        self._pool: Any = _made(task_id, {**self._settings, "seed": 0})
        self._check_reset_mode()
        self.num_envs = num_envs
        self.single_observation_space = self._pool.single_observation_space
        self.single_action_space = self._pool.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {
            "autoreset_mode": AutoresetMode.NEXT_STEP,
            "rl_training/name": f"{PREFIX}:{task_id}",
            "rl_training/has_time_limit": "max_episode_steps" in self._pool.config,
        }

    def _check_reset_mode(self) -> None:
        if (mode := self._pool.metadata.get("autoreset_mode")) is not AutoresetMode.NEXT_STEP:
            self._pool.close()
            raise ConfigError(f"{PREFIX}:{self._task_id} has the autoreset mode {mode}")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments."""
        del options
        if seed is not None:
            self._pool.close()
            self._pool = _made(self._task_id, {**self._settings, "seed": seed % _SEEDS})
        obs, info = self._pool.reset()
        return obs, _of_rows(info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments; those whose episode ended are reset instead."""
        obs, reward, terminated, truncated, info = self._pool.step(np.asarray(actions))
        return obs, reward, terminated, truncated, _of_rows(info)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the pool."""
        del kwargs
        self._pool.close()


def envpool_spec(task_id: str) -> EnvSpec:
    """Return the spec of a task; it has a vector and no single environment."""
    entry = f"{__name__}:{EnvPoolVector.__name__}"
    return EnvSpec(f"{PREFIX}:{task_id}", vector_entry_point=entry, kwargs={"task_id": task_id})


def _of_rows(info: dict[str, Any]) -> dict[str, Any]:
    """Return an info without what describes the pool."""
    return {key: value for key, value in info.items() if key not in ("env_id", "players")}


def _made(task_id: str, settings: dict[str, Any]) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ConfigError(
            f"{PREFIX}:{task_id} needs an extra: pip install 'rl_training[envpool]' (on Python"
            f" 3.11 envpool==1.2.5) ({error})"
        ) from None
    if task_id not in envpool.list_all_envs():
        raise ConfigError(
            f"EnvPool has no task {task_id!r}; envpool.list_all_envs() returns all of them"
        )
    return envpool.make_gymnasium(task_id, **settings)
