"""Gymnasium's `SyncVectorEnv` with a shorter step."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class FastSyncVectorEnv(SyncVectorEnv[Any, Any]):
    """SAME_STEP autoreset in a plain loop: same results as the base class, less work per step.

    Observations of a Box space are written straight into the batch; other spaces take the base
    class's way. The returned observation is the internal array (copy=False).
    """

    def __init__(self, env_fns: Any) -> None:
        super().__init__(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        self._plain = isinstance(self.single_observation_space, gym.spaces.Box) and isinstance(
            self.single_action_space, (gym.spaces.Box, gym.spaces.Discrete)
        )
        self._steppers = [env.step for env in self.envs]

    def step(self, actions: Any) -> Any:
        """Step every environment; reset those whose episode ended."""
        if not self._plain:
            return super().step(actions)
        infos: dict[str, Any] = {}
        batch: Any = self._observations
        rewards, terminations, truncations = self._rewards, self._terminations, self._truncations
        for i, (step, action) in enumerate(zip(self._steppers, actions, strict=True)):
            obs, rewards[i], terminated, truncated, info = step(action)
            terminations[i] = terminated
            truncations[i] = truncated
            if terminated or truncated:
                ended = {"final_obs": obs, "final_info": info}
                infos = self._add_info(infos, ended, i)
                obs, info = self.envs[i].reset()
            if info:
                infos = self._add_info(infos, info, i)
            batch[i] = obs
        return batch, rewards.copy(), terminations.copy(), truncations.copy(), infos
