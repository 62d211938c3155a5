"""Replay of teams: the rows of all agents of an environment are one transition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rl_training.data import finite
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.types import (
    TEAM_ALIVE,
    TEAM_STATE,
    ActionSpec,
    Array,
    Obs,
    ObsSpec,
    Rows,
    VectorStep,
)


def joint_specs(
    obs_spec: ObsSpec, action_spec: ActionSpec, num_agents: int
) -> tuple[ObsSpec, ActionSpec]:
    """Return the specs of a team's transition, given those of a row.

    What an agent observes and does is (agents, ...); what the team shares is there once.
    """
    leaves = {
        name: leaf
        if name in (TEAM_STATE, TEAM_ALIVE)
        else dataclasses.replace(leaf, shape=(num_agents, *leaf.shape))
        for name, leaf in obs_spec.leaves.items()
    }
    joint = dataclasses.replace(
        action_spec,
        kind="multi_discrete",
        shape=(num_agents,),
        nvec=action_spec.nvec * num_agents,
        start=action_spec.start * num_agents,
    )
    return ObsSpec(leaves), joint


def _any(of_agents: Array) -> Array:
    """Return in which teams something is true of an agent."""
    found: Array = np.logical_or.reduce(of_agents, axis=1)
    return found


class TeamReplay(ReplayBuffer):
    """A `ReplayBuffer` whose environments are teams; it takes the rows of their agents.

    Its reward is the sum over the agents that acted. A team has terminated where no agent is left
    whose value could be bootstrapped; where it was truncated, `TEAM_ALIVE` of its final observation
    is which agents lived until then. ``obs_spec`` and ``action_spec`` are those of a row,
    ``num_envs`` counts teams, and ``capacity`` transitions of teams.
    """

    members: Sequence[str] = ()
    """Names of the agents, for errors."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        **settings: Any,
    ) -> None:
        self.num_agents = obs_spec.leaves[TEAM_ALIVE].size
        specs = joint_specs(obs_spec, action_spec, self.num_agents)
        super().__init__(capacity, num_envs, *specs, **settings)

    def _by_team(self, rows: Array) -> Array:
        """Return rows of agents as (teams, agents, ...)."""
        return rows.reshape(self.num_envs, self.num_agents, *rows.shape[1:])

    def _joint(self, obs: Any) -> dict[str, Array]:
        """Return what teams observe, given the rows of their agents.

        Rows of agents that are gone are empty: what is shared is read from one that is not.
        """
        by_team = {name: self._by_team(leaf) for name, leaf in obs.items()}
        present = by_team[TEAM_ALIVE].any(-1).argmax(1)
        teams = np.arange(self.num_envs)
        shared = {k: by_team[k][teams, present] for k in (TEAM_STATE, TEAM_ALIVE) if k in by_team}
        return {**by_team, **shared}

    def add(self, obs: Obs, action: Array, record: Mapping[str, Tensor], step: VectorStep) -> None:
        """Append one step of every team, given as rows of agents."""
        acted = self._by_team(step.valid)
        final = self._joint(step.final_obs)
        alive = final[TEAM_ALIVE]
        over = ~_any(alive & ~self._by_team(step.truncated))
        can_bootstrap = _any(alive)
        joint = VectorStep(
            obs=final if step.obs is step.final_obs else self._joint(step.obs),
            final_obs=final,
            reward=np.where(acted, self._by_team(step.reward), 0.0).sum(1),
            terminated=over & ~can_bootstrap,
            truncated=over & can_bootstrap,
            valid=_any(acted),
            episodes=step.episodes,
        )
        super().add(self._joint(obs), self._by_team(action), record, joint)

    def resume_at(self, obs: Obs, *, exact: bool = True) -> None:
        """Continue from ``obs``, rows of agents, as `TransitionRing.resume_at` does."""
        super().resume_at(self._joint(obs), exact=exact)

    def newest_observations(self, count: int) -> Rows:
        """Return what the agents observed in the newest steps, and who of them lived, as rows."""
        newest, valid = super().newest_observations(count)
        lives = newest[TEAM_ALIVE] & valid[:, None]
        obs = {
            name: leaf.repeat_interleave(self.num_agents, 0)
            if name in (TEAM_STATE, TEAM_ALIVE)
            else leaf.flatten(0, 1)
            for name, leaf in newest.items()
        }
        return Rows(obs, lives.flatten())

    def check_finite(
        self, rows: int, first_step: int, episode_lengths: Array | None = None
    ) -> None:
        """Raise `NonFiniteError`; ``episode_lengths`` are those of the rows of agents."""
        own = None if episode_lengths is None else self._by_team(episode_lengths)[:, 0]
        super().check_finite(rows, first_step, own)

    def _newest_fields(self, count: int) -> list[finite.Field]:
        """Return the newest ``count`` rows, with observations of each agent apart."""
        fields: list[finite.Field] = []
        for field in super()._newest_fields(count):
            is_shared = any(field.name.endswith(f"[{key!r}]") for key in (TEAM_STATE, TEAM_ALIVE))
            if field.part not in (finite.OBSERVATION, finite.FINAL) or is_shared:
                fields.append(field)
                continue
            fields += [
                field._replace(
                    name=f"{field.name} of agent {self.members[i] if self.members else i}",
                    values=field.values[:, :, i],
                )
                for i in range(self.num_agents)
            ]
        return fields
