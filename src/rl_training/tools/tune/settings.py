"""The settings of a study, which are stored in it and do not change when it is continued."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.tools.tune.samplers import check_sampler
from rl_training.tools.tune.scores import Objective
from rl_training.tools.tune.space import Space

FORMAT = 1
Pruner = Literal["median", "halving", "hyperband", "none"]
FIRST_SEED = 101
"""Tuning seeds begin here: presets are evaluated on the seeds before it."""
_MOST_SEEDS = 100
_MAX_SEED = 2**31
_NOT_COMPARED = ("output_dir", "progress", "torch_threads", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What the trials of a study have in common."""

    config: TrainConfig[Any]
    """The preset, and the flags that override it."""
    space: Space
    seeds: tuple[int, ...]
    objective: Objective
    evaluations: int
    """Evaluations of a run, at which a trial may be pruned."""
    sampler: str
    sampler_seed: int
    pruner: Pruner

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ConfigError(f"the objective must be 'final' or 'curve'; got {self.objective!r}")
        if self.pruner not in get_args(Pruner):
            hint = did_you_mean(str(self.pruner), get_args(Pruner))
            raise ConfigError(f"unknown pruner {self.pruner!r}.{hint}")
        check_sampler(self.sampler, self.space)
        if not 1 <= self.evaluations <= self.config.total:
            raise ConfigError(
                f"evaluations must be at least 1, and at most the {self.config.total:,}"
                f" {self.config.unit} of a run; got {self.evaluations}"
            )
        if not 0 <= self.sampler_seed <= _MAX_SEED:
            raise ConfigError(
                f"the seed of the sampler must be at least 0; got {self.sampler_seed}"
            )
        if self.config.eval_episodes == 0:
            raise ConfigError("tuning needs evaluations: eval_episodes must be above 0")
        if not self.space.values:
            raise ConfigError(f"{self.config.algo} declares nothing to tune: write a --space file")

    def trial_config(self, params: Mapping[str, Any]) -> TrainConfig[Any]:
        """Return the config of a trial; raise ConfigError if the combination is not allowed."""
        return self.for_runs(self.config.with_overrides(**self.space.settings_of(params)))

    def for_runs(self, config: TrainConfig[Any]) -> TrainConfig[Any]:
        """Return a config with the evaluations of this study."""
        every = -(-config.total // self.evaluations)
        return config.with_overrides(eval_interval=every, tensorboard=False, progress=False)

    def to_plain(self) -> dict[str, Any]:
        """Return what the study stores, as plain values."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in _NOT_COMPARED}
        return {
            "format": FORMAT,
            "config": config,
            "space": self.space.to_plain(),
            "seeds": list(self.seeds),
            "objective": self.objective,
            "evaluations": self.evaluations,
            "sampler": self.sampler,
            "sampler_seed": self.sampler_seed,
            "pruner": self.pruner,
        }


def require_same(ours: Mapping[str, Any], stored: Any, name: str) -> None:
    """Raise UserError if a study was started with other settings, naming those that differ."""
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError(
            f"the study {name!r} was not made by this version of rl-training tune: choose another"
            " --study or --storage"
        )
    differ = [
        f"{label} ({_short(theirs)} instead of {_short(mine)})"
        for label, mine, theirs in _pairs(ours, stored)
        if mine != theirs
    ]
    if differ:
        raise UserError(
            f"the study {name!r} was started with other settings: {'; '.join(differ[:5])}. Repeat"
            " its command to continue it, or choose another --study for a new one"
        )


def _pairs(ours: Mapping[str, Any], stored: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return all settings with both values; those of mappings one by one."""
    pairs: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys((*ours, *stored)):
        mine, theirs = ours.get(key), stored.get(key)
        if key in ("config", "algo_kwargs", "space") and isinstance(mine, dict):
            inner = theirs if isinstance(theirs, dict) else {}
            prefix = "space." if key == "space" else ""
            pairs += [(f"{prefix}{name}", *values) for name, *values in _pairs(mine, inner)]
        else:
            pairs.append((key, mine, theirs))
    return pairs


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tuning_seeds(given: int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds to tune on: as many as given from 101 on, or the given ones.

    Raises:
        ConfigError: One is at most 100.
    """
    seeds = _seeds(given, FIRST_SEED, "seeds")
    if low := [seed for seed in seeds if seed < FIRST_SEED]:
        raise ConfigError(
            f"tuning seeds must be above {FIRST_SEED - 1}: presets are evaluated on those up to it;"
            f" got {', '.join(map(str, low))}"
        )
    if not seeds:
        raise ConfigError("the number of tuning seeds must be at least 1")
    return seeds


def final_seeds(given: int | Sequence[int], tuned_on: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds of the final evaluation: as many as given from 1 on, or the given ones.

    Raises:
        ConfigError: One is a tuning seed: the result would be an overestimate.
    """
    seeds = _seeds(given, 1, "final seeds")
    if shared := sorted(set(seeds) & set(tuned_on)):
        raise ConfigError(
            "final seeds must differ from the tuning seeds, on which the best settings look better"
            " than they are, since they were chosen by them; in both:"
            f" {', '.join(map(str, shared))}"
        )
    return seeds


def _seeds(given: int | Sequence[int], first: int, name: str) -> tuple[int, ...]:
    if isinstance(given, int):
        if not 0 <= given <= _MOST_SEEDS:
            raise ConfigError(
                f"the number of {name} must be from 0 to {_MOST_SEEDS}; got {given} (name two"
                " seeds or more to choose them)"
            )
        return tuple(range(first, first + given))
    seeds = tuple(given)
    if len(set(seeds)) < len(seeds) or any(not 0 <= seed <= _MAX_SEED for seed in seeds):
        raise ConfigError(f"{name} must be different numbers of at least 0; got {list(seeds)}")
    return seeds
