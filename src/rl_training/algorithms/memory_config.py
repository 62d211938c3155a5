"""Settings of policies that remember: which memory networks have."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from rl_training._internal.coerce import require
from rl_training.algorithms.network_config import NetworkConfig
from rl_training.types import RunSettings

Memory: TypeAlias = Literal["none", "lstm", "gru"]

_OF_MEMORY = (
    *("lstm_size", "memory_span", "shared_lstm"),
    *("sequence_length", "batch_sequences", "burn_in"),
)
"""Settings without effect where there is no memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(NetworkConfig):
    """Whether networks have a memory of past observations, and its size."""

    memory: Memory = "none"
    """'lstm' or 'gru': networks have a recurrent layer, which sees all observations of an episode
    up to the current one; 'none': they see the current observation."""
    lstm_size: int = 64
    """Cells of each LSTM or GRU, with memory."""
    memory_span: int | None = None
    """Steps over which gates keep the memory at first: biases are drawn for spans up to this one
    (arXiv:1804.11188); unset: a few steps, which is enough where the past is seen soon after."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            fits = self.has_memory or getattr(self, field.name) == field.default
            if field.name in _OF_MEMORY and not fits:
                self._require(False, field.name, "unset without memory: it has no effect")
        self._require(self.lstm_size >= 1, "lstm_size", "at least 1")
        if self.memory_span is not None:
            self._require(self.memory_span > 2, "memory_span", "above 2")
        if self.has_memory and getattr(self, "network", None) is not None:
            rule = f"unset with memory: {self.memory}, which takes an 'encoder'"
            self._require(False, "network", rule)

    @property
    def has_memory(self) -> bool:
        """Whether policies are recurrent."""
        return self.memory != "none"

    def check_acceleration(self, run: RunSettings) -> None:
        """Refuse to compile a recurrent network: lengths of sequences change between updates."""
        eager = not self.has_memory or run.acceleration == "eager"
        require(eager, "acceleration", f"eager with memory: {self.memory}", run.acceleration)
