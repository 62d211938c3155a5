"""Devices and threads."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rl_training.errors import ConfigError
from rl_training.types import ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig


def has_images(obs_spec: ObsSpec) -> bool:
    """Whether an observation holds pixels."""
    return any(leaf.is_image for leaf in obs_spec.encoded.values())


def pick_device(name: str, obs_spec: ObsSpec) -> torch.device:
    """The torch device of a config; one that is not there is refused, never replaced."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        if has_images(obs_spec):
            return torch.device("cuda" if cuda else "mps" if mps else "cpu")
        return torch.device("cpu")
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise ConfigError(
            f"device: {name} was asked for, but torch finds none; use 'cpu' or 'auto'"
        )
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


_WORTH_THREADS = 256**3
"""Rows x inputs x outputs of a layer from which on several threads are faster than one."""


def pick_threads(config: TrainConfig[Any], obs_spec: ObsSpec) -> int:
    """How many CPU threads torch should use."""
    if config.torch_threads is not None:
        return config.torch_threads
    knobs = config.algo_kwargs
    rows = getattr(knobs, "batch_size", 256)
    large = rows * max(knobs.hidden_sizes, default=0) ** 2 >= _WORTH_THREADS
    return torch.get_num_threads() if large or has_images(obs_spec) else 1


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use ``count`` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
