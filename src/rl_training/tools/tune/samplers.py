"""Optuna's samplers by name, one made anew for every trial."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_training.errors import ConfigError, did_you_mean
from rl_training.search_space import Range
from rl_training.seeding import stream_seed
from rl_training.tools.tune.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

SAMPLERS: Mapping[str, str] = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsgaii": "NSGAIISampler",
    "nsgaiii": "NSGAIIISampler",
    "brute_force": "BruteForceSampler",
    "grid": "BruteForceSampler",  # a GridSampler cannot be continued after the preset's own trial
}
"""Optuna's samplers by our names."""


def tries_all(sampler: str) -> bool:
    """Return whether a sampler tries each combination of a space once, and then ends."""
    return SAMPLERS[sampler] == "BruteForceSampler"


def check_sampler(sampler: str, space: Space) -> None:
    """Raise ConfigError if there is no such sampler, or if it cannot search a space."""
    if sampler not in SAMPLERS:
        raise ConfigError(f"unknown sampler {sampler!r}.{did_you_mean(sampler, SAMPLERS)}")
    if tries_all(sampler) and space.combinations is None:
        raise ConfigError(f"the sampler {sampler!r} needs a space of lists and whole numbers")
    if sampler == "cmaes" and not any(isinstance(one, Range) for one in space.values.values()):
        raise ConfigError("the sampler 'cmaes' needs a setting with a range: lists are drawn")


def make_sampler(sampler: str, sampler_seed: int, number: int) -> BaseSampler:
    """Return the sampler of a trial, seeded by its number: it needs no state of its own."""
    import optuna

    # QMC numbers its points in the study; they are of one sequence only with one seed.
    number = 0 if sampler == "qmc" else number
    seed = stream_seed(sampler_seed, "sampler", number) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some samplers are called experimental
        made: BaseSampler
        try:
            if sampler == "cmaes":
                from rl_training.tools.tune.cma_es import ReplayedCmaEs

                made = ReplayedCmaEs(seed=seed)
            else:
                made = getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed)
        except ImportError as error:
            raise ConfigError(
                f"the sampler {sampler!r} needs a package that is not installed: {error}"
            ) from None
    return made
