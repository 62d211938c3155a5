"""Vector environments whose observations, rewards and ends are tensors on one device."""

from rl_training.device_envs.protocol import DeviceEnv, DeviceStep
from rl_training.device_envs.table import make_device_env, register_device_env

__all__ = ["DeviceEnv", "DeviceStep", "make_device_env", "register_device_env"]
