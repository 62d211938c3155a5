"""Deep recurrent Q-learning (Hausknecht and Stone 2015, arXiv:1507.06527)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

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
from rl_training.search_space import Choice, SearchSpace
from rl_training.types import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class DRQNConfig(QLearningConfig):
    """DRQN's settings."""

    SEARCH: ClassVar[SearchSpace] = {
        "batch_size": None,  # it counts sequences
        "batch_sequences": Choice((16, 32, 64)),
        "sequence_length": Choice((8, 16, 32)),
        "lstm_size": Choice((32, 64, 128)),
    }

    batch_sequences: int = 32
    """Sequences per update."""
    batch_size: int | None = None  # type: ignore[assignment]
    """Deprecated: use batch_sequences."""
    OLD_NAMES: ClassVar[Mapping[str, OldName]] = {
        **QLearningConfig.OLD_NAMES,
        "batch_size": OldName("batch_sequences"),
    }
    """Settings that have a new name."""
    sequence_length: int = 16
    """Most steps of a sequence, over which gradients flow back; sequences end with episodes."""
    burn_in: int = 4
    """First steps of a sequence that only refresh the LSTM's state (not at an episode's start)."""
    lstm_size: int = 64
    """Cells of the LSTM."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the layers before the LSTM; unset: 64, none after images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lstm_size", "sequence_length"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        in_sequence = 0 <= self.burn_in < self.sequence_length
        self._require(
            in_sequence, "burn_in", f"0 to sequence_length - 1 = {self.sequence_length - 1}"
        )
        few = 1 <= self.n_step <= self.sequence_length
        self._require(few, "n_step", f"at most sequence_length = {self.sequence_length}")
        on_host = self.replay_device == "cpu"
        self._require(on_host, "replay_device", "cpu: sequences are put together on the host")

    def _check_batch(self) -> None:
        self._require(self.batch_sequences >= 1, "batch_sequences", "at least 1")

    samples_setting: ClassVar[str] = "batch_sequences"

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the rest of a config."""
        super().check_run(run)
        self._require(
            self.buffer_size >= 2 * run.num_envs * self.sequence_length,
            "buffer_size",
            f"at least 2 num_envs sequence_length = 2 * {run.num_envs} * {self.sequence_length}",
        )


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


def sequence_targets(batch: Mapping[str, Tensor], best: Tensor, n_step: int) -> Tensor:
    """Return the target of each step of a sequence, of up to ``n_step`` rewards.

    With b_t = ``best`` the value of the observation after step t, r the rewards, d the discounts:

        G1_t = r_t + d_t b_t,  Gn_t = r_t + d_t G(n-1)_{t+1}

    and b_t instead of G_{t+1} where the sequence ends before.
    """
    has_next = torch.zeros_like(best, dtype=torch.bool)
    has_next[:-1] = batch["mask"][1:] > 0
    ahead = best
    for _ in range(n_step - 1):
        targets = batch["rewards"] + batch["discounts"] * ahead
        ahead = torch.where(has_next, targets.roll(-1, 0), best)
    return batch["rewards"] + batch["discounts"] * ahead


class SequenceQNetwork(Protocol):
    """What DRQN needs of a model."""

    def q_values_sequence(self, obs: Any, state: Tensor) -> Tensor:
        """Return values of all actions along sequences."""
        ...


class DRQN(QLearner):
    """Q-learning along sequences, from the recurrent states stored where they begin."""

    def __init__(self, model: Any, config: DRQNConfig, **shards: Any) -> None:
        super().__init__(model, config, **shards)
        self.model: SequenceQNetwork = model

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
