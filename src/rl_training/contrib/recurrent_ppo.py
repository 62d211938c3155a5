"""PPO with memory: the same learning phase, over sequences instead of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from rl_training.algorithms.ppo import PPO, PPOConfig, ppo_loss
from rl_training.search_space import Choice, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentPPOConfig(PPOConfig):
    """PPO's settings, with memory by default."""

    SEARCH: ClassVar[SearchSpace] = {
        "sequence_length": Choice((16, 32, 64)),
        "lstm_size": Choice((32, 64, 128)),
    }

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("network", "network_kwargs"), "recurrent_ppo takes an 'encoder' instead"
    )

    memory: Literal["lstm", "gru"] = "lstm"
    """The recurrent layer of policy and value function: an LSTM or a GRU."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the layers after each LSTM, for policy and value; unset: 64, none for images."""


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
