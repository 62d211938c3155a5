"""Environments of several agents whose every number is known beforehand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

from rl_training.types import Array

DIES = {"a": 2, "b": 5, "c": 9}
"""The step after which the episode of each agent of `Mortals` ends."""
LENGTH = 7
"""The step at which the team of `Mortals` is truncated, those that live."""
APPEARS = 3
"""The step after which agent c of `Mortals` is there."""


class SoloCartPole(ParallelEnv):  # type: ignore[misc]
    """CartPole as an environment of one agent."""

    metadata = {"name": "solo"}
    possible_agents = ["pole"]

    def __init__(self) -> None:
        self._env = gym.make("CartPole-v1")
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._env.observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._env.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["pole"]
        obs, info = self._env.reset(seed=seed)
        return {"pole": obs}, {"pole": info}

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self._env.step(actions["pole"])
        if terminated or truncated:
            self.agents = []
        each = [{"pole": value} for value in (obs, reward, terminated, truncated, info)]
        return tuple(each)

    def close(self) -> None:
        self._env.close()


class Mortals(ParallelEnv):  # type: ignore[misc]
    """Observes (agent, step). Agent i receives 10 i + step; agents die, and one appears late."""

    metadata = {"name": "mortals"}
    possible_agents = ["a", "b", "c"]

    def __init__(self, masks: bool = False) -> None:
        self.agents: list[str] = []
        self.count = 0
        self.seen_actions: list[dict[str, int]] = []
        self._masks = masks

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def _obs(self, agents: Any) -> dict[str, Array]:
        index = self.possible_agents.index
        return {agent: np.array([index(agent), self.count], np.float32) for agent in agents}

    def _infos(self, agents: Any) -> dict[str, Any]:
        if not self._masks:
            return {agent: {} for agent in agents}
        # The action that counts the step is illegal.
        return {agent: {"action_mask": np.arange(3) != self.count % 3} for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.count = ["a", "b"], 0
        return self._obs(self.agents), self._infos(self.agents)

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        if self._masks:
            assert all(action != self.count % 3 for action in actions.values())
        self.seen_actions.append(dict(actions))
        self.count += 1
        living = self.agents
        rewards = {one: 10.0 * self.possible_agents.index(one) + self.count for one in living}
        terminated = {one: self.count == DIES[one] for one in living}
        truncated = dict.fromkeys(living, self.count == LENGTH)
        self.agents = [one for one in living if not (terminated[one] or truncated[one])]
        if self.count == APPEARS:
            self.agents = [*self.agents, "c"]
        seen = dict.fromkeys([*living, *self.agents])
        return self._obs(seen), rewards, terminated, truncated, self._infos(seen)

    def state(self) -> Array:
        return np.array([self.count, len(self.agents), 0.5, 7.0], np.float32)


class Duel(AECEnv):  # type: ignore[misc]
    """Two agents take turns and observe (agent, turn).

    The one that acts receives 1 and the other -0.25. An episode of ``length`` turns is terminated,
    or truncated if ``cut``.
    """

    metadata = {"name": "duel", "is_parallelizable": False}
    possible_agents = ["x", "y"]

    def __init__(self, length: int = 5, cut: bool = False) -> None:
        self.length, self.cut = length, cut
        self.turn = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict(
            {
                "observation": spaces.Box(0, 100, (2,), np.float32),
                "action_mask": spaces.Box(0, 1, (2,), np.int8),
            }
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> Any:
        seen = np.array([self.possible_agents.index(agent), self.turn], np.float32)
        mask = np.array([1, 1] if agent == self.agent_selection else [0, 0], np.int8)
        return {"observation": seen, "action_mask": mask}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.turn = 0
        self.agent_selection = "x"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        other = "y" if agent == "x" else "x"
        self.turn += 1
        self.rewards = {agent: 1.0, other: -0.25}
        if self.turn == self.length:
            ends = self.truncations if self.cut else self.terminations
            ends.update(dict.fromkeys(self.agents, True))
        self.agent_selection = other


class Relay(AECEnv):  # type: ignore[misc]
    """Three agents take turns; agent i leaves after its i-th turn, counted from 1.

    They observe nested dicts. Whoever acts in turn t gives t to the next living agent and to itself
    one tenth of it; who leaves receives 100 for it.
    """

    metadata = {"name": "relay", "is_parallelizable": False}
    possible_agents = ["p", "q", "r"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        inner = spaces.Dict({"turn": spaces.Box(0, 100, (1,), np.float32)})
        return spaces.Dict({"who": spaces.Discrete(3), "inner": inner})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> Any:
        turn = np.array([self.turn], np.float32)
        return {"who": self.possible_agents.index(agent), "inner": {"turn": turn}}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.turn = 0
        self.agent_selection = "p"
        self.turns_of = dict.fromkeys(self.agents, 0)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self.turn += 1
        self.turns_of[agent] += 1
        order = self.agents
        following = order[(order.index(agent) + 1) % len(order)]
        self.rewards = dict.fromkeys(order, 0.0)
        self.rewards[following] += float(self.turn)
        self.rewards[agent] += self.turn / 10
        self.agent_selection = following
        if self.turns_of[agent] == self.possible_agents.index(agent) + 1:
            self.rewards[agent] += 100.0
            self.terminations[agent] = True
            self._deads_step_first()


class TwoSteps(ParallelEnv):  # type: ignore[misc]
    """The two-step game of the QMIX paper (arXiv:1803.11485, section 6.1).

    The first agent's action leads to one of two matrix games. In the first every joint action pays
    7, in the second 0, 1, 1 and 8. Agents observe which of the three states it is.
    """

    metadata = {"name": "two_steps"}
    possible_agents = ["first", "second"]
    PAYOFF = (((7.0, 7.0), (7.0, 7.0)), ((0.0, 1.0), (1.0, 8.0)))

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.now = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 1, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _each(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.now = list(self.possible_agents), 0
        return self._each(self.state()), self._each({})

    def step(self, actions: Any) -> Any:
        first, second = actions["first"], actions["second"]
        over = self.now > 0
        reward = self.PAYOFF[self.now - 1][first][second] if over else 0.0
        if over:
            self.agents = []
        else:
            self.now = 1 + first
        rewards = {"first": reward, "second": 0.0}
        return (
            self._each(self.state()), rewards, self._each(over), self._each(False), self._each({})
        )  # fmt: skip

    def state(self) -> Array:
        return np.array([self.now == state for state in range(3)], np.float32)


class Recall(AECEnv):  # type: ignore[misc]
    """Two agents take three turns each: they see a number, then nothing, and must then name it."""

    metadata = {"name": "recall", "is_parallelizable": True}
    possible_agents = ["x", "y"]
    render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> Any:
        count = self.turn // 2
        cue = 2.0 * self.cues[agent] - 1 if count == 0 else 0.0
        return np.array([cue, count / 3], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.cues = {agent: int(self._rng.integers(2)) for agent in self.agents}
        self.turn = 0
        self.agent_selection = "x"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.turn >= 4:
            self.rewards[agent] = 1.0 if action == self.cues[agent] else -1.0
        self.turn += 1
        self.agent_selection = "y" if agent == "x" else "x"
        if self.turn == 6:
            self.terminations = dict.fromkeys(self.agents, True)


def recall_at_once() -> ParallelEnv:
    """`Recall` as PettingZoo makes a parallel environment of it."""
    return aec_to_parallel(OrderEnforcingWrapper(AssertOutOfBoundsWrapper(Recall())))
