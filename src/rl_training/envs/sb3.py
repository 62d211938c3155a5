"""A `VecEnv` of Stable-Baselines3 as a Gymnasium vector environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

_OF_STEPS = ("terminal_observation", "TimeLimit.truncated", "episode")
"""What a `VecEnv` adds to the info of a step."""


class SB3Vector(VectorEnv[Any, Any, Any]):
    """Steps a `VecEnv`: ``vector_fn=lambda num_envs: SB3Vector(make_vec_env(MyEnv, num_envs))``.

    A `VecEnv` resets within the step in which an episode ends (SAME_STEP); the final observation is
    in its info, and whether the episode was truncated.
    """

    def __init__(self, vec_env: Any) -> None:
        self.vec_env = vec_env
        self.num_envs = int(vec_env.num_envs)
        self.single_observation_space = vec_env.observation_space
        self.single_action_space = vec_env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP,
            "rl_training/name": type(vec_env.unwrapped).__name__,
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments; environment i is seeded with ``seed + i``."""
        del options
        if seed is not None:
            self.vec_env.seed(seed % 2**31)
        return self.vec_env.reset(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments; those whose episode ends are reset."""
        obs, rewards, dones, infos = self.vec_env.step(actions)
        done = np.asarray(dones, bool)
        truncated = np.zeros(self.num_envs, bool)
        merged: dict[str, Any] = {}
        for i, info in enumerate(infos):
            own = {key: value for key, value in info.items() if key not in _OF_STEPS}
            if done[i]:
                truncated[i] = bool(info.get("TimeLimit.truncated", False))
                own = {"final_obs": info["terminal_observation"], "final_info": own}
            if own:
                merged = self._add_info(merged, own, i)
        return obs, np.asarray(rewards), done & ~truncated, truncated, merged

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        del kwargs
        self.vec_env.close()
