"""The managed class of algorithms whose policies are recurrent."""

from __future__ import annotations

from rl_training._internal.lazy import lazy_exports
from rl_training.api.algorithms import ManagedAlgorithm
from rl_training.registry import class_exports


class RecurrentAlgorithm(ManagedAlgorithm):
    """A `ManagedAlgorithm` whose `predict` takes and returns a recurrent state."""


__getattr__, _ = lazy_exports(__name__, class_exports())
"""The managed classes were defined here before `rl_training.surface`."""
