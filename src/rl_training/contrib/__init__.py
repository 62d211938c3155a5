"""Algorithms beside the core: their learners are here, the rest is shared with all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.surface import RecurrentPPO as RecurrentPPO
    from rl_training.surface import train_recurrent_ppo as train_recurrent_ppo

_EXPORTS = {
    "RecurrentPPO": "rl_training.surface:RecurrentPPO",
    "train_recurrent_ppo": "rl_training.surface:train_recurrent_ppo",
}

__all__ = ["RecurrentPPO", "train_recurrent_ppo"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
