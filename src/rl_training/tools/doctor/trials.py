"""Alternative settings of a config that may be faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.config import TrainConfig
from rl_training.envs.factory import EnvRecipe
from rl_training.errors import ConfigError
from rl_training.tools.doctor.system import System


@dataclasses.dataclass(frozen=True)
class Trial:
    """Settings that replace those of the config."""

    overrides: dict[str, Any]
    changes: str = ""
    """How the settings change learning; empty if they do not."""

    @property
    def name(self) -> str:
        """The settings as text."""
        return ", ".join(f"{k}: {v}" for k, v in self.overrides.items()) or "as it is"

    @property
    def flags(self) -> str:
        """The settings as flags of ``rl-training train``."""
        return " ".join(_flag(name.replace("_", "-"), v) for name, v in self.overrides.items())


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def baseline() -> Trial:
    """Return the trial of the unchanged config."""
    return Trial({})


_HASTENS = {
    "vectorization": ("environment",),
    "overlap": ("environment",),
    "num_envs": ("inference",),  # inference is batched; each environment takes as long as before
    "device": ("inference", "update"),
    "acceleration": ("inference", "update"),
}
"""The parts of a training step that a setting may make faster."""


def trials(
    config: TrainConfig[Any], device: str, system: System, shares: Mapping[str, float]
) -> list[Trial]:
    """Return trials that may be faster on ``device``, given the ``shares`` of time per part.

    Trials of the largest part come first, since there may not be time for all.
    """
    found = [Trial(overrides) for overrides in _vectorizations(config)]
    found += [
        Trial({"num_envs": times * config.num_envs}, _other_problem(config, times))
        for times in (2, 4)
    ]
    if device == "cpu" and system.device.images == "cuda":
        found.append(Trial({"device": "cuda"}))
    found += [Trial(overrides) for overrides in _accelerations(config, device, system)]
    possible = [trial for trial in found if _is_valid(config, trial)]
    return sorted(possible, key=lambda trial: _within_reach(trial, shares), reverse=True)


def _within_reach(trial: Trial, shares: Mapping[str, float]) -> float:
    """Return the share of a training step that a trial may make faster."""
    parts = {part for setting in trial.overrides for part in _HASTENS[setting]}
    return sum(shares.get(part, 0.0) for part in parts)


def _vectorizations(config: TrainConfig[Any]) -> list[dict[str, Any]]:
    kinds = ["sync", "native"] if config.num_envs == 1 else ["sync", "async", "native"]
    alone = {"overlap": False} if config.overlap else {}
    found: list[dict[str, Any]] = [
        {"vectorization": kind, **alone} for kind in kinds if kind != config.vectorization
    ]
    return found if config.overlap else [*found, {"vectorization": "native", "overlap": True}]


def _accelerations(config: TrainConfig[Any], device: str, system: System) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if system.compiler is not None or device != "cpu":
        found.append({"acceleration": "compile"})
    if device == "cuda":
        found.append({"acceleration": "cudagraph"})
    elif system.device.images == "cuda":
        found.append({"device": "cuda", "acceleration": "cudagraph"})
    if config.acceleration != "eager":
        found.append({"acceleration": "eager"})
    return [one for one in found if one["acceleration"] != config.acceleration]


def _other_problem(config: TrainConfig[Any], times: int) -> str:
    knobs = config.algo_kwargs
    if hasattr(knobs, "num_steps"):
        before = knobs.num_steps * config.num_envs
        return (
            f"each update then learns from {times * before:,} transitions instead of {before:,},"
            " and there are fewer updates: tune the hyperparameters again"
        )
    return (
        "the updates per step stay the same, but the policy collects more steps between updates:"
        " check the returns"
    )


def _is_valid(config: TrainConfig[Any], trial: Trial) -> bool:
    """Return whether the config is valid and the environment supports the vectorization."""
    try:
        other = config.with_overrides(**trial.overrides)
        source: Any = EnvRecipe.from_config(other).source
    except ConfigError:
        return False
    native = other.vectorization == "native" and other.preprocessing != "atari"
    return not native or source.vector_entry_point is not None


def combined(winners: Sequence[Trial], rates: Mapping[str, float]) -> Trial | None:
    """Return a trial of the fastest value of each setting; None if there is only one setting."""
    together: dict[str, Any] = {}
    for trial in sorted(winners, key=lambda trial: rates[trial.name]):
        together |= trial.overrides
    kinds = {frozenset(trial.overrides) for trial in winners}
    return Trial(together) if len(kinds) > 1 else None
