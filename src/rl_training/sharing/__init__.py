"""Policies as folders to share: weights, config, spaces and a model card."""

from rl_training.sharing.card import Origin, Played, model_card
from rl_training.sharing.portable import origin_of, portable_config, share_policy

__all__ = ["Origin", "Played", "model_card", "origin_of", "portable_config", "share_policy"]
