"""Deterministic operations on CUDA, and with which settings a resume is exact."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from rl_training.algorithms.acceleration import Acceleration
from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

EXACT_ACCELERATIONS: dict[str, tuple[Acceleration, ...]] = {"cpu": ("eager",), "cuda": ("eager",)}
"""Modes with which a resume is exact, by device: on CUDA with ``deterministic``.

A mode belongs here once tests/test_cuda_resume.py has passed with it on a GPU.
"""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = (":4096:8", ":16:8")
_ours = {"set": False}
"""Whether a run of this process made torch deterministic."""


def prepare_determinism(config: TrainConfig[Any]) -> None:
    """Set what must be set before CUDA is initialised."""
    if config.deterministic and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(_WORKSPACE, _FIXED_WORKSPACES[0])


def use_determinism(config: TrainConfig[Any], device: torch.device) -> None:
    """Make torch's operations deterministic on CUDA, or not, as the config requires.

    Raises ConfigError where it is too late. Operations without a deterministic implementation then
    raise an error that names them.
    """
    if device.type != "cuda":
        return
    if not config.deterministic:
        if _ours["set"]:
            torch.use_deterministic_algorithms(mode=False)
            torch.backends.cudnn.deterministic = False
            _ours["set"] = False
        return
    if (workspace := os.environ.get(_WORKSPACE)) not in _FIXED_WORKSPACES:
        found = "is not set" if workspace is None else f"is {workspace!r}"
        raise ConfigError(
            f"'deterministic' needs {_WORKSPACE} to be {' or '.join(_FIXED_WORKSPACES)} before CUDA"
            f" is initialised. It {found}, and CUDA may already be in use in this process: set it"
            " before Python starts"
        )
    _ours["set"] = True
    torch.use_deterministic_algorithms(mode=True)
    # Nothing reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def gpu_name(device: torch.device) -> str | None:
    """Return the name of a CUDA device, whose results another one may not repeat."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
