"""The managed class of RecurrentPPO, under the name it had before `rl_training.surface`."""

from rl_training.surface import RecurrentPPO

__all__ = ["RecurrentPPO"]
