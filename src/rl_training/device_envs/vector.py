"""A device environment as a Gymnasium vector, whose arrays are on the host."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.device_envs.protocol import DeviceEnv
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Array, ArraySpec, ObsSpec


class DeviceVector(VectorEnv[Any, Any, Any]):
    """Copies every step to the host: for evaluation, and for learners that need it there.

    ``vector_fn=lambda num_envs: DeviceVector(CartPole(num_envs))`` trains any algorithm. Where the
    environment returns no final observations, ``without_finals`` shows those of the reset instead,
    which is good for evaluation alone.
    """

    def __init__(self, env: DeviceEnv, *, without_finals: bool = False) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.single_observation_space = _obs_space(env.obs_spec)
        self.single_action_space = _action_space(env.action_spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.restorable = hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        """Whether `get_state` and `set_state` work."""
        self._without_finals = without_finals
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP,
            "rl_training/name": getattr(env, "name", type(env).__name__),
            "rl_training/has_time_limit": hasattr(env, "max_episode_steps"),
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments."""
        del options
        return tree_map(_on_host, self.env.reset(0 if seed is None else seed)), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments; those whose episode ends are reset."""
        step = self.env.step(torch.as_tensor(np.asarray(actions)).to(self.env.device))
        terminated, truncated = _on_host(step.terminated), _on_host(step.truncated)
        obs: Any = tree_map(_on_host, step.obs)
        info: dict[str, Any] = {}
        done = terminated | truncated
        if done.any():
            final: Any = obs if self._without_finals else None
            if step.final_obs is not None:
                final = tree_map(_on_host, step.final_obs)
            info = {} if final is None else {"final_obs": final, "_final_obs": done}
        return obs, _on_host(step.reward), terminated, truncated, info

    def get_state(self) -> Any:
        """Return the state of the environments as arrays."""
        return _converted(self.env.state_dict(), Tensor, _on_host)  # type: ignore[attr-defined]

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        tensors = _converted(state, np.ndarray, torch.from_numpy)
        self.env.load_state_dict(tensors)  # type: ignore[attr-defined]

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        del kwargs
        if (close := getattr(self.env, "close", None)) is not None:
            close()


def _on_host(tensor: Tensor) -> Array:
    array: Array = tensor.cpu().numpy()
    return array


def _converted(value: Any, kind: type[Any], convert: Any) -> Any:
    if isinstance(value, dict):
        return {key: _converted(item, kind, convert) for key, item in value.items()}
    if isinstance(value, list):
        return [_converted(item, kind, convert) for item in value]
    return convert(value) if isinstance(value, kind) else value


def _obs_space(spec: ObsSpec) -> gym.Space[Any]:
    if not spec.is_dict:
        return _array_space(spec.leaves[""])
    return gym.spaces.Dict({name: _array_space(leaf) for name, leaf in spec.leaves.items()})


def _array_space(leaf: ArraySpec) -> gym.Space[Any]:
    if leaf.dtype == "uint8":
        return gym.spaces.Box(0, 255, leaf.shape, np.uint8)
    if leaf.dtype == "bool":
        return gym.spaces.MultiBinary(leaf.shape)
    return gym.spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)


def _action_space(spec: ActionSpec) -> gym.Space[Any]:
    if spec.kind == "box":
        low = np.asarray(spec.low, spec.dtype).reshape(spec.shape)
        high = np.asarray(spec.high, spec.dtype).reshape(spec.shape)
        return gym.spaces.Box(low, high, dtype=np.dtype(spec.dtype).type)
    if spec.kind == "discrete":
        return gym.spaces.Discrete(spec.nvec[0], start=spec.start[0])
    raise ConfigError(f"{spec.described} actions are not supported by DeviceVector")
