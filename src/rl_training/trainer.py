"""One ``train_*`` function per algorithm, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports
from rl_training.registry import train_exports

if TYPE_CHECKING:
    from rl_training.runtime.trainer import TrainResult as TrainResult  # noqa: PLC0414
    from rl_training.surface import *  # noqa: F403

_EXPORTS = {"TrainResult": "rl_training.runtime.trainer:TrainResult", **train_exports()}

__all__ = [*_EXPORTS]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
