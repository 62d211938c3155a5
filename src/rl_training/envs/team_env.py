"""A PettingZoo environment as one environment, a step of which is a step of the whole team."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from rl_training.envs import spaces
from rl_training.envs.team_games import Game, GameStep, game_of, is_game, without_checks
from rl_training.envs.team_layout import AGENT, OBSERVATION, TEAM, Group, TeamLayout
from rl_training.errors import ConfigError, did_you_mean
from rl_training.types import ACTION_MASK, TEAM_ALIVE, TEAM_STATE, Array, ArraySpec, ObsSpec

PREFIX = "pettingzoo"
"""What ids of PettingZoo's environments begin with, as in pettingzoo:mpe2/simple_spread_v3."""
_FAMILIES = {
    "classic": "pettingzoo.classic",
    "butterfly": "pettingzoo.butterfly",
    "sisl": "pettingzoo.sisl",
    "atari": "pettingzoo.atari",
    "mpe2": "mpe2",
}


@dataclasses.dataclass(frozen=True)
class TeamOptions:
    """What rows of a team contain besides the agent's own observation."""

    agent_id: bool = False
    """The number of the agent in its group, one-hot."""
    state: bool = False
    """The state of the whole team."""
    policies: Literal["shared", "separate"] = "shared"
    """Whether all agents are one group, or each is a group of its own."""
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """The agents of each group, in place of ``policies``."""
    observes_waiting: bool = False
    """Whether rows of agents that wait for their turn contain what they would see now: a wrapper
    may truncate the episode there."""
    alive: bool = False
    """Which agents live; of a team that was truncated, those that lived until then."""

    def grouped(self, agents: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the agents of each group, of all agents of an environment."""
        if not self.groups:
            shared = self.policies == "shared"
            return {"all": tuple(agents)} if shared else {agent: (agent,) for agent in agents}
        listed = [agent for members in self.groups.values() for agent in members]
        if sorted(listed) != sorted(agents) or not all(self.groups.values()):
            raise ConfigError(
                f"'algo_kwargs.groups' must list every agent once: {', '.join(agents)}; got"
                f" {', '.join(listed)}"
            )
        return {name: tuple(members) for name, members in self.groups.items()}


class TeamEnv(gym.Env[Array, Array]):
    """All agents of a PettingZoo environment, as one.

    The observation is the vector that its `TeamLayout` describes, the action the actions of all
    agents one after another, as numbers; those of agents that do not act are ignored. The reward is
    the sum over the agents.
    """

    def __init__(self, env: Any, options: TeamOptions) -> None:
        if not is_game(env):
            raise ConfigError(f"{type(env).__name__} is not a PettingZoo environment")
        env = without_checks(env)
        game = game_of(env)
        self._env: Any = env
        self._game: Game = game
        self.spec = EnvSpec(type(getattr(env, "unwrapped", env)).__name__)  # its name in messages
        agents = tuple(map(str, env.possible_agents))
        if not agents:
            raise ConfigError(f"{self.spec.id} has no agents: its possible_agents are empty")
        self._actions = {one: spaces.action_spec(env.action_space(one)) for one in agents}
        self._own_specs = {
            one: spaces.obs_spec(env.observation_space(one), self._actions[one]) for one in agents
        }
        has_masks = any(spec.has_mask for spec in self._own_specs.values())
        self._mask_in_info = not has_masks and self._masks_in_infos()
        self._options = dataclasses.replace(
            options, observes_waiting=options.observes_waiting and game.has_turns
        )
        self._joins = options.state and not _has_state(env)
        groups = options.grouped(agents)
        self._layout = TeamLayout(
            tuple(self._group(name, members) for name, members in groups.items()), game.has_turns
        )
        self._agents = self._layout.agents
        """Group by group."""
        self._masked = [group.obs_spec.has_mask for group in self._layout.groups]
        self._places = {
            agent: (number, member)
            for number, group in enumerate(self._layout.groups)
            for member, agent in enumerate(group.agents)
        }
        self.metadata = {**_plain_metadata(env), TEAM: self._layout}
        self.render_mode = getattr(env, "render_mode", None)
        low, high = -np.inf, np.inf
        self.observation_space = gym.spaces.Box(low, high, (self._layout.size,), np.float32)
        ends = np.cumsum([self._actions[agent].size for agent in self._agents]).tolist()
        self._action_parts = {
            agent: slice(first, end)
            for agent, first, end in zip(self._agents, [0, *ends], ends, strict=False)
        }
        self.action_space = gym.spaces.Box(low, high, (ends[-1],), np.float64)
        self._last: dict[str, Any] = {}
        """The last observation of each agent whose episode goes on, or ended in the last step."""

    def _masks_in_infos(self) -> bool:
        """Whether the infos of a reset contain action masks."""
        infos = self._game.reset(0, None).infos
        return any(ACTION_MASK in info for info in infos.values() if isinstance(info, Mapping))

    def _group(self, name: str, agents: tuple[str, ...]) -> Group:
        """Return a group, whose agents must have equal spaces."""
        first = agents[0]
        for agent in agents:
            for kind in ("observation_space", "action_space"):
                wanted, found = (getattr(self._env, kind)(one) for one in (first, agent))
                if wanted != found:
                    raise ConfigError(
                        f"agents that share a policy need equal spaces: {kind} of {first} is"
                        f" {wanted}, of {agent} {found}. Set policies: separate, or groups"
                    )
        return Group(name, agents, self._row_spec(first, len(agents)), self._actions[first])

    def _row_spec(self, agent: str, members: int) -> ObsSpec:
        own = self._own_specs[agent]
        more: dict[str, ArraySpec] = {}
        if self._mask_in_info:
            more[ACTION_MASK] = ArraySpec((sum(self._actions[agent].nvec),), "bool")
        if self._options.agent_id:
            more[AGENT] = ArraySpec((members,), "float32", nvec=(members,), start=(0,))
        if self._options.state:
            size = len(self._joined({})) if self._joins else int(np.size(self._env_state()))
            more[TEAM_STATE] = ArraySpec((size,), "float32")
        if self._options.alive:
            more[TEAM_ALIVE] = ArraySpec((members,), "bool")
        if not more:
            return own
        leaves = dict(own.leaves) if own.is_dict else {OBSERVATION: own.leaves[""]}
        if taken := leaves.keys() & more.keys():
            raise ConfigError(f"observations already have the key {min(taken)!r}")
        return ObsSpec({**leaves, **more})

    def _env_state(self) -> Any:
        if not getattr(self._env, "agents", None):
            self._game.reset(0, None)
        return self._env.state()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode of all agents."""
        super().reset(seed=seed)
        self._last.clear()
        return self._vector(self._game.reset(seed, options)), {}

    def step(self, action: Array) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the agents that act."""
        given: Array = np.asarray(action)
        acting, alive = self._game.acting, self._game.alive
        self._last = {agent: obs for agent, obs in self._last.items() if agent in alive}
        actions = {
            agent: self._decoded(agent, given[part])
            for agent, part in self._action_parts.items()
            if agent in acting
        }
        step = self._game.step(actions)
        total = float(sum(step.rewards.values()))
        over = not self._game.alive
        truncated = over and bool(step.truncated - step.terminated)
        return self._vector(step), total, over and not truncated, truncated, {}

    def _decoded(self, agent: str, numbers: Array) -> Any:
        """Return an agent's action in the form of its space."""
        spec = self._actions[agent]
        if spec.kind == "discrete":
            return int(numbers[0])
        return numbers.astype(spec.dtype).reshape(spec.shape)

    def _vector(self, step: GameStep) -> Array:
        layout, vector = self._layout, self._layout.empty()
        self._last.update(step.observations)
        acting, alive = self._game.acting, self._game.alive
        shared = self._shared(step)
        columns = layout.columns(vector)
        for index, (agent, (number, member)) in enumerate(self._places.items()):
            acts = agent in acting
            columns[:, index] = (
                float(step.rewards.get(agent, 0.0)),
                acts,
                agent in alive,
                agent in step.terminated,
                agent in step.truncated,
            )
            parts: dict[str, Any] = {}
            if agent in step.observations:
                parts = self._parts(agent, member, self._last[agent], step.infos, shared)
            elif self._options.observes_waiting and agent in alive:
                seen = self._env.observe(agent)
                parts = self._parts(agent, member, seen, step.infos, shared)
            if not acts and self._masked[number]:
                ends = agent in step.truncated and ACTION_MASK in parts
                if not ends or self._actions[agent].without_choice(parts[ACTION_MASK]):
                    parts[ACTION_MASK] = self._everything(agent)  # a policy evaluates all rows
            if parts:
                self._put(vector, agent, parts)
        return vector

    def _put(self, vector: Array, agent: str, parts: Mapping[str, Any]) -> None:
        try:
            self._layout.put_obs(vector, *self._places[agent], parts)
        except ValueError as error:
            raise ValueError(
                f"the observation of agent {agent} has another shape: {error}"
            ) from None

    def _everything(self, agent: str) -> Array:
        return np.ones(sum(self._actions[agent].nvec))

    def _parts(
        self,
        agent: str,
        member: int,
        obs: Any,
        infos: Mapping[str, Any],
        shared: Mapping[str, Array],
    ) -> dict[str, Any]:
        """Return the arrays of an agent's row."""
        parts: dict[str, Any] = self._own_specs[agent].parts(obs)
        if "" in parts and (self._mask_in_info or self._options.agent_id or shared):
            parts[OBSERVATION] = parts.pop("")
        if self._mask_in_info:
            info = infos.get(agent)
            mask = info.get(ACTION_MASK) if isinstance(info, Mapping) else None
            parts[ACTION_MASK] = self._everything(agent) if mask is None else mask
        if self._options.agent_id:
            parts[AGENT] = member
        return {**parts, **shared}

    def _shared(self, step: GameStep) -> dict[str, Array]:
        """Return the arrays that are equal in the rows of all agents."""
        shared = {TEAM_STATE: self._state()} if self._options.state else {}
        if self._options.alive:
            alive = self._game.alive or step.truncated - step.terminated
            shared[TEAM_ALIVE] = np.array([agent in alive for agent in self._agents])
        return shared

    def _state(self) -> Array:
        """Return the environment's own state, or else the observations of all agents, joined."""
        if self._joins:
            return self._joined(self._last)
        return np.asarray(self._env.state(), np.float32).reshape(-1)

    def _joined(self, observations: Mapping[str, Any]) -> Array:
        joined = []
        for agent, spec in self._own_specs.items():
            leaves = {k: leaf for k, leaf in spec.leaves.items() if k != ACTION_MASK}
            if agent not in observations:
                joined.append(np.zeros(sum(leaf.size for leaf in leaves.values()), np.float32))
                continue
            parts = spec.parts(observations[agent])
            joined += [leaf.arranged(parts[name]).reshape(-1) for name, leaf in leaves.items()]
        return np.concatenate(joined, dtype=np.float32)

    def render(self) -> Any:
        """Render the environment."""
        return self._env.render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def team_of(metadata: Mapping[str, Any]) -> TeamLayout | None:
    """Return the layout in an environment's metadata; None for a single agent."""
    layout = metadata.get(TEAM)
    return layout if isinstance(layout, TeamLayout) else None


def _plain_metadata(env: Any) -> dict[str, Any]:
    metadata = getattr(env, "metadata", None)
    return dict(metadata) if isinstance(metadata, Mapping) else {}


def _has_state(env: Any) -> bool:
    """Whether an environment has a state of its own."""
    try:
        if not getattr(env, "agents", None):
            env.reset(seed=0)
        env.state()
    except (NotImplementedError, AttributeError):
        return False
    return True


def is_pettingzoo(env: Any) -> bool:
    """Whether an object is an environment of PettingZoo's kind."""
    return not isinstance(env, gym.Env) and is_game(env)


# -- by id -----------------------------------------------------------------------------------------


def team_spec(name: str) -> EnvSpec:
    """Return the spec of ``FAMILY/NAME``, for example ``mpe2/simple_spread_v3``."""
    return EnvSpec(f"{PREFIX}:{name}", entry_point=f"{__name__}:make_team", kwargs={"name": name})


def is_team_spec(spec: Any) -> bool:
    """Whether a spec is one of `team_spec`."""
    return isinstance(spec, EnvSpec) and spec.id.startswith(f"{PREFIX}:")


def make_team(
    name: str, options: TeamOptions, render_mode: str | None = None, **kwargs: Any
) -> TeamEnv:
    """Make a PettingZoo environment by its family and name, as a `TeamEnv`."""
    family, _, module_name = name.partition("/")
    if family not in _FAMILIES or not module_name.isidentifier():
        raise ConfigError(
            f"no environment '{PREFIX}:{name}': ids are {PREFIX}:FAMILY/NAME, with the families"
            f" {', '.join(_FAMILIES)}.{did_you_mean(family, _FAMILIES)} Others are given in Python,"
            " with env_fn"
        )
    package = _FAMILIES[family]
    try:
        importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{PREFIX}:{name} needs the extra 'multiagent'; in the clone: pip install"
            " '.[multiagent]'"
        ) from None
    try:
        module = importlib.import_module(f"{package}.{module_name}")
    except ModuleNotFoundError as error:
        if error.name == f"{package}.{module_name}":
            raise ConfigError(f"no environment '{PREFIX}:{name}' in {package}") from None
        raise ConfigError(f"{PREFIX}:{name} needs {error.name}, which is not installed") from None
    make = getattr(module, "parallel_env", None) or module.env
    return TeamEnv(make(render_mode=render_mode, **kwargs), options)
