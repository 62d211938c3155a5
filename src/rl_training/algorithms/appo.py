"""APPO: PPO's clipped surrogate on V-trace advantages, for rollouts of an older policy.

The weights at the start of the learning phase are the centre of the clipping, as in PPO. They are
not those that acted: V-trace weights advantages and targets by the ratio of the two. Where they
are equal, APPO is PPO. (Name and idea: RLlib. Separating the policy that acted from the centre of
the clipping: Hilton et al. 2021, arXiv:2110.00641.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rl_training.algorithms.ppo import PPO, PPOConfig
from rl_training.algorithms.vtrace_learner import VTraceConfig, VTraceLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class APPOConfig(PPOConfig, VTraceConfig):
    """PPO's settings, and those of V-trace."""

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("memory", "lstm_size", "memory_span", "shared_lstm", "sequence_length"),
        "V-trace corrects rollouts row by row; ppo has memory",
    )

    gae_lambda: float = 0.95
    """Decay of the trace; where the current policy acted, that of generalised advantage estimation.
    """


class APPO(VTraceLearner, PPO):
    """PPO whose advantages and value targets are corrected by V-trace."""

    config: APPOConfig
