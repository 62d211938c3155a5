"""CMA-ES without a pickle in the study: its state is computed from the trials.

Optuna's sampler stores its optimizer in the study as a pickle after every generation, and loads it
for the next trial. The optimizer is a function of the trials, so that it need not be stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cmaes
import numpy as np
from optuna._transform import _SearchSpaceTransform
from optuna.samplers import CmaEsSampler

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


class ReplayedCmaEs(CmaEsSampler):
    """Optuna's `CmaEsSampler` for maximisation, whose optimizer is told all generations anew.

    It samples what `CmaEsSampler` does, if no trial of a generation ends after the next one began;
    such a trial may replace another of its generation.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, warn_independent_sampling=False)
        self._transform: _SearchSpaceTransform

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample the settings that have a range."""
        if search_space:
            self._transform = _SearchSpaceTransform(search_space, transform_0_1=True)
        return super().sample_relative(study, trial, search_space)

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> cmaes.CMA:
        """Return the optimizer after all complete generations.

        The caller stores an optimizer only when it completes a generation, which is never after
        this.
        """
        transform, bounds = self._transform, self._transform.bounds
        # The optimizer's own random numbers are not used: the caller seeds them for each trial.
        optimizer = cmaes.CMA(
            mean=bounds.mean(axis=1),
            sigma=float(np.min(bounds[:, 1] - bounds[:, 0]) / 6),
            bounds=bounds,
            seed=0,
            n_max_resampling=10 * len(bounds),
        )
        while True:
            trials = self._get_solution_trials(completed_trials, optimizer.generation)
            if len(trials) < optimizer.population_size:
                return optimizer
            optimizer.tell(
                [
                    (transform.transform(one.params), -float(one.values[0]))
                    for one in trials[: optimizer.population_size]
                ]
            )
