"""The table of algorithms, under the name it had before it moved to `rl_training.registry`."""

from rl_training.registry import ALGORITHMS, Entry, get_spec

__all__ = ["ALGORITHMS", "Entry", "get_spec"]
