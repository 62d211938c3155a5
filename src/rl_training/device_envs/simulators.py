"""Adapters for simulators on the GPU that offer vectors of tensors: Isaac Lab and ManiSkill.

They follow the interfaces that these document; neither simulator was available to test with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_training.device_envs.protocol import DeviceStep
from rl_training.envs import spaces
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, ObsSpec

_SEEDS = 2**31


class IsaacLabEnv:
    """An environment of Isaac Lab (``ManagerBasedRLEnv`` or ``DirectRLEnv``) as a `DeviceEnv`.

    The policy observes the group ``policy``. Final observations are used where the environment
    computes them (``cfg.compute_final_obs = True``). Of a task with ``cfg.is_finite_horizon``, a
    time-out is a terminal state.
    """

    def __init__(self, env: Any, *, group: str = "policy") -> None:
        self._env = env
        base = env.unwrapped
        self.num_envs = int(base.num_envs)
        self.device = torch.device(base.device)
        self.action_spec = spaces.action_spec(base.single_action_space)
        self.obs_spec = _plain_spec(base.single_observation_space[group], self.action_spec)
        self.name = type(base).__name__
        self._group = group
        self._offers_finals = bool(getattr(base.cfg, "compute_final_obs", False))
        self._finite_horizon = bool(getattr(base.cfg, "is_finite_horizon", False))

    def reset(self, seed: int) -> Any:
        """Begin the first episode of every environment."""
        obs, _ = self._env.reset(seed=seed % _SEEDS)
        return self._observed(obs)

    def step(self, action: Tensor) -> DeviceStep:
        """Step every environment."""
        obs, reward, terminated, timed_out, extras = self._env.step(action)
        # A step in which no episode ended leaves it out, or leaves that of an earlier step.
        final_obs, ended = None, terminated | timed_out
        if self._offers_finals:
            final_obs = self._observed(obs)
            if (given := extras.get("final_obs")) is not None:
                final_obs = _where(ended, self._observed(_batched(given, self.name)), final_obs)
        if self._finite_horizon:
            terminated, timed_out = ended, torch.zeros_like(timed_out)
        return DeviceStep(self._observed(obs), final_obs, reward, terminated, timed_out)

    def _observed(self, obs: Any) -> Any:
        return _stored(obs[self._group], self.obs_spec)

    def close(self) -> None:
        """Close the simulation."""
        self._env.close()


class ManiSkillEnv:
    """A ``ManiSkillVectorEnv`` of ManiSkill (with ``auto_reset=True``) as a `DeviceEnv`."""

    def __init__(self, env: Any) -> None:
        if not env.auto_reset:
            raise ConfigError("ManiSkillEnv needs a ManiSkillVectorEnv with auto_reset=True")
        self._env = env
        self.num_envs = int(env.num_envs)
        self.device = torch.device(env.device)
        self.action_spec = spaces.action_spec(env.single_action_space)
        self.obs_spec = _plain_spec(env.single_observation_space, self.action_spec)
        self.name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__

    def reset(self, seed: int) -> Any:
        """Begin the first episode of every environment."""
        obs, _ = self._env.reset(seed=seed % _SEEDS)
        return _stored(obs, self.obs_spec)

    def step(self, action: Tensor) -> DeviceStep:
        """Step every environment."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        # There are final observations, of all environments, only where an episode ended.
        final = info.get("final_observation", obs)
        shown, final_obs = (_stored(one, self.obs_spec) for one in (obs, final))
        return DeviceStep(shown, final_obs, reward, terminated, truncated)

    def close(self) -> None:
        """Close the simulation."""
        self._env.close()


def _plain_spec(space: Any, action_spec: ActionSpec) -> ObsSpec:
    """Return the spec of observations that can be stored as they are."""
    spec = spaces.obs_spec(space, action_spec)
    for name, leaf in spec.leaves.items():
        if leaf.given or leaf.nvec:
            raise ConfigError(
                f"observations on the device must be vectors, or images with the channels first;"
                f" {name or 'this one'} is {space}"
            )
    return spec


def _stored(obs: Any, spec: ObsSpec) -> Any:
    """Return an observation as it is stored: nested ones as a flat dict."""
    return spec.parts(obs) if spec.is_dict else obs


def _batched(final_obs: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(final_obs, Mapping):
        raise ConfigError(
            f"{name}: extras['final_obs'] is a {type(final_obs).__name__}, as in older versions of"
            " Isaac Lab; set cfg.compute_final_obs to False, or use a newer version"
        )
    return final_obs


def _where(rows: Tensor, one: Any, other: Any) -> Any:
    """Return ``one`` in the rows where it is true, else ``other``."""
    if isinstance(one, dict):
        return {key: _where(rows, value, other[key]) for key, value in one.items()}
    return torch.where(rows.view(-1, *(1,) * (one.ndim - 1)), one, other)
