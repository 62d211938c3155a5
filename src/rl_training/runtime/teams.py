"""Algorithms for several agents on the shared runtime: one policy, or one for each group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rl_training._internal.tree import tree_leaves
from rl_training.algorithms.grouped import GroupedLearner
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.data.grouped_rollout import GroupedRollout
from rl_training.data.recurrent_rollout_buffer import RecurrentRolloutBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.models.central_actor_critic import own_spec
from rl_training.runtime.actors import Actor, HoldingActor
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.policy import (
    RecurrentTrainedPolicy,
    TrainedPolicy,
    memory_before,
    refuse_bool,
)
from rl_training.runtime.recurrent_ppo_trainer import recurrent_actor, recurrent_eval_actor
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.trainer import Setup, Trainer
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
        self.actors = dict(groups)
        """The actor of each group."""
        self._sizes: list[int] = []
        """Rows of each group; empty before the first action."""

    def act(self, obs: Any, progress: Progress) -> tuple[Any, Mapping[str, Any]]:
        """Return actions and records by group, for observations by group."""
        chosen = {name: actor.act(obs[name], progress) for name, actor in self.actors.items()}
        self._sizes = [len(action) for action, _ in chosen.values()]
        actions = {name: action for name, (action, _) in chosen.items()}
        return actions, {name: record for name, (_, record) in chosen.items()}

    def reset(self, done: Array) -> None:
        """Reset the recurrent states of rows, given for the rows of all groups."""
        if not self._sizes:
            return
        for actor, own in zip(self.actors.values(), self._split(done), strict=True):
            actor.reset(own)

    def hold(self, rows: Array) -> None:
        """Set the recurrent states of rows to what they were before the last action."""
        for actor, own in zip(self.actors.values(), self._split(rows), strict=True):
            if isinstance(actor, HoldingActor):
                actor.hold(own)

    def _split(self, rows: Array) -> list[Array]:
        """Return the part of each group of an array of all rows."""
        return np.split(rows, np.cumsum(self._sizes)[:-1])

    def record(self, names: frozenset[str]) -> None:
        """Record these with every step from now on."""
        for actor in self.actors.values():
            actor.record(names)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every group's actor."""
        groups = {name: actor.state_dict() for name, actor in self.actors.items()}
        return {"groups": groups, "rows": list(self._sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._sizes = [int(rows) for rows in state.get("rows", ())]
        for name, actor in self.actors.items():
            actor.load_state_dict(state["groups"][name])


class TeamTrainer(OnPolicyTrainer):
    """The on-policy loop, with a rollout for each group."""

    def make_buffer(self, setup: Setup) -> Any:
        """Return storage for one rollout of a shard."""
        info = setup.source.info
        groups = specs_of_groups(info.obs_spec, info.action_spec)
        kind: Any = RolloutBuffer
        if setup.config.has_memory:
            length = setup.config.algo_kwargs.sequence_length
            kind = functools.partial(RecurrentRolloutBuffer, sequence_length=length)
        if not isinstance(info.obs_spec, GroupedObsSpec):
            buffer = self.make_buffer_of(kind, setup)
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
            buffers[name] = self.make_buffer_of(kind, setup, info=own)
            buffers[name].agents = info.agents[name]
        return GroupedRollout(buffers)


class _TeamSpaces(TrainedPolicy):
    """What the policies of agents observe: no state of the team; of several groups, dicts."""

    @property
    def acting_spec(self) -> ObsSpec:
        """The observations that `predict` takes: without the state of the team."""
        return self._own(self.obs_spec)

    def _own(self, spec: ObsSpec) -> ObsSpec:
        return own_spec(spec) if self.config.algo_kwargs.uses_state else spec

    @property
    def _is_grouped(self) -> bool:
        return isinstance(self.obs_spec, GroupedObsSpec)

    def _batches(self, obs: Any) -> dict[str, tuple[Obs, bool]]:
        """Return a batch of each group, and whether a single observation was given."""
        specs = specs_of_groups(self.obs_spec, self.action_spec)
        self._require_groups(obs, "the observation")
        return {name: self.batch_of(self._own(specs[name][0]), obs[name]) for name in specs}

    def _require_groups(self, given: Any, what: str) -> None:
        names = specs_of_groups(self.obs_spec, self.action_spec)
        if not isinstance(given, Mapping) or set(given) != set(names):
            raise ConfigError(f"{what} must be a dict by group: {', '.join(names)}")


class TeamPolicy(_TeamSpaces):
    """The policy of an agent, which needs no state of the team to act; or those of all groups.

    With several groups observations and actions are dicts by group.
    """

    def act(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the action for one observation, or actions for a batch of them, of each group."""
        if not self._is_grouped:
            return super().act(obs, deterministic)
        batches = self._batches(obs)
        actor = self._greedy if deterministic else self._sampling
        batch: Any = {name: batch for name, (batch, _) in batches.items()}
        chosen: Any = self._choose(actor, batch)
        return {
            name: chosen[name][0] if single else chosen[name]
            for name, (_, single) in batches.items()
        }


class RecurrentTeamPolicy(_TeamSpaces, RecurrentTrainedPolicy):
    """The recurrent policy of an agent, or those of all groups.

    With several groups observations, actions and states are dicts by group.
    """

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, Any]:
        """Return the action, or actions for a batch, and the next state, of each group.

        ``state`` is what the last call returned; None is the state at the start of an episode, and
        so is any state where ``episode_start`` is true: a value for all groups, or a dict by group.
        """
        if not self._is_grouped:
            return super().predict(obs, state, episode_start, deterministic)
        refuse_bool(state)
        batches = self._batches(obs)
        actor = self._greedy if deterministic else self._sampling
        for value, what in ((state, "state"), (episode_start, "episode_start")):
            if isinstance(value, Mapping) or (what == "state" and value is not None):
                self._require_groups(value, what)
        for name, (batch, single) in batches.items():
            rows = len(tree_leaves(batch)[0])
            size = self.algorithm.groups[name].module.state_size
            before = None if state is None else state[name]
            starts = episode_start[name] if isinstance(episode_start, Mapping) else episode_start
            memory = memory_before(before, starts, rows, size, single=single, group=name)
            actor.actors[name].memory.set(memory)
        everything: Any = {name: batch for name, (batch, _) in batches.items()}
        chosen: Any = self._choose(actor, everything)
        actions, after = {}, {}
        for name, (_, single) in batches.items():
            own = torch.as_tensor(actor.actors[name].memory.state).cpu().numpy().copy()
            first = 0 if single else slice(None)
            actions[name], after[name] = chosen[name][first], own[first]
        return actions, after


def team_policy(
    spec: AlgorithmSpec, config: TrainConfig[Any], *arguments: Any
) -> TeamPolicy | RecurrentTeamPolicy:
    """Return the trained policy of a run, recurrent if its config says so."""
    kind: Any = RecurrentTeamPolicy if config.has_memory else TeamPolicy
    policy: TeamPolicy | RecurrentTeamPolicy = kind(spec, config, *arguments)
    return policy


def team_spec_of(
    spec: AlgorithmSpec,
    build: Callable[..., Any],
    *,
    trainer: type[Trainer] = TeamTrainer,
    grouped: type[GroupedLearner] = GroupedLearner,
) -> AlgorithmSpec:
    """Return the spec of an algorithm for several agents, of one that learns the rows of a group.

    ``build`` makes the learner of one group, ``grouped`` joins those of several.
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
        return grouped(learners) if isinstance(obs_spec, GroupedObsSpec) else learners[""]

    def actor_of(learner: Any, config: TrainConfig[Any], device: torch.device, shard: int) -> Actor:
        make = recurrent_actor if config.has_memory else spec.actor
        return make(learner, config, device, shard)

    def actor(
        learner: Any, config: TrainConfig[Any], device: torch.device, shard: int = 0
    ) -> Actor:
        if not isinstance(learner, GroupedLearner):
            return actor_of(learner, config, device, shard)
        return GroupedActor(
            {
                name: actor_of(one, group_config(config, i), device, shard)
                for i, (name, one) in enumerate(learner.groups.items())
            }
        )

    def eval_actor_of(
        learner: Any, device: torch.device, sampling: torch.Generator | None
    ) -> Actor:
        make = recurrent_eval_actor if learner.config.has_memory else spec.eval_actor
        return make(learner, device, sampling)

    def eval_actor(learner: Any, device: torch.device, sampling: torch.Generator | None) -> Actor:
        if not isinstance(learner, GroupedLearner):
            return eval_actor_of(learner, device, sampling)
        groups = learner.groups.items()
        return GroupedActor({k: eval_actor_of(one, device, sampling) for k, one in groups})

    return dataclasses.replace(
        spec,
        build=build_team,
        actor=actor,
        eval_actor=eval_actor,
        trainer=trainer,
        policy=team_policy,
        with_memory=None,
    )


def group_config(config: TrainConfig[Any], index: int) -> TrainConfig[Any]:
    """Return a run's config with random streams of a group; those of the first are the run's."""
    if not index:
        return config
    return config.with_overrides(seed=stream_seed(config.seed, "group", index))
