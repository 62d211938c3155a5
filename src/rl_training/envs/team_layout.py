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
OBSERVATION, AGENT, STATE, ALIVE = "observation", "agent", "state", "team_alive"
"""Keys of a row's observation: the agent's own, its number, and of the whole team the state and
which agents live."""
_FLAGS = ("acts", "alive", "terminated", "truncated")


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
    def _starts(self) -> list[int]:
        """Where the rows of each group begin, and where the last ones end."""
        sizes = [len(group.agents) * group.row_size for group in self.groups]
        return [0, *np.cumsum(sizes).tolist()]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return int(self._starts[-1] + len(self.agents) * (1 + len(_FLAGS)))

    @property
    def can_have_invalid_rows(self) -> bool:
        """Whether an agent may have nothing to do while its team goes on."""
        return len(self.agents) > 1

    @property
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
        mine = self.groups[group]
        position = self._starts[group] + member * mine.row_size
        for name, leaf in mine.obs_spec.leaves.items():
            end = position + leaf.size
            if name in parts:
                vector[position:end] = leaf.arranged(parts[name]).reshape(-1)
            position = end

    def put(self, vector: Array, agent: int, name: str, value: float) -> None:
        """Write the reward of an agent (its position in `agents`), or one of its flags."""
        column = 0 if name == "reward" else 1 + _FLAGS.index(name)
        vector[self._starts[-1] + len(self.agents) * column + agent] = value

    # -- rows of many teams --------------------------------------------------------------------

    def rows(self, vectors: Array) -> TeamStep:
        """Return the steps of a batch of teams, given their vectors."""
        teams = len(vectors)
        observed = {}
        for group, first, end in zip(self.groups, self._starts, self._starts[1:], strict=False):
            own = vectors[:, first:end].reshape(teams * len(group.agents), group.row_size)
            observed[group.name] = _observations(own, group.obs_spec)
        rest = vectors[:, self._starts[-1] :].reshape(teams, 1 + len(_FLAGS), len(self.agents))
        columns = self._by_group(rest.swapaxes(0, 1))
        flags = dict(zip(_FLAGS, columns[1:] > 0, strict=True))
        obs = observed if self.is_grouped else observed[self.groups[0].name]
        return TeamStep(obs=obs, reward=columns[0].astype(np.float64), **flags)

    def _by_group(self, each: Array) -> Array:
        """Return (columns, teams, agents) as (columns, rows)."""
        ends = np.cumsum([len(group.agents) for group in self.groups])[:-1]
        parts = np.split(each, ends, axis=2)
        return np.concatenate([part.reshape(len(each), -1) for part in parts], axis=1)

    def by_team(self, rows: Array, teams: int) -> Array:
        """Return a value of each row as (teams, agents)."""
        ends = np.cumsum([teams * len(group.agents) for group in self.groups])[:-1]
        return np.concatenate([part.reshape(teams, -1) for part in np.split(rows, ends)], axis=1)

    def repeated(self, of_teams: Array) -> Array:
        """Return a value of each team for each of its rows."""
        return np.concatenate([np.repeat(of_teams, len(group.agents)) for group in self.groups])

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


def _observations(rows: Array, spec: ObsSpec) -> Obs:
    if not spec.is_dict:
        return _stored(rows, spec.leaves[""])
    ends = np.cumsum([leaf.size for leaf in spec.leaves.values()])[:-1]
    parts = zip(np.split(rows, ends, axis=1), spec.leaves.items(), strict=True)
    return {name: _stored(part, leaf) for part, (name, leaf) in parts}


def _stored(rows: Array, leaf: ArraySpec) -> Array:
    array: Array = np.ascontiguousarray(rows, leaf.dtype).reshape(len(rows), *leaf.shape)
    return array
