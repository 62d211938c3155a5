"""What a converted policy is compared with, and the statistics of ``VecNormalize``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.models.normalizer import EPSILON
from rl_training.runtime.policy import TrainedPolicy
from rl_training.tools.importing.plain_zip import read_arrays
from rl_training.types import Array

TOLERANCE = 1e-4
"""Largest difference of a Box action: in units of half its range, or of its size and at least 1
where it has no bounds. Other actions must be equal."""
MIN_ROWS = 10
_MAX_FILE = 1 << 30
_BATCH = 256


class Agreement(NamedTuple):
    """The comparison of a policy with a reference."""

    rows: int
    different_actions: int
    """Number of different actions in the reference: of one alone, agreement means little."""
    largest: float
    """Largest difference, in the units of `TOLERANCE`; 0 for actions that are not of a Box."""


def compare(policy: TrainedPolicy, reference: Path) -> Agreement:
    """Compare actions with those that Stable-Baselines3 chose.

    Raises:
        UserError: They differ, or the file does not fit the policy.
    """
    arrays = read_arrays(reference, ("observations", "actions"), _MAX_FILE)
    observations, expected = arrays["observations"], arrays["actions"]
    leaf, spec = policy.obs_spec.leaves[""], policy.action_spec
    if len(observations) != len(expected) or len(expected) < MIN_ROWS:
        raise UserError(
            f"{reference} has {len(observations)} observations and {len(expected)} actions; they"
            f" must be as many, and at least {MIN_ROWS}"
        )
    if observations.shape[1:] == leaf.shape != leaf.given_shape:  # channel first, as SB3 has them
        observations = leaf.returned(observations)
    if observations.shape[1:] != leaf.given_shape or expected.shape[1:] != spec.shape:
        raise UserError(
            f"{reference} has observations of shape {observations.shape[1:]} and actions of shape"
            f" {expected.shape[1:]}; those of the environment are {leaf.given_shape} and"
            f" {spec.shape}"
        )
    parts = [observations[i : i + _BATCH] for i in range(0, len(expected), _BATCH)]
    chosen: Array = np.concatenate([np.asarray(policy.act(part)) for part in parts])
    differences = _differences(policy, chosen, expected)
    if (wrong := int((differences > TOLERANCE).sum())) > 0:
        first = int(np.argmax(differences > TOLERANCE))
        raise UserError(
            f"the converted policy does not agree with {reference}: {wrong} of {len(expected)}"
            f" actions differ, the first in row {first}: {chosen[first]} here,"
            f" {expected[first]} there. Nothing was written. Were the observations normalised"
            " (--vecnormalize)? Is the reference of this model?"
        )
    different = len(np.unique(expected.reshape(len(expected), -1), axis=0))
    return Agreement(len(expected), different, float(differences.max()))


def _differences(policy: TrainedPolicy, chosen: Array, expected: Array) -> Array:
    """Return the largest difference within each action, in the units of `TOLERANCE`."""
    spec = policy.action_spec
    if spec.kind != "box":
        differ: Array = (chosen != expected).reshape(len(expected), -1).any(1)
        return differ.astype(float)
    low, high = (np.asarray(bounds, float).reshape(spec.shape) for bounds in (spec.low, spec.high))
    bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
    half = np.where(bounded, np.where(bounded, high, 1) / 2 - np.where(bounded, low, -1) / 2, 1)
    unit = np.where(bounded, half, np.maximum(1, np.abs(expected)))
    difference = np.abs(chosen.astype(float) - expected.astype(float)) / unit
    largest: Array = difference.reshape(len(expected), -1).max(1)
    return largest


@dataclasses.dataclass(frozen=True)
class ObsStatistics:
    """The statistics of observations of a ``VecNormalize``."""

    mean: Array
    var: Array
    count: float
    clip_obs: float
    epsilon: float

    def weights(self) -> dict[str, Tensor]:
        """Return the buffers of a normaliser that computes the same.

        It adds its own epsilon to the variance; the rest of theirs is part of the variance here.
        """
        mean, var = (torch.tensor(one, dtype=torch.float64) for one in (self.mean, self.var))
        var = (var + self.epsilon - EPSILON).clamp(min=0)
        count = torch.tensor(self.count, dtype=torch.float64)
        return {
            "count": count,
            "mean": mean,
            "m2": var * count,
            "shift": mean.float(),
            "scale": torch.rsqrt(var + EPSILON).float(),
        }


def read_statistics(path: Path, shape: tuple[int, ...]) -> ObsStatistics:
    """Read the statistics of observations of this shape.

    Raises:
        UserError: They are missing or impossible.
    """
    names = ("mean", "var", "count", "clip_obs", "epsilon")
    arrays = read_arrays(path, names, _MAX_FILE)
    for name in ("mean", "var"):
        if arrays[name].shape != shape:
            raise UserError(
                f"{path}: {name!r} has shape {arrays[name].shape}, and observations have {shape}"
            )
    numbers = {name: arrays[name] for name in names[2:]}
    for name, one in numbers.items():
        if one.shape != () or not float(one) > 0:
            raise UserError(f"{path}: {name!r} must be a number above 0")
    if bool((arrays["var"] < 0).any()):
        raise UserError(f"{path}: 'var' has numbers below 0")
    counts = (float(numbers[name]) for name in names[2:])
    return ObsStatistics(arrays["mean"], arrays["var"], *counts)
