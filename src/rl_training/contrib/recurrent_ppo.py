"""PPO with memory: the same learning phase, over sequences instead of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl_training.algorithms.ppo import PPO, PPOConfig, check_sequences, ppo_loss
from rl_training.search_space import Choice, SearchSpace
from rl_training.types import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentPPOConfig(PPOConfig):
    """PPO's settings, and those of the LSTM."""

    SEARCH: ClassVar[SearchSpace] = {
        "sequence_length": Choice((16, 32, 64)),
        "lstm_size": Choice((32, 64, 128)),
    }

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("network", "network_kwargs"), "recurrent_ppo takes an 'encoder' instead"
    )

    lstm_size: int = 64
    """Cells of each LSTM."""
    shared_lstm: bool = False
    """One LSTM for policy and value function, instead of one each."""
    sequence_length: int = 32
    """Steps that gradients flow back through; a divisor of num_steps."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the layers after each LSTM, for policy and value; unset: 64, none for images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lstm_size", "sequence_length"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(
            self.num_steps % self.sequence_length == 0,
            "sequence_length",
            f"a divisor of num_steps = {self.num_steps}",
        )

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the number of environments."""
        check_sequences(run, self.num_steps, self.sequence_length, self.num_minibatches)


def recurrent_ppo_loss(minibatch: Mapping[str, Any], **coefficients: Any) -> dict[str, Tensor]:
    """`ppo_loss` over sequences: every mean is over the steps whose ``mask`` is 1.

    All are (time, batch); padding is there for the network alone and must be masked.
    """
    if "mask" not in minibatch:
        raise ValueError("sequences need a mask: padding must not enter the loss")
    return ppo_loss(minibatch, **coefficients)


class RecurrentPPO(PPO):
    """PPO on a model that remembers and a rollout of sequences: the rest is the same."""

    objective = staticmethod(recurrent_ppo_loss)
