"""The two interfaces of PettingZoo behind one: who acts next, and what a step gave each agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class GameStep(NamedTuple):
    """What a step of a game gave; agents that are missing got nothing."""

    observations: Mapping[str, Any]
    """Of agents that act next or whose episode ended in this step."""
    rewards: Mapping[str, float]
    terminated: frozenset[str]
    """Agents whose episode ended in this step."""
    truncated: frozenset[str]
    infos: Mapping[str, Any]


class Game(Protocol):
    """A PettingZoo environment."""

    has_turns: bool
    """Whether agents act one after another."""
    acting: tuple[str, ...]
    """Agents whose actions the next step takes."""
    alive: frozenset[str]
    """Agents whose episode goes on."""

    def reset(self, seed: int | None, options: Any) -> GameStep:
        """Begin an episode."""
        ...

    def step(self, actions: Mapping[str, Any]) -> GameStep:
        """Take the actions of the agents that act."""
        ...


_RESULTS = {"reward": 1, "termination": 2, "truncation": 3}
"""What a step of the parallel API returns for every agent that acted, by its position."""


class ParallelGame:
    """PettingZoo's parallel API: all living agents act at once."""

    has_turns = False

    def __init__(self, env: Any) -> None:
        self._env = env
        self._possible = frozenset(env.possible_agents)
        self.acting: tuple[str, ...] = ()
        self.alive: frozenset[str] = frozenset()

    def reset(self, seed: int | None, options: Any) -> GameStep:
        """Begin an episode."""
        observations, infos = self._env.reset(seed=seed, options=options)
        self._now(self._env.agents)
        self._require("observation", observations, self.acting)
        return GameStep(observations, {}, frozenset(), frozenset(), infos)

    def step(self, actions: Mapping[str, Any]) -> GameStep:
        """Step all living agents."""
        result = self._env.step({agent: actions[agent] for agent in self.acting})
        observations, rewards, terminations, truncations, infos = result
        before = self.acting
        for what, given in _RESULTS.items():
            self._require(what, result[given], before)
        terminated = frozenset(agent for agent in before if terminations[agent])
        truncated = frozenset(agent for agent in before if truncations[agent])
        gone = terminated | truncated
        self._now([agent for agent in self._env.agents if agent not in gone])
        self._require("observation", observations, (*self.acting, *truncated))
        return GameStep(observations, rewards, terminated, truncated, infos)

    def _now(self, agents: Any) -> None:
        self.acting = tuple(agents)
        self.alive = frozenset(agents)
        if not self._possible.issuperset(self.acting):
            unknown = min(self.alive - self._possible)
            raise ValueError(f"its agents contain {unknown!r}, which is not in possible_agents")

    @staticmethod
    def _require(what: str, given: Mapping[str, Any], agents: tuple[str, ...]) -> None:
        """Raise ValueError unless every one of ``agents`` got something."""
        for agent in agents:
            if agent not in given:
                raise ValueError(f"it returned no {what} of agent {agent}")


class TurnGame:
    """PettingZoo's AEC API: agents act one after another, and receive rewards at any time."""

    has_turns = True

    def __init__(self, env: Any) -> None:
        self._env = env
        self.acting: tuple[str, ...] = ()
        self.alive: frozenset[str] = frozenset()

    def reset(self, seed: int | None, options: Any) -> GameStep:
        """Begin an episode."""
        self._env.reset(seed=seed, options=options)
        self.alive = frozenset(self._env.agents)
        return self._seen({}, frozenset(), frozenset())

    def step(self, actions: Mapping[str, Any]) -> GameStep:
        """Take the action of the agent whose turn it is."""
        env = self._env
        env.step(actions[self.acting[0]])
        rewards = dict(env.rewards)
        terminated = frozenset(agent for agent in self.alive if env.terminations.get(agent))
        truncated = frozenset(agent for agent in self.alive if env.truncations.get(agent))
        ended = {agent: self._observed(agent) for agent in terminated | truncated}
        while env.agents and self._is_over(env.agent_selection):
            env.step(None)  # what the API requires of an agent whose episode has ended
        self.alive = frozenset(env.agents) - terminated - truncated
        step = self._seen(rewards, terminated, truncated)
        return step._replace(observations={**step.observations, **ended})

    def _is_over(self, agent: str) -> bool:
        return bool(self._env.terminations[agent] or self._env.truncations[agent])

    def _observed(self, agent: str) -> Any:
        return self._env.observe(agent)

    def _seen(
        self, rewards: Mapping[str, float], terminated: frozenset[str], truncated: frozenset[str]
    ) -> GameStep:
        self.acting = (self._env.agent_selection,) if self.alive else ()
        observations = {agent: self._observed(agent) for agent in self.acting}
        return GameStep(observations, rewards, terminated, truncated, self._env.infos)


_CHECKS = ("OrderEnforcingWrapper", "AssertOutOfBoundsWrapper")
"""PettingZoo's wrappers that check the order of calls and the range of actions, and do no more."""


def without_checks(env: Any) -> Any:
    """Return an environment without the outermost `_CHECKS`.

    Games call an environment in order and with actions in its range, and each attribute of a game
    of turns, which every step reads often, would pass through all of them: a fifth of the time of a
    step of connect four.
    """
    while _is_own(env, "pettingzoo.utils.wrappers.", *_CHECKS):
        env = env.env
    return env


def _is_own(env: Any, module: str, *names: str) -> bool:
    """Whether an object is of a class of PettingZoo's, and not of one derived from it."""
    return type(env).__module__.startswith(module) and type(env).__name__ in names


def is_game(env: Any) -> bool:
    """Whether an object is an environment of PettingZoo's kind."""
    return hasattr(env, "possible_agents")


def game_of(env: Any) -> Game:
    """Return a PettingZoo environment behind the common interface.

    An environment of turns that PettingZoo presents as a parallel one loses its `_CHECKS`.
    """
    if hasattr(env, "agent_iter"):
        return TurnGame(env)
    if _is_own(env, "pettingzoo.utils.conversions", "aec_to_parallel_wrapper"):
        env.aec_env = without_checks(env.aec_env)
    return ParallelGame(env)
