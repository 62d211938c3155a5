"""Algorithms beside the core, on the same foundation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.contrib.api import RecurrentPPO as RecurrentPPO
    from rl_training.runtime.recurrent_ppo_trainer import train_recurrent_ppo as train_recurrent_ppo

_EXPORTS = {
    "RecurrentPPO": "rl_training.contrib.api:RecurrentPPO",
    "train_recurrent_ppo": "rl_training.runtime.recurrent_ppo_trainer:train_recurrent_ppo",
}

__all__ = ["RecurrentPPO", "train_recurrent_ppo"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
