"""Deep recurrent Q-learning (Hausknecht and Stone 2015, arXiv:1507.06527)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from rl_training._internal.coerce import OldName
from rl_training.algorithms.masking import masked_mean
from rl_training.algorithms.q_learning import (
    QLearner,
    QLearningConfig,
    best_values,
    values_of,
)
from rl_training.algorithms.sequence_replay import SequenceReplayConfig, sequence_targets
from rl_training.search_space import Choice, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class DRQNConfig(QLearningConfig, SequenceReplayConfig):
    """DRQN's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "batch_size": None,  # it counts sequences
        "batch_sequences": Choice((16, 32, 64)),
        "sequence_length": Choice((8, 16, 32)),
        "lstm_size": Choice((32, 64, 128)),
    }

    memory: Literal["lstm", "gru"] = "lstm"
    """The recurrent layer: an LSTM or a GRU."""
    batch_size: int | None = None  # type: ignore[assignment]
    """Deprecated: use batch_sequences."""
    OLD_NAMES: ClassVar[Mapping[str, OldName]] = {
        **QLearningConfig.OLD_NAMES,
        "batch_size": OldName("batch_sequences"),
    }
    """Settings that have a new name."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the layers before the LSTM; unset: 64, none after images."""


def drqn_loss(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return half the squared TD error over sequences (time, batch) where ``mask`` is 1.

        loss = sum( mask (target - q)^2 ) / (2 time batch)

    The divisor counts padding and burn-in too, so that it is a constant and every learnt step has
    the same weight in every batch. In a mean over ``mask`` steps of short sequences weigh more.
    Not DQN's Huber loss: where an observation shows only a part of the state, targets differ by
    what is hidden, and only squares pull towards their mean instead of their median.
    """
    q_values, mask = batch["q_values"], batch["mask"]
    # In padding the observation's mask may forbid the action: its value is the least float there.
    td_errors = torch.where(mask > 0, batch["targets"] - q_values, 0.0)
    return {
        "loss": 0.5 * (td_errors.square() * mask).mean(),
        "q_mean": masked_mean(q_values.detach(), mask),
        "td_error": masked_mean(td_errors.detach().abs(), mask),
    }


class SequenceQNetwork(Protocol):
    """What DRQN needs of a model."""

    state_size: int

    def q_values_sequence(self, obs: Any, state: Tensor) -> Tensor:
        """Return values of all actions along sequences."""
        ...


class DRQN(QLearner):
    """Q-learning along sequences, from the recurrent states stored where they begin."""

    def __init__(self, model: Any, config: SequenceReplayConfig, **shards: Any) -> None:
        super().__init__(model, config, **shards)
        self.model: SequenceQNetwork = model

    @property
    def state_size(self) -> int:
        """Numbers of the state that is stored with sequences."""
        return self.model.state_size

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `drqn_loss` of the current networks on stored sequences.

        ``obs`` is one longer than the rest: the true successor of the last step. The value of the
        observation after step t is max_a Q_target(o_{t+1}, a), given all before it; with ``double``
        a = argmax_a Q(o_{t+1}, a).
        """
        obs, state = batch["obs"], batch["state"]
        values = self.model.q_values_sequence(obs, state)
        with torch.no_grad():
            following = self.target.module.q_values_sequence(obs, state)[1:]
            chooser = values[1:] if self.config.double else None
            best = best_values(following, chooser)
            targets = sequence_targets(batch, best, self.config.n_step)
        chosen = values_of(batch["actions"], values[:-1])
        return drqn_loss({"q_values": chosen, "targets": targets, "mask": batch["mask"]})
