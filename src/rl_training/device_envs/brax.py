"""Environments of Brax, whose JAX arrays become tensors without a copy (dlpack)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rl_training.device_envs.protocol import DeviceStep
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, ArraySpec, ObsSpec


class BraxEnv:
    """``num_envs`` environments of Brax by name, such as "ant", as a `DeviceEnv`.

    Ended episodes begin anew in the first state of their environment, as in Brax's own training.
    ``settings`` are arguments of the environment, for example ``backend="spring"``. JAX takes most
    of a GPU's memory unless XLA_PYTHON_CLIENT_PREALLOCATE=false is set before it is imported.
    """

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        episode_length: int = 1000,
        action_repeat: int = 1,
        **settings: Any,
    ) -> None:
        try:
            import jax
            from brax import envs
            from brax.envs.wrappers import training
        except ImportError as error:
            raise ConfigError(
                f"Brax's {name} needs an extra: pip install 'rl_training[brax]' ({error})"
            ) from None

        class KeepsFinal(envs.Wrapper):  # type: ignore[misc]
            """Stores an observation before the reset replaces it."""

            def reset(self, rng: Any) -> Any:
                state = self.env.reset(rng)
                state.info["final_obs"] = state.obs
                return state

            def step(self, state: Any, action: Any) -> Any:
                state = self.env.step(state, action)
                state.info["final_obs"] = state.obs
                return state

        self._jax = jax
        self.name, self.num_envs, self.device = name, num_envs, torch.device(device)
        self.max_episode_steps = episode_length // action_repeat
        base = envs.get_environment(name, **settings)
        vector = training.VmapWrapper(base)
        limited = training.EpisodeWrapper(vector, episode_length, action_repeat)
        env = training.AutoResetWrapper(KeepsFinal(limited))
        self._reset, self._advance = jax.jit(env.reset), jax.jit(env.step)
        platform = "cpu" if self.device.type == "cpu" else "gpu"
        self._place = jax.devices(platform)[self.device.index or 0]
        self._state: Any = None
        if not isinstance(base.observation_size, int):
            raise ConfigError(f"Brax's {name} has several observations, which are not supported")
        limit = (1.0,) * base.action_size
        self.obs_spec = ObsSpec({"": ArraySpec((base.observation_size,), "float32")})
        self.action_spec = ActionSpec(
            "box", (base.action_size,), "float32", low=tuple(-one for one in limit), high=limit
        )

    def reset(self, seed: int) -> Tensor:
        """Begin the first episode of every environment."""
        key = self._jax.random.PRNGKey(seed % 2**32)
        keys = self._jax.random.split(self._jax.device_put(key, self._place), self.num_envs)
        self._state = self._reset(keys)
        return from_dlpack(self._state.obs)

    def step(self, action: Tensor) -> DeviceStep:
        """Step every environment."""
        given = self._jax.dlpack.from_dlpack(action.contiguous())
        self._state = state = self._advance(self._state, given)
        done, truncated = (from_dlpack(one) > 0.5 for one in (state.done, state.info["truncation"]))
        obs, final_obs, reward = (
            from_dlpack(one) for one in (state.obs, state.info["final_obs"], state.reward)
        )
        return DeviceStep(obs, final_obs, reward, done & ~truncated, truncated)

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays of the state."""
        leaves = self._jax.tree_util.tree_leaves(self._state)
        return {"leaves": [_as_bytes(np.asarray(leaf)) for leaf in leaves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same environment; it must have been reset before."""
        like, structure = self._jax.tree_util.tree_flatten(self._state)
        leaves = []
        for template, saved in zip(like, state["leaves"], strict=True):
            data = np.asarray(saved).tobytes()
            array = np.frombuffer(data, template.dtype).reshape(template.shape)
            leaves.append(self._jax.device_put(array, self._place))
        self._state = self._jax.tree_util.tree_unflatten(structure, leaves)


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of any dtype as bytes, which checkpoints can store."""
    return np.frombuffer(array.tobytes(), np.uint8).copy()
