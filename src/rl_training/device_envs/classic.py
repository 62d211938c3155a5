"""Gymnasium's classic control environments in torch, batched: the same dynamics step by step.

The formulas are those of ``gymnasium.envs.classic_control``, with their default settings unless an
argument of the same name is given; a test compares 10,000 random states of each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.device_envs.protocol import DeviceStep
from rl_training.device_envs.streams import EpisodeStreams
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, ArraySpec, ObsSpec


def _discrete(count: int) -> ActionSpec:
    return ActionSpec("discrete", (), "int64", nvec=(count,), start=(0,))


def _bounded(limit: float) -> ActionSpec:
    return ActionSpec("box", (1,), "float32", low=(-limit,), high=(limit,))


class ClassicControl(ABC):
    """Steps a batch, counts steps up to the time limit and resets within the step.

    The state is one tensor, (variables, environments), which every step changes in place.
    """

    capturable = True
    env_id: ClassVar[str]
    variables: ClassVar[int]
    """Numbers of one environment's state; as many are drawn for a new episode."""
    action_spec: ActionSpec
    obs_spec: ObsSpec

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        *,
        max_episode_steps: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if max_episode_steps < 1:
            raise ConfigError(f"'max_episode_steps' must be at least 1; got {max_episode_steps}")
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.max_episode_steps = max_episode_steps
        self.name = self.env_id
        self.state = torch.zeros((self.variables, num_envs), dtype=dtype, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int32, device=self.device)
        """Steps so far of each environment's episode."""
        self._streams = EpisodeStreams(num_envs, self.device)

    @abstractmethod
    def _initial(self, uniform: Tensor) -> Tensor:
        """Return states of new episodes from numbers in [0, 1), (variables, environments) both."""

    @abstractmethod
    def _advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next states, rewards, and whether episodes terminated."""

    def observed(self, state: Tensor) -> Tensor:
        """Return the observations of states, (environments, numbers), in the dtype of the state."""
        return state.T

    @torch.no_grad()
    def reset(self, seed: int) -> Tensor:
        """Begin the first episode of every environment."""
        self._streams.seed(seed)
        self.state.copy_(self._fresh())
        self.steps.zero_()
        return self.observed(self.state).to(torch.float32, copy=True)

    def _fresh(self) -> Tensor:
        return self._initial(self._streams.uniform(self.variables, self.state.dtype))

    @torch.no_grad()
    def step(self, action: Tensor) -> DeviceStep:
        """Step every environment; those whose episode ends are reset."""
        state, reward, terminated = self._advance(self.state, action)
        self.steps += 1
        truncated = self.steps >= self.max_episode_steps
        ended = terminated | truncated
        self._streams.advance(ended)
        self.state.copy_(torch.where(ended, self._fresh(), state))
        self.steps.masked_fill_(ended, 0)
        final_obs, obs = self.observed(state), self.observed(self.state)
        # A copy, where the dtype is that of the state already: the next step overwrites it.
        return DeviceStep(
            obs.to(torch.float32, copy=True),
            final_obs.to(torch.float32),
            reward.to(torch.float32),
            terminated,
            truncated,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that restores the environments."""
        return {"state": self.state, "steps": self.steps, "streams": self._streams.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.state.copy_(state["state"])
        self.steps.copy_(state["steps"])
        self._streams.load_state_dict(state["streams"])


class CartPole(ClassicControl):
    """CartPole-v1."""

    env_id = "CartPole-v1"
    variables = 4
    action_spec = _discrete(2)
    obs_spec = ObsSpec({"": ArraySpec((4,), "float32")})

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 500,
        sutton_barto_reward: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps, dtype=dtype)
        self._sutton_barto_reward = sutton_barto_reward

    def _initial(self, uniform: Tensor) -> Tensor:
        return uniform * 0.1 - 0.05

    def _advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, x_dot, theta, theta_dot = state.unbind(0)
        pole, total, tau = 0.1 * 0.5, 0.1 + 1.0, 0.02
        force = 20.0 * action.to(state.dtype) - 10.0
        cosine, sine = torch.cos(theta), torch.sin(theta)
        temp = (force + pole * theta_dot.square() * sine) / total
        theta_acc = (9.8 * sine - cosine * temp) / (
            0.5 * (4.0 / 3.0 - 0.1 * cosine.square() / total)
        )
        x_acc = temp - pole * theta_acc * cosine / total
        x = x + tau * x_dot
        theta = theta + tau * theta_dot
        following = torch.stack((x, x_dot + tau * x_acc, theta, theta_dot + tau * theta_acc))
        terminated = (x.abs() > 2.4) | (theta.abs() > 12 * 2 * math.pi / 360)
        if self._sutton_barto_reward:
            return following, -terminated.to(state.dtype), terminated
        return following, torch.ones_like(x), terminated


class Pendulum(ClassicControl):
    """Pendulum-v1."""

    env_id = "Pendulum-v1"
    variables = 2
    action_spec = _bounded(2.0)
    obs_spec = ObsSpec({"": ArraySpec((3,), "float32")})

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 200,
        g: float = 10.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps, dtype=dtype)
        self._g = g

    def _initial(self, uniform: Tensor) -> Tensor:
        angle, speed = (uniform * 2 - 1).unbind(0)
        return torch.stack((angle * math.pi, speed))

    def _advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(0)
        torque = action.squeeze(-1).to(state.dtype).clamp(-2.0, 2.0)
        # An angle that grows with every turn would lose its last digits in float32.
        angle = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = angle.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (3 * self._g / 2.0 * torch.sin(angle) + 3.0 * torque) * 0.05
        speed = speed.clamp(-8.0, 8.0)
        following = torch.stack((angle + speed * 0.05, speed))
        return following, -cost, torch.zeros_like(speed, dtype=torch.bool)

    def observed(self, state: Tensor) -> Tensor:
        """Return cosine and sine of the angle, and the speed."""
        angle, speed = state.unbind(0)
        return torch.stack((torch.cos(angle), torch.sin(angle), speed), dim=1)


class Acrobot(ClassicControl):
    """Acrobot-v1."""

    env_id = "Acrobot-v1"
    variables = 4
    action_spec = _discrete(3)
    obs_spec = ObsSpec({"": ArraySpec((6,), "float32")})

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 500,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps, dtype=dtype)

    def _initial(self, uniform: Tensor) -> Tensor:
        return uniform * 0.2 - 0.1

    def _advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # At high speeds a step of Runge-Kutta magnifies rounding, so that float32 is not enough.
        before = state.to(torch.float64)
        torque = action.to(torch.float64) - 1.0
        step = 0.2
        k1 = _acrobot_derivative(before, torque)
        k2 = _acrobot_derivative(before + step / 2 * k1, torque)
        k3 = _acrobot_derivative(before + step / 2 * k2, torque)
        k4 = _acrobot_derivative(before + step * k3, torque)
        after = before + step / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        first, second, speed1, speed2 = after.unbind(0)
        first, second = _wrapped(first), _wrapped(second)
        speed1 = speed1.clamp(-4 * math.pi, 4 * math.pi)
        speed2 = speed2.clamp(-9 * math.pi, 9 * math.pi)
        terminated = -torch.cos(first) - torch.cos(second + first) > 1.0
        following = torch.stack((first, second, speed1, speed2)).to(state.dtype)
        return following, terminated.to(state.dtype) - 1.0, terminated

    def observed(self, state: Tensor) -> Tensor:
        """Return cosines and sines of both angles, and their speeds."""
        first, second, speed1, speed2 = state.unbind(0)
        angles = (torch.cos(first), torch.sin(first), torch.cos(second), torch.sin(second))
        return torch.stack((*angles, speed1, speed2), dim=1)


def _acrobot_derivative(state: Tensor, torque: Tensor) -> Tensor:
    """Return the time derivative of Acrobot's state ("book" dynamics of Gymnasium).

    Both links have length, mass and moment of inertia 1, and their centre of mass at 0.5.
    """
    theta1, theta2, speed1, speed2 = state.unbind(0)
    g = 9.8
    cos2, sin2 = torch.cos(theta2), torch.sin(theta2)
    d1 = 0.5**2 + (1.0 + 0.5**2 + 2 * 0.5 * cos2) + 2.0
    d2 = 0.5**2 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * g * torch.cos(theta1 + theta2 - math.pi / 2.0)
    phi1 = (
        -0.5 * speed2.square() * sin2
        - 2 * 0.5 * speed2 * speed1 * sin2
        + (0.5 + 1.0) * g * torch.cos(theta1 - math.pi / 2)
        + phi2
    )
    acc2 = (torque + d2 / d1 * phi1 - 0.5 * speed1.square() * sin2 - phi2) / (
        0.5**2 + 1.0 - d2.square() / d1
    )
    acc1 = -(d2 * acc2 + phi1) / d1
    return torch.stack((speed1, speed2, acc1, acc2))


def _wrapped(angle: Tensor) -> Tensor:
    """Return an angle within [-pi, pi]."""
    turns = torch.ceil((angle.abs() - math.pi) / (2 * math.pi)).clamp(min=0)
    return angle - torch.sign(angle) * turns * 2 * math.pi


class MountainCar(ClassicControl):
    """MountainCar-v0."""

    env_id = "MountainCar-v0"
    variables = 2
    action_spec = _discrete(3)
    obs_spec = ObsSpec({"": ArraySpec((2,), "float32")})

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 200,
        goal_velocity: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps, dtype=dtype)
        self._goal_velocity = goal_velocity

    def _initial(self, uniform: Tensor) -> Tensor:
        return _in_the_valley(uniform)

    def _advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        position, velocity = state.unbind(0)
        push = (action.to(state.dtype) - 1) * 0.001
        velocity = velocity + (push + torch.cos(3 * position) * -0.0025)
        position, velocity = _moved(position, velocity)
        terminated = (position >= 0.5) & (velocity >= self._goal_velocity)
        return torch.stack((position, velocity)), -torch.ones_like(position), terminated


class MountainCarContinuous(ClassicControl):
    """MountainCarContinuous-v0, which stores its state in float32 whatever it is computed in."""

    env_id = "MountainCarContinuous-v0"
    variables = 2
    action_spec = _bounded(1.0)
    obs_spec = ObsSpec({"": ArraySpec((2,), "float32")})

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int = 999,
        goal_velocity: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_envs, device, max_episode_steps=max_episode_steps, dtype=dtype)
        self._goal_velocity = goal_velocity

    def _initial(self, uniform: Tensor) -> Tensor:
        return _in_the_valley(uniform)

    def _advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        position, velocity = state.unbind(0)
        push = action.squeeze(-1).to(state.dtype)
        force = push.clamp(-1.0, 1.0)
        velocity = velocity + (force * 0.0015 - 0.0025 * torch.cos(3 * position))
        position, velocity = _moved(position, velocity)
        terminated = (position >= 0.45) & (velocity >= self._goal_velocity)
        reward = 100.0 * terminated.to(state.dtype) - push.square() * 0.1
        following = torch.stack((position, velocity)).to(torch.float32).to(state.dtype)
        return following, reward, terminated


def _in_the_valley(uniform: Tensor) -> Tensor:
    position, _ = uniform.unbind(0)
    return torch.stack((position * 0.2 - 0.6, torch.zeros_like(position)))


def _moved(position: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    """Return position and velocity after a step; the left wall stops the car."""
    velocity = velocity.clamp(-0.07, 0.07)
    position = (position + velocity).clamp(-1.2, 0.6)
    stopped = (position == -1.2) & (velocity < 0)
    return position, torch.where(stopped, torch.zeros_like(velocity), velocity)


CLASSIC: tuple[type[ClassicControl], ...] = (
    *(CartPole, Pendulum, Acrobot),
    *(MountainCar, MountainCarContinuous),
)
