"""The managed class of algorithms whose policies remember."""

from __future__ import annotations

from typing import Any

from rl_training._internal.lazy import lazy_exports
from rl_training.api.algorithms import ManagedAlgorithm
from rl_training.registry import class_exports


class RecurrentAlgorithm(ManagedAlgorithm):
    """A `ManagedAlgorithm` whose `predict` takes and returns what is remembered."""

    def predict(  # type: ignore[override]
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, Any]:
        """The action (or actions, for a batch) and the next state; no environment is needed.

        Pass the state that the last call returned; None at the start. Where ``episode_start`` is
        true it is forgotten first.
        """
        policy: Any = self._current_policy()
        action, after = policy.predict(obs, state, episode_start, deterministic)
        return action, after


__getattr__, _ = lazy_exports(__name__, class_exports())
"""The managed classes were defined here before `rl_training.surface`."""
