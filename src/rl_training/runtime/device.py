"""Choice of device, checks of acceleration and precision, and CPU threads."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rl_training.algorithms.acceleration import Acceleration
from rl_training.errors import ConfigError
from rl_training.launched import local_rank
from rl_training.registry import find_entry
from rl_training.runtime.determinism import EXACT_ACCELERATIONS, use_determinism
from rl_training.types import ObsSpec

if TYPE_CHECKING:
    from rl_training.config import TrainConfig


def pick_device(name: str, obs_spec: ObsSpec | None) -> torch.device:
    """Return the torch device of a config; raise ConfigError if it is not available.

    "auto" is an accelerator for images, and where the environments are on the device, too
    (``obs_spec`` None).
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cpu"
        if obs_spec is None:
            name = "cuda" if cuda else "cpu"
        elif obs_spec.has_images:
            name = "cuda" if cuda else "mps" if mps else "cpu"
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise ConfigError(
            f"device: {name} is not available: torch finds no such device; use 'cpu' or 'auto'"
        )
    if name == "cuda":  # with its index, as in tensor.device
        if local_rank():
            torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def use_device(config: TrainConfig[Any], device: torch.device) -> None:
    """Raise ConfigError if a device cannot do what a run requires of it; set up determinism."""
    check_acceleration(config.acceleration, device)
    use_determinism(config, device)


def check_acceleration(mode: str, device: torch.device) -> None:
    """Raise ConfigError if the device or a compiler for the mode is missing."""
    if mode == "cudagraph" and device.type != "cuda":
        raise ConfigError(
            f"acceleration: cudagraph needs device: cuda, but the device is {device.type}:"
            " set acceleration to eager or compile, or use device: cuda"
        )
    if mode == "compile" and device.type == "cpu":
        compilers = (os.environ.get("CXX", ""), "g++", "clang++", "cl")
        if not any(shutil.which(name) for name in compilers if name):
            raise ConfigError(
                "acceleration: compile needs a C++ compiler (g++ or clang++), and none was found"
            )


def pick_acceleration(
    config: TrainConfig[Any], device: torch.device, *, capturable: bool
) -> tuple[Acceleration, str]:
    """Return the acceleration of a run with environments on the device, and why.

    What was set is kept. ``capturable`` is whether a step can be part of a CUDA graph.
    """
    if config.is_given("acceleration"):
        return config.acceleration, "as set"
    knobs = config.algo_kwargs
    if device.type != "cuda":
        return "eager", f"there are no CUDA graphs on {device.type}"
    if not capturable:  # a simulator may use the GPU while updates are captured
        return "eager", "the environment is not capturable"
    if config.deterministic and "cudagraph" not in EXACT_ACCELERATIONS["cuda"]:
        return "eager", "deterministic: graphs are not known to repeat"
    if "cudagraph" not in find_entry(config.algo).accelerations:
        return "eager", f"the only one for {config.algo}"
    if any(getattr(knobs, name, None) for name in ("encoder", "network")):
        return "eager", "a network of your own may draw random numbers"
    if importlib.util.find_spec("triton") is None or not any(map(shutil.which, _C_COMPILERS)):
        return "eager", "cudagraph needs Triton and a C compiler"
    return "cudagraph", "steps and updates are launched as CUDA graphs"


_C_COMPILERS = ("cc", "gcc", "clang")


def check_precision(precision: str, device: torch.device, obs_spec: ObsSpec) -> None:
    """Raise ConfigError if a precision would have no effect or the device may not support it."""
    if precision == "float32":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"precision: {precision} needs device: cuda, but the device is {device.type}"
        )
    if not obs_spec.has_images:
        raise ConfigError(f"precision: {precision} needs image observations, and there are none")


_WORTH_THREADS = 4 * 256**3
"""Smallest batch x inputs x outputs of a layer for which several threads are clearly faster than
one (benchmarks/threads.py)."""
_MOST_THREADS = 8
"""More threads gain little for such layers, and on 16 cores they may be slower than one."""


def pick_threads(config: TrainConfig[Any], obs_spec: ObsSpec, device: torch.device) -> int:
    """Return how many CPU threads torch should use: a rule of the config, recorded in the run.

    The number of threads changes rounding, so that it must not depend on a measurement. With an
    accelerator one is enough, and others would take time from the cores of the environments.
    """
    if config.torch_threads is not None:
        return config.torch_threads
    if device.type != "cpu" or config.shards > 1:  # nor on how many processes execute the shards
        return 1
    knobs = config.algo_kwargs
    rows = getattr(knobs, "rows_per_update", 256)
    sizes = (knobs.hidden_sizes or ()) + (getattr(knobs, "critic_hidden_sizes", None) or ())
    if obs_spec.has_images:
        return torch.get_num_threads()
    large = rows * max(sizes, default=0) ** 2 >= _WORTH_THREADS
    return min(torch.get_num_threads(), _MOST_THREADS) if large else 1


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system.

    The activations of a convolutional network take tens of megabytes. Mapping them again for every
    update causes thousands of page faults, a quarter of the time of a DQN update. Does nothing
    without glibc.
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
    """Use ``count`` threads within this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
