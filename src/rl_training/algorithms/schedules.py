"""Optimizer settings that all algorithms share, and the schedule of the learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from rl_training._internal.coerce import check_types, require, take_old_names
from rl_training.algorithms.optimizers import Optimizer
from rl_training.search_space import Range, SearchSpace

if TYPE_CHECKING:
    from rl_training.algorithms.gradient_step import GradientStep
    from rl_training.types import Progress

Schedule = Literal["constant", "linear", "cosine"]
_FIRST_RATE = 0.01
"""Fraction of the learning rate at the start of a warm-up; with 0 the first updates would do
nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """The optimizer's settings. Configs of algorithms derive from this one."""

    SEARCH: ClassVar[SearchSpace] = {
        "learning_rate": Range(1e-5, 1e-2, log=True),
    }

    default_num_envs: ClassVar[int] = 8
    """Number of environments of a run that does not set ``num_envs``."""

    NOT_SUPPORTED: ClassVar[Mapping[str, str]] = {}
    """Inherited settings that an algorithm refuses, with the reason."""

    learning_rate: float = 3e-4
    """Step size of the optimizer at its peak (see lr_schedule, lr_warmup_fraction)."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """'constant', or 'linear' or 'cosine' decay to 0; unset: constant."""
    lr_warmup_fraction: float = 0.0
    """Fraction of the run with linear warm-up from 1% of the learning rate."""
    optimizer: Literal["adam", "adamw", "rmsprop", "radam"] = "adam"
    """Optimizer, as in torch.optim (RMSprop without momentum)."""
    optimizer_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's betas; rmsprop uses only the second, which torch calls alpha."""
    optimizer_eps: float = 1e-8
    """Epsilon of the optimizer."""
    weight_decay: float = 0.0
    """Weight decay: decoupled with adamw, else added to the gradient."""

    def __post_init__(self) -> None:
        check_types(self, "algo_kwargs")
        take_old_names(self, "algo_kwargs")
        for field in dataclasses.fields(self):
            if field.name in self.NOT_SUPPORTED:
                unused = getattr(self, field.name) in (field.default, {})
                self._require(unused, field.name, f"unset: {self.NOT_SUPPORTED[field.name]}")
        rate = 0 < self.learning_rate < math.inf
        self._require(rate, "learning_rate", "above 0 and finite")
        self._require(0 <= self.lr_warmup_fraction < 1, "lr_warmup_fraction", "at least 0, below 1")
        betas = len(self.optimizer_betas) == 2 and all(0 <= b < 1 for b in self.optimizer_betas)
        self._require(betas, "optimizer_betas", "two numbers, each at least 0 and below 1")
        self._require(0 < self.optimizer_eps < math.inf, "optimizer_eps", "above 0 and finite")
        decay = 0 <= self.weight_decay < math.inf
        self._require(decay, "weight_decay", "zero or more, and finite")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        require(condition, f"algo_kwargs.{name}", rule, getattr(self, name))

    @property
    def has_memory(self) -> bool:
        """Whether policies are recurrent: `predict` then takes and returns a state."""
        return False

    def optimizer_spec(self) -> Optimizer:
        """Return the optimizer that these settings describe."""
        return Optimizer(
            self.optimizer, self.optimizer_betas, self.optimizer_eps, self.weight_decay
        )

    @property
    def schedule(self) -> Schedule:
        """The learning rate's schedule: ``lr_schedule``, or that implied by ``anneal_lr``."""
        if self.lr_schedule is not None:
            return self.lr_schedule
        return "linear" if getattr(self, "anneal_lr", False) else "constant"

    @property
    def rate_changes(self) -> bool:
        """Whether the learning rate depends on progress."""
        return self.schedule != "constant" or self.lr_warmup_fraction > 0

    def rate_at(self, progress: Progress) -> float:
        """Return the learning rate of a learning phase that begins at ``progress``."""
        warmup, done = self.lr_warmup_fraction, progress.fraction
        if done < warmup:
            return self.learning_rate * max(done / warmup, _FIRST_RATE)
        done = (done - warmup) / (1 - warmup)
        if self.schedule == "linear":
            return self.learning_rate * (1 - done)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate


def set_learning_rates(
    config: OptimizationConfig, progress: Progress, *steps: GradientStep
) -> None:
    """Set the learning rate of a learning phase; does nothing if the rate is constant."""
    if config.rate_changes:
        rate = config.rate_at(progress)
        for step in steps:
            step.learning_rate = rate * step.rate_scale
