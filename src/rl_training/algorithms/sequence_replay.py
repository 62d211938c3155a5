"""Learning from sequences of a replay: settings and targets of recurrent off-policy learners."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training._internal.coerce import require
from rl_training.algorithms.memory_config import MemoryConfig
from rl_training.algorithms.off_policy import OffPolicyConfig
from rl_training.types import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceReplayConfig(OffPolicyConfig, MemoryConfig):
    """Settings of learners from a replay that have a memory, or may have one."""

    batch_sequences: int = 32
    """Sequences per update, with memory."""
    sequence_length: int = 16
    """Most steps of a sequence, over which gradients flow back; sequences end with episodes."""
    burn_in: int = 4
    """First steps of a sequence that only refresh the memory (not at an episode's start)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.sequence_length >= 1, "sequence_length", "at least 1")
        in_sequence = 0 <= self.burn_in < self.sequence_length
        self._require(
            in_sequence, "burn_in", f"0 to sequence_length - 1 = {self.sequence_length - 1}"
        )
        if not self.has_memory:
            return
        few = 1 <= self.n_step <= self.sequence_length
        self._require(few, "n_step", f"at most sequence_length = {self.sequence_length}")
        on_host = self.replay_device == "cpu"
        self._require(on_host, "replay_device", "cpu: sequences are put together on the host")
        if self.prioritization() is not None:
            self._require(
                False, "prioritized", "false with memory: all sequences are equally likely"
            )

    def _check_batch(self) -> None:
        if self.has_memory:
            self._require(self.batch_sequences >= 1, "batch_sequences", "at least 1")
        else:
            super()._check_batch()

    @property
    def samples_setting(self) -> str:
        """The setting that `samples_per_update` is."""
        return "batch_sequences" if self.has_memory else super().samples_setting

    def check_run(self, run: RunSettings) -> None:
        """Refuse settings that do not fit the rest of a config."""
        super().check_run(run)
        if not self.has_memory:
            return
        self.check_acceleration(run)
        rule = f"unset with memory: {self.memory}, whose batches are sequences"
        require(run.dataset is None, "dataset", rule, run.dataset)
        self._require(
            self.buffer_size >= 2 * run.num_envs * self.sequence_length,
            "buffer_size",
            f"at least 2 num_envs sequence_length = 2 * {run.num_envs} * {self.sequence_length}",
        )


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
