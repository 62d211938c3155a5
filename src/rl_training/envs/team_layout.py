"""A team's step as one vector: what each agent observes and receives, and whose turn is next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rl_training.types import (
    ActionSpec,
    Array,
    ArraySpec,
    GroupedActionSpec,
    GroupedObsSpec,
    Obs,
    ObsSpec,
)

TEAM = "rl_training/team"
"""Key of a `TeamLayout` in the metadata of an environment."""
OBSERVATION, AGENT = "observation", "agent"
"""Keys of a row's observation: the agent's own, and its number."""
_COLUMNS = ("reward", "acts", "alive", "terminated", "truncated")
"""What a step holds of each agent besides its observation."""


class TeamStep(NamedTuple):
    """A step of every team, as rows: one per team and agent.

    The rows of a group are together; within a group those of a team are, the agents in order.
    """

    obs: Any
    """Observations of the rows; of several groups, by the group's name."""
    reward: Array
    acts: Array
    """Agents whose action the next step takes."""
    alive: Array
    """Agents whose episode goes on, whether or not it is their turn."""
    terminated: Array
    """Agents whose episode ended in this step."""
    truncated: Array


class Group(NamedTuple):
    """Agents that share a policy."""

    name: str
    agents: tuple[str, ...]
    obs_spec: ObsSpec
    """Of a row."""
    action_spec: ActionSpec

    @property
    def row_size(self) -> int:
        """Length of the vector of a row."""
        return sum(leaf.size for leaf in self.obs_spec.leaves.values())


@dataclasses.dataclass(frozen=True)
class TeamLayout:
    """Where a vector of float32 holds the parts of a team's step.

    Environments exchange one array per step, so that teams can use the vectors, worker processes
    and recorded episodes of single agents. Bytes and small integers are exact in float32.
    """

    groups: tuple[Group, ...]
    has_turns: bool
    """Whether agents act one after another."""

    @functools.cached_property
    def agents(self) -> tuple[str, ...]:
        """All agents, group by group."""
        return tuple(agent for group in self.groups for agent in group.agents)

    @functools.cached_property
    def _row_sizes(self) -> list[int]:
        return [group.row_size for group in self.groups]

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Where the rows of each group begin, and where the last ones end."""
        pairs = zip(self.groups, self._row_sizes, strict=True)
        return [0, *np.cumsum([len(group.agents) * size for group, size in pairs]).tolist()]

    @functools.cached_property
    def size(self) -> int:
        """Length of the vector."""
        return int(self._starts[-1] + len(self.agents) * len(_COLUMNS))

    @functools.cached_property
    def _leaves(self) -> list[list[tuple[str, ArraySpec, int, int]]]:
        """The arrays of a row of each group: name, spec, and where it begins and ends."""
        found = []
        for group in self.groups:
            ends = np.cumsum([leaf.size for leaf in group.obs_spec.leaves.values()]).tolist()
            leaves, starts = group.obs_spec.leaves.items(), [0, *ends]
            places = zip(leaves, starts, ends, strict=False)
            found.append([(name, leaf, first, end) for (name, leaf), first, end in places])
        return found

    @functools.cached_property
    def _orders(self) -> dict[int, Array]:
        return {}

    def _order(self, teams: int) -> Array:
        """Return which of (teams, agents), flattened, each row is."""
        if teams not in self._orders:
            each = np.arange(teams * len(self.agents)).reshape(teams, -1)
            ends = np.cumsum([len(group.agents) for group in self.groups])[:-1]
            parts = [part.reshape(-1) for part in np.split(each, ends, axis=1)]
            self._orders[teams] = np.concatenate(parts)
        return self._orders[teams]

    def _is_in_order(self, teams: int) -> bool:
        """Whether the rows are in the order of (teams, agents)."""
        return teams == 1 or not self.is_grouped

    @functools.cached_property
    def can_have_invalid_rows(self) -> bool:
        """Whether an agent may have nothing to do while its team goes on."""
        return len(self.agents) > 1

    @functools.cached_property
    def is_grouped(self) -> bool:
        """Whether there is more than one group."""
        return len(self.groups) > 1

    @property
    def obs_spec(self) -> ObsSpec:
        """What the rows observe."""
        if not self.is_grouped:
            return self.groups[0].obs_spec
        return GroupedObsSpec.of({group.name: group.obs_spec for group in self.groups})

    @property
    def action_spec(self) -> ActionSpec:
        """How the rows act."""
        if not self.is_grouped:
            return self.groups[0].action_spec
        return GroupedActionSpec.of({group.name: group.action_spec for group in self.groups})

    # -- one team ------------------------------------------------------------------------------

    def empty(self) -> Array:
        """Return the vector of a step in which nobody observes, receives or does anything."""
        return np.zeros(self.size, np.float32)

    def put_obs(self, vector: Array, group: int, member: int, parts: Mapping[str, Any]) -> None:
        """Write arrays of an agent's observation, as the environment returned them."""
        position = self._starts[group] + member * self._row_sizes[group]
        for name, leaf, first, end in self._leaves[group]:
            if name in parts:
                array = leaf.arranged(parts[name])
                vector[position + first : position + end] = array.reshape(-1)

    def columns(self, vector: Array) -> Array:
        """Return the part of a vector that holds the reward and the flags of each agent, to write.

        Its rows are reward, acts, alive, terminated and truncated; its columns those of `agents`.
        """
        return vector[self._starts[-1] :].reshape(len(_COLUMNS), -1)

    # -- rows of many teams --------------------------------------------------------------------

    def rows(self, vectors: Array) -> TeamStep:
        """Return the steps of a batch of teams, given their vectors."""
        teams = len(vectors)
        observed = {
            group.name: _observations(
                vectors[:, first:end].reshape(teams * len(group.agents), -1), group.obs_spec, leaves
            )
            for group, first, end, leaves in zip(
                self.groups, self._starts, self._starts[1:], self._leaves, strict=False
            )
        }
        rest = vectors[:, self._starts[-1] :].reshape(teams, len(_COLUMNS), -1)
        columns = rest.swapaxes(0, 1).reshape(len(_COLUMNS), -1)
        if not self._is_in_order(teams):
            columns = columns[:, self._order(teams)]
        obs = observed if self.is_grouped else observed[self.groups[0].name]
        return TeamStep(obs, columns[0].astype(np.float64), *(columns[1:] > 0))

    def by_team(self, rows: Array, teams: int) -> Array:
        """Return a value of each row as (teams, agents)."""
        if self._is_in_order(teams):
            return rows.reshape(teams, -1)
        each = np.empty_like(rows)
        each[self._order(teams)] = rows
        return each.reshape(teams, -1)

    def repeated(self, of_teams: Array) -> Array:
        """Return a value of each team for each of its rows."""
        each = np.repeat(of_teams, len(self.agents))
        return each if self._is_in_order(len(of_teams)) else each[self._order(len(of_teams))]

    def joined_actions(self, actions: Any, teams: int) -> Array:
        """Return the policy actions of all rows as `TeamEnv` takes them, one row per team."""
        by_group = actions if self.is_grouped else {self.groups[0].name: actions}
        parts = [
            np.asarray(group.action_spec.to_env(by_group[group.name]), np.float64).reshape(
                teams, -1
            )
            for group in self.groups
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _observations(rows: Array, spec: ObsSpec, leaves: list[tuple[str, ArraySpec, int, int]]) -> Obs:
    if not spec.is_dict:
        return _stored(rows, spec.leaves[""])
    return {name: _stored(rows[:, first:end], leaf) for name, leaf, first, end in leaves}


def _stored(rows: Array, leaf: ArraySpec) -> Array:
    array: Array = np.ascontiguousarray(rows, leaf.dtype).reshape(len(rows), *leaf.shape)
    return array
