"""Learning from a dataset alone: the loop counts updates, environments only evaluate."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from rl_training.config import TrainConfig
from rl_training.datasets.reading import Dataset
from rl_training.envs import EnvFn
from rl_training.errors import ConfigError
from rl_training.eval import make_eval_env
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.dataset_source import (
    DatasetSource,
    check_spaces_of,
    load_data,
    open_configured,
    specs_of,
)
from rl_training.runtime.experience import ReplayLearner
from rl_training.runtime.reporting import mean_losses
from rl_training.runtime.run_parts import Iteration, Setup
from rl_training.runtime.sources import env_info
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.trainer import Trainer
from rl_training.types import EnvInfo, Progress

_ITERATION = 500
"""Updates between reports."""
_MOST_FEATURES, _MOST_CHOICES = 10**8, 10**6


class OfflineTrainer(Trainer):
    """Makes updates on batches of a dataset; steps, intervals and schedules count updates."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(setup, callbacks)
        self._replay_learner: ReplayLearner = setup.learner
        source: Any = setup.source
        self.replay = load_data(source, setup)
        """The dataset."""
        self.iteration_steps = _ITERATION
        """Updates of one iteration; may be changed between iterations."""
        self._eval_interval = setup.config.eval_interval if setup.config.eval_episodes else 0

    @staticmethod
    def check(setup: Setup) -> None:
        """Load the dataset, so that whatever is wrong with it is found before a folder is made."""
        source: Any = setup.source
        load_data(source, setup)

    def round_up(self, total: int) -> int:
        """Return ``total``: any number of updates is possible."""
        return total

    def iterate(self, progress: Progress) -> Iteration | None:
        """Make the updates up to the next report; None where it paused on the way."""
        end = min(progress.step + self.iteration_steps, self.total)
        if self._eval_interval:
            end = min(end, (progress.step // self._eval_interval + 1) * self._eval_interval)
        missing = max(0, end - self.current_step())  # none if a stopped run got a nearer end
        with self.stopping.at("learn"):
            done = self._learn(self.replay, progress, self.pauses, updates=missing)
        self.reporter.notify_update(self.current_step(), done, self._mean_losses)
        if done < missing:
            return None
        return Iteration(self.current_step() - progress.step, self.learner.pop_metrics())

    def _mean_losses(self) -> dict[str, float]:
        return mean_losses(self._replay_learner.metric_sums())

    def policy_version(self) -> int:
        """Return the number of updates so far."""
        return self._replay_learner.num_updates

    def current_step(self) -> int:
        """Return the updates so far, also while `iterate` makes them."""
        return self._replay_learner.num_updates

    def counted(self) -> int:
        """Return the updates so far, those of an unfinished iteration included."""
        return self.current_step()

    def partial_state(self) -> dict[str, Any] | None:
        """How far the iteration got, and the metric sums since the last report."""
        updates = self.current_step() - self.global_step
        if not updates:
            return None
        return {"updates": updates, "metrics": self._replay_learner.metric_sums()}

    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Restore that."""
        self._replay_learner.load_metric_sums(state["metrics"])


def offline_spec(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Return the spec of an algorithm that learns from a dataset alone."""
    return dataclasses.replace(spec, trainer=OfflineTrainer)


def offline_source(config: TrainConfig[Any], env_fn: EnvFn | None) -> DatasetSource:
    """Return the dataset of a config as a source; its spaces must be those of the environment."""
    dataset = open_configured(config)
    _require_plausible_spaces(dataset)
    if env_fn is None and not config.env_id:
        return DatasetSource(dataset, EnvInfo(*specs_of(dataset), num_envs=1), config)
    env = make_eval_env(config, 1, env_fn)
    try:
        info = env_info(env)
    finally:
        env.close()
    check_spaces_of(dataset, info, _name_of_env(config, env_fn))
    return DatasetSource(dataset, info, config)


def _require_plausible_spaces(dataset: Dataset) -> None:
    """Refuse spaces for which no network can be made, before one is made."""
    obs_spec, action_spec = specs_of(dataset)
    features = sum(leaf.size for leaf in obs_spec.leaves.values())
    if features > _MOST_FEATURES or sum(action_spec.nvec) > _MOST_CHOICES:
        raise ConfigError(
            f"dataset {dataset.path}: its spaces are too large: {features:,} numbers in an"
            f" observation, {sum(action_spec.nvec):,} discrete actions"
        )


def _name_of_env(config: TrainConfig[Any], env_fn: EnvFn | None) -> str:
    return config.env_id if env_fn is None else "the environment of env_fn"


def prior_data(config: TrainConfig[Any], env_fn: EnvFn | None, info: EnvInfo) -> DatasetSource:
    """Return the dataset that a part of every batch comes from, beside a replay."""
    dataset = open_configured(config)
    check_spaces_of(dataset, info, _name_of_env(config, env_fn))
    return DatasetSource(dataset, info, config)


def with_environment(config: TrainConfig[Any], env_fn: EnvFn | None) -> TrainConfig[Any]:
    """Return the config of a run from a dataset with the environment that it is evaluated on.

    Unless one is given, it is the one that the dataset names, if it is registered here: no module
    that a dataset names is imported. Without one there are no evaluations.
    """
    if env_fn is not None or (config.is_given("env_id") and config.env_id):
        return config
    why = "env_id is empty"
    if not config.is_given("env_id"):
        dataset = open_configured(config)
        found, changes = _registered_id(dataset), dataset.env_changes
        if found and not changes:
            return config.with_overrides(env_id=found)
        why = "no environment is given, and the dataset names none that is registered here"
        if found:  # settings in a file could make an environment import anything
            why = f"the dataset was recorded in {found} with {changes}, which you must set yourself"
    if config.eval_episodes:
        warnings.warn(
            f"the policy will not be evaluated: {why}; set env_id, or eval_episodes: 0",
            stacklevel=4,
        )
    return config.with_overrides(env_id="", eval_episodes=0)


def _registered_id(dataset: Dataset) -> str:
    name = dataset.env_id
    return name if name is not None and name in gym.registry else ""
