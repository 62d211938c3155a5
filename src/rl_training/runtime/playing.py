"""Episodes stepped one at a time, moment by moment: for videos and windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np

from rl_training._internal.tree import tree_map
from rl_training.envs.team_env import team_of
from rl_training.envs.team_layout import TeamLayout
from rl_training.runtime.actors import HoldingActor
from rl_training.types import ActionSpec, ObsSpec, Progress

if TYPE_CHECKING:
    from rl_training.runtime.actors import Actor


@dataclasses.dataclass(frozen=True)
class Moment:
    """The state of an episode after a step, or after a reset (step 0)."""

    episode: int
    """Number of the episode, from 1."""
    step: int
    ret: float
    """Return so far; for Atari the raw score."""
    over: bool
    """Whether the episode ended."""
    last: bool
    """Whether this is the episode's last moment: it ended or reached ``max_steps``."""

    def caption(self) -> str:
        """Return the text above a picture."""
        return f"episode {self.episode}   step {self.step}   return {self.ret:.1f}"

    def result(self) -> str:
        """Return the line that is printed when the episode ends."""
        cut = "" if self.over else " (stopped by --max-steps)"
        return f"{episode_line(self.episode, self.ret, self.step)}{cut}\n"


def episode_line(episode: int, ret: float, steps: int) -> str:
    """Return the number, return and length of an episode in words."""
    return f"episode {episode}: return {ret:.2f} in {steps} step{'' if steps == 1 else 's'}"


class Player(Protocol):
    """Chooses actions."""

    def begin(self) -> None:
        """Reset for a new episode."""
        ...

    def act(self, obs: Any) -> Any:
        """Return the action for one observation, both in the environment's format."""
        ...


class ActorPlayer:
    """Chooses actions with an actor for one environment."""

    def __init__(self, actor: Actor, obs_spec: ObsSpec, action_spec: ActionSpec) -> None:
        self._actor = actor
        self._obs_spec = obs_spec
        self._action_spec = action_spec

    def begin(self) -> None:
        """Reset the recurrent state."""
        self._actor.reset(np.ones(1, bool))

    def act(self, obs: Any) -> Any:
        """Return the action for one observation, computed as a batch of one."""
        batch = tree_map(lambda leaf: leaf[None], self._obs_spec.cast(obs))
        action, _ = self._actor.act(batch, Progress(1, 1))
        return self._action_spec.to_env(action)[0]


class TeamPlayer:
    """Chooses the actions of every agent of a team with an actor."""

    def __init__(self, actor: Actor, layout: TeamLayout) -> None:
        self._actor = actor
        self._layout = layout

    def begin(self) -> None:
        """Reset the recurrent states."""
        self._actor.reset(np.ones(len(self._layout.agents), bool))

    def act(self, obs: Any) -> Any:
        """Return the actions of all agents, given the vector of a `TeamEnv`."""
        now = self._layout.rows(np.asarray(obs)[None])
        action, _ = self._actor.act(now.obs, Progress(1, 1))
        if isinstance(self._actor, HoldingActor):
            self._actor.hold(~now.acts)
        return self._layout.joined_actions(action, 1)[0]


def actor_player(
    actor: Actor, env: gym.Env[Any, Any], obs_spec: ObsSpec, action_spec: ActionSpec
) -> Player:
    """Return the player for an environment, of one agent or of several."""
    layout = team_of(env.metadata)
    if layout is None:
        return ActorPlayer(actor, obs_spec, action_spec)
    return TeamPlayer(actor, layout)


def shares(episodes: int, envs: int) -> list[int]:
    """Return the number of episodes of each environment, divided as in `evaluate_actor`."""
    share, rest = divmod(episodes, envs)
    return [share + (i < rest) for i in range(envs)]


def played(
    env: gym.Env[Any, Any], player: Player, count: int, *, first: int = 1, max_steps: int | None
) -> Iterator[Moment]:
    """Yield the moments of ``count`` episodes, each stopped after ``max_steps``."""
    for number in range(first, first + count):
        obs, _ = env.reset()
        player.begin()
        step, ret, last = 0, 0.0, False
        yield Moment(number, step, ret, over=False, last=False)
        while not last:
            obs, reward, terminated, truncated, info = env.step(player.act(obs))
            step, ret = step + 1, ret + float(reward)
            over = bool(terminated or truncated)
            last = over or step == max_steps
            if "game_score" in info:  # the raw score, which evaluation reports
                ret = float(info["game_score"])
            yield Moment(number, step, ret, over, last)
