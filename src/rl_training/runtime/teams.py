"""Algorithms for several agents on the shared runtime: one policy, or one for each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.grouped import GroupedLearner
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.data.grouped_rollout import GroupedRollout
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.models.central_actor_critic import own_spec
from rl_training.runtime.actors import Actor
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.self_play import source_of_games
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.trainer import Setup
from rl_training.seeding import stream_seed
from rl_training.types import (
    ActionSpec,
    Array,
    GroupedObsSpec,
    Obs,
    ObsSpec,
    Progress,
    specs_of_groups,
)


class GroupedActor:
    """Chooses the actions of every group with the group's own actor."""

    def __init__(self, groups: Mapping[str, Actor]) -> None:
        self._groups = dict(groups)
        self._sizes: list[int] = []
        """Rows of each group; empty before the first action."""

    def act(self, obs: Any, progress: Progress) -> tuple[Any, Mapping[str, Any]]:
        """Return actions and records by group, for observations by group."""
        chosen = {name: actor.act(obs[name], progress) for name, actor in self._groups.items()}
        self._sizes = [len(action) for action, _ in chosen.values()]
        actions = {name: action for name, (action, _) in chosen.items()}
        return actions, {name: record for name, (_, record) in chosen.items()}

    def reset(self, done: Array) -> None:
        """Reset the recurrent states of rows, given for the rows of all groups."""
        if not self._sizes:
            return
        ends = np.cumsum(self._sizes)[:-1]
        for actor, own in zip(self._groups.values(), np.split(done, ends), strict=True):
            actor.reset(own)

    def record(self, names: frozenset[str]) -> None:
        """Record these with every step from now on."""
        for actor in self._groups.values():
            actor.record(names)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every group's actor."""
        return {"groups": {name: actor.state_dict() for name, actor in self._groups.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        for name, actor in self._groups.items():
            actor.load_state_dict(state["groups"][name])


class TeamTrainer(OnPolicyTrainer):
    """The on-policy loop, with a rollout for each group."""

    def make_buffer(self, setup: Setup) -> Any:
        """Return storage for one rollout of a shard."""
        info = setup.source.info
        groups = specs_of_groups(info.obs_spec, info.action_spec)
        if not isinstance(info.obs_spec, GroupedObsSpec):
            buffer = super().make_buffer(setup)
            (buffer.agents,) = info.agents.values()
            return buffer
        envs = info.num_envs // info.rows_per_env
        buffers = {}
        for name, (obs_spec, action_spec) in groups.items():
            own = info._replace(
                obs_spec=obs_spec,
                action_spec=action_spec,
                num_envs=envs * len(info.agents[name]),
            )
            buffers[name] = self.make_buffer_of(RolloutBuffer, setup, info=own)
            buffers[name].agents = info.agents[name]
        return GroupedRollout(buffers)


class TeamPolicy(TrainedPolicy):
    """The policy of an agent, which needs no state of the team to act; or those of all groups.

    With several groups observations and actions are dicts by group.
    """

    def act(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the action for one observation, or actions for a batch of them, of each group."""
        if not isinstance(self.obs_spec, GroupedObsSpec):
            return super().act(obs, deterministic)
        specs = specs_of_groups(self.obs_spec, self.action_spec)
        if not isinstance(obs, Mapping) or set(obs) != set(specs):
            raise ConfigError(f"the observation must be a dict by group: {', '.join(specs)}")
        batches = {name: self._batch(specs[name][0], obs[name]) for name in specs}
        actor = self._greedy if deterministic else self._sampling
        batch: Any = {name: batch for name, (batch, _) in batches.items()}
        chosen: Any = self._choose(actor, batch)
        return {
            name: chosen[name][0] if single else chosen[name]
            for name, (_, single) in batches.items()
        }

    def _batch(self, spec: ObsSpec, obs: Any) -> tuple[Obs, bool]:
        return self.batch_of(own_spec(spec), obs)

    @property
    def acting_spec(self) -> ObsSpec:
        """The observations that `predict` takes: without the state of the team."""
        return own_spec(self.obs_spec)


def team_spec_of(
    spec: AlgorithmSpec,
    build: Callable[..., Any],
) -> AlgorithmSpec:
    """Return the spec of an algorithm for several agents, of one that learns the rows of a group.

    ``build`` makes the learner of one group.
    """

    def build_team(
        config: TrainConfig[Any],
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        device: torch.device,
        communicator: Communicator = ALONE,
    ) -> Any:
        groups = specs_of_groups(obs_spec, action_spec)
        learners = {
            name: build(group_config(config, i), *specs, device, communicator)
            for i, (name, specs) in enumerate(groups.items())
        }
        return GroupedLearner(learners) if isinstance(obs_spec, GroupedObsSpec) else learners[""]

    def actor(
        learner: Any, config: TrainConfig[Any], device: torch.device, shard: int = 0
    ) -> Actor:
        if not isinstance(learner, GroupedLearner):
            return spec.actor(learner, config, device, shard)
        return GroupedActor(
            {
                name: spec.actor(one, group_config(config, i), device, shard)
                for i, (name, one) in enumerate(learner.groups.items())
            }
        )

    def eval_actor(learner: Any, device: torch.device, sampling: torch.Generator | None) -> Actor:
        if not isinstance(learner, GroupedLearner):
            return spec.eval_actor(learner, device, sampling)
        groups = learner.groups.items()
        return GroupedActor({k: spec.eval_actor(one, device, sampling) for k, one in groups})

    return dataclasses.replace(
        spec,
        build=build_team,
        actor=actor,
        eval_actor=eval_actor,
        source=source_of_games,
        trainer=TeamTrainer,
        policy=TeamPolicy,
    )


def group_config(config: TrainConfig[Any], index: int) -> TrainConfig[Any]:
    """Return a run's config with random streams of a group; those of the first are the run's."""
    if not index:
        return config
    return config.with_overrides(seed=stream_seed(config.seed, "group", index))
