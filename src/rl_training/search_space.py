"""Which values of a setting ``rl-training tune`` tries: declared beside the settings themselves.

A config dataclass has a table of its own settings, and inherits those of its bases:

    SEARCH: ClassVar[SearchSpace] = {
        "clip_coef": Range(0.1, 0.4),
        "update_epochs": Choice((4, 10, 20)),
    }

None removes an inherited entry. A name may also be one of `RUN_SETTINGS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

RUN_SETTINGS = (
    *("num_envs", "normalize_obs", "normalize_reward", "clip_obs", "clip_reward"),
    "dataset_fraction",
)
"""Settings of `TrainConfig` that can be tuned, besides those of the algorithm."""


@dataclasses.dataclass(frozen=True)
class Range:
    """All numbers between two bounds, both included; whole ones where the setting is an int."""

    low: float
    high: float
    log: bool = False
    """Sample the logarithm evenly."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A few values."""

    options: tuple[Any, ...]


SearchSpace: TypeAlias = Mapping[str, Range | Choice | None]


def declared_space(config_type: type[Any]) -> dict[str, Range | Choice]:
    """Return what a config dataclass and its bases declare in ``SEARCH``."""
    found: dict[str, Range | Choice | None] = {}
    for cls in reversed(config_type.__mro__):
        found.update(vars(cls).get("SEARCH", {}))
    return {name: values for name, values in found.items() if values is not None}
