"""Devices and threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rl_training.errors import ConfigError
from rl_training.types import ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig


def pick_device(name: str, obs_spec: ObsSpec) -> torch.device:
    """The torch device of a config; one that is not there is refused, never replaced."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cpu"
        if obs_spec.has_images:
            name = "cuda" if cuda else "mps" if mps else "cpu"
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise ConfigError(
            f"device: {name} was asked for, but torch finds none; use 'cpu' or 'auto'"
        )
    if name == "cuda":  # by its number, as tensors name it
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def check_acceleration(mode: str, device: torch.device) -> None:
    """Refuse a mode whose tools are missing, before anything is trained."""
    if mode == "cudagraph" and device.type != "cuda":
        raise ConfigError(
            f"acceleration: cudagraph needs device: cuda, and this is {device.type}:"
            " choose another acceleration too"
        )
    if mode == "compile" and device.type == "cpu":
        compilers = (os.environ.get("CXX", ""), "g++", "clang++", "cl")
        if not any(shutil.which(name) for name in compilers if name):
            raise ConfigError(
                "acceleration: compile needs a C++ compiler (g++ or clang++), and none was found"
            )


def check_precision(precision: str, device: torch.device, obs_spec: ObsSpec) -> None:
    """Refuse arithmetic that would do nothing, or that the device may not have."""
    if precision == "float32":
        return
    if device.type != "cuda":
        raise ConfigError(f"precision: {precision} needs device: cuda, and this is {device.type}")
    if not obs_spec.has_images:
        raise ConfigError(f"precision: {precision} is for networks that see images; here are none")


_WORTH_THREADS = 256**3
"""Rows x inputs x outputs of a layer from which on several threads are faster than one."""


def pick_threads(config: TrainConfig[Any], obs_spec: ObsSpec, device: torch.device) -> int:
    """How many CPU threads torch should use.

    With an accelerator one is enough, and others would spin on the cores of the environments.
    """
    if config.torch_threads is not None:
        return config.torch_threads
    if device.type != "cpu":
        return 1
    knobs = config.algo_kwargs
    rows = getattr(knobs, "samples_per_update", 256)
    large = rows * max(knobs.hidden_sizes or (), default=0) ** 2 >= _WORTH_THREADS
    return torch.get_num_threads() if large or obs_spec.has_images else 1


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Let glibc keep what it is given back, instead of asking the system anew for every update.

    The activations of a convolutional network are tens of megabytes: freed and mapped again each
    time they cost thousands of page faults, a quarter of an update of DQN's. Elsewhere than under
    glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in (
        (_MMAP_THRESHOLD, 32 << 20),
        (_TRIM_THRESHOLD, 1 << 30),
        (_TOP_PAD, 64 << 20),
    ):
        mallopt(option, value)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use ``count`` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
