"""QMIX (Rashid et al. 2018, arXiv:1803.11485): VDN with a monotonic mixer in place of the sum."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rl_training.algorithms.vdn import VDNConfig
from rl_training.search_space import Choice, SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class QMIXConfig(VDNConfig):
    """VDN's settings, and those of the mixer."""

    SEARCH: ClassVar[SearchSpace] = {
        "mixing_size": Choice((16, 32, 64)),
    }

    mixing_size: int = 32
    """Units of the mixer's hidden layer."""
    hypernet_hidden_sizes: tuple[int, ...] = ()
    """Widths of the hidden layers of the networks that compute the mixer's weights; empty: linear
    functions of the state."""
    uses_state: ClassVar[bool] = True
    """Whether rows contain the state of the whole team."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.mixing_size >= 1, "mixing_size", "at least 1")
        self._check_widths("hypernet_hidden_sizes")
