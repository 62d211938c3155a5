"""`TeamAdapter`: environments of several agents as rows, one per environment and agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rl_training.envs.adapter import VectorAdapter
from rl_training.envs.team_env import team_of
from rl_training.envs.team_layout import Group, TeamStep
from rl_training.errors import EnvironmentFailure
from rl_training.types import ACTION_MASK, Array, Episode, Obs, VectorStep


class TeamAdapter:
    """Steps environments of several agents and returns `VectorStep`s of their rows.

    The rows of a group of agents are together: those of the first environment, of the second, and
    so on. With several groups observations and actions are dicts by group. A row in which the agent
    does not act, because its episode has ended or it is another's turn, is not ``valid``. Episodes,
    and what restores them, are those of whole environments.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], seed: int, *, first_index: int = 0, shard: int = 0
    ) -> None:
        layout = team_of(env.metadata)
        assert layout is not None  # noqa: S101 - narrows the type
        self.teams = VectorAdapter(env, seed, first_index=first_index, shard=shard)
        """The environments."""
        self.layout = layout
        self.obs_spec, self.action_spec = layout.obs_spec, layout.action_spec
        self.agents = layout.agents
        self.num_envs = self.teams.num_envs * len(self.agents)
        """Number of rows."""
        self.first_index = first_index
        self.name = self.teams.name
        self.frame_stack = 1
        self.has_invalid_rows = layout.can_have_invalid_rows or self.teams.has_invalid_rows
        self.has_turns = self.layout.has_turns
        self.log_info = tuple(f"return_{agent}" for agent in self.agents)
        """Keys of the info at the end of an episode that are logged: the return of each agent."""
        self._masked: list[tuple[Group, slice]] = []
        """Groups with action masks, and their rows."""
        first = 0
        for group in layout.groups:
            end = first + self.teams.num_envs * len(group.agents)
            if group.obs_spec.has_mask:
                self._masked.append((group, slice(first, end)))
            first = end
        self._acts = np.ones(self.num_envs, bool)
        self._returns = np.zeros((self.teams.num_envs, len(self.agents)))
        """Rewards so far of each agent in the current episode of its environment."""
        self._on_episode: Callable[[int, dict[str, Any]], None] | None = None
        self._ended: list[tuple[int, dict[str, Any]]] = []
        """Episodes that ended in this step, with their last infos."""
        self._seen: Any = None
        """The last vectors of the environments."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes at a time: one per environment."""
        return self.teams.num_envs

    @property
    def acting(self) -> Array:
        """Rows whose action the next step takes."""
        return self._acts

    def episodes_so_far(self) -> tuple[Array, Array]:
        """Return the length and the summed rewards of each environment's current episode."""
        return self.teams.episodes_so_far()

    @property
    def episode_lengths(self) -> Array:
        """Steps so far of the current episode of each row's environment."""
        return self.layout.repeated(self.teams.episode_lengths)

    @property
    def has_time_limit(self) -> bool:
        """Whether a limit of the length of episodes is known."""
        return True  # games end; a limit of their own is not known to Gymnasium

    @property
    def limit_advice(self) -> str:
        """The setting that limits the length of episodes."""
        return self.teams.limit_advice

    @property
    def has_unrecorded_episodes(self) -> bool:
        """Whether an episode was too long to be recorded."""
        return self.teams.has_unrecorded_episodes

    @property
    def exactly_resumable(self) -> bool:
        """Whether the environments can be restored bit for bit."""
        return self.teams.exactly_resumable

    def reset(self) -> Obs:
        """Begin the first episode of every environment."""
        self._returns[:] = 0
        return self._shown(self.teams.reset())

    def reseed(self, seed: int) -> Obs:
        """Begin anew, as another run with another seed would."""
        self._returns[:] = 0
        return self._shown(self.teams.reseed(seed))

    def _shown(self, vectors: Any) -> Obs:
        self._seen = vectors
        now = self.layout.rows(vectors)
        obs: Obs = self._next(now).obs
        return obs

    def _next(self, now: TeamStep) -> TeamStep:
        """Remember who acts next."""
        self._acts = now.acts
        for group, rows in self._masked:
            obs = now.obs[group.name] if self.layout.is_grouped else now.obs
            self._check_choice(group, obs[ACTION_MASK], now.acts[rows])
        return now

    def _check_choice(self, group: Group, mask: Array, acts: Array) -> None:
        """Raise `EnvironmentFailure` where an agent that acts has nothing to choose."""
        stuck = np.flatnonzero(group.action_spec.without_choice(mask) & acts)
        if stuck.size:
            team, member = divmod(int(stuck[0]), len(group.agents))
            raise EnvironmentFailure(
                f"environment {self.first_index + team} ({self.name}) allows its agent"
                f" {group.agents[member]} no action: '{ACTION_MASK}' must be true for at least one"
                " action"
            )

    def step(self, action: Any) -> VectorStep:
        """Step with the policy actions of all rows; those of rows that do not act are ignored."""
        step = self.teams.step_with(self.layout.joined_actions(action, self.teams.num_envs))
        acted = self._acts
        if self.teams.has_invalid_rows:  # the environments reset in a step of their own
            acted = acted & self.layout.repeated(step.valid)
        after = self.layout.rows(step.final_obs)  # type: ignore[arg-type]
        truncated, terminated = after.truncated, after.terminated
        if step.truncated.any():  # by a wrapper, which knows of no agents
            cut = self.layout.repeated(step.truncated & ~step.terminated)
            truncated = truncated | (cut & after.alive)
        truncated = truncated & ~terminated
        now = after
        if (step.terminated | step.truncated).any():
            now = self.layout.rows(step.obs)  # type: ignore[arg-type]
        self._count_rewards(after.reward, step.episodes)
        self._seen = step.obs
        following = self._next(now)
        return VectorStep(
            obs=following.obs,
            final_obs=after.obs,
            reward=after.reward,
            terminated=terminated,
            truncated=truncated,
            valid=acted,
            episodes=step.episodes,
            waiting=(following.alive & ~following.acts) if self.has_turns else None,
        )

    def watch_episodes(self, on_episode: Callable[[int, dict[str, Any]], None]) -> None:
        """Call ``on_episode(env, info)`` at the end of each episode, with its last step's info.

        The returns of the agents are added to it, as ``return_AGENT``.
        """
        self._on_episode = on_episode
        self.teams.watch_episodes(lambda env, info: self._ended.append((env, info)))

    def _count_rewards(self, rewards: Array, episodes: Sequence[Episode]) -> None:
        """Add the rewards of a step to those of each agent's episode; notify of what ended."""
        self._returns += self.layout.by_team(rewards, self.teams.num_envs)
        for env, info in self._ended:
            if self._on_episode is not None:
                returns = zip(self.log_info, self._returns[env].tolist(), strict=True)
                self._on_episode(env, {**info, **dict(returns)})
        self._ended.clear()
        for episode in episodes:
            self._returns[episode.env] = 0

    def infos_reader(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that returns the info of each environment's last step until now."""
        return self.teams.infos_reader()

    def state_dict(self) -> dict[str, Any]:
        """Everything that restores the environments."""
        return {
            "teams": self.teams.state_dict(),
            "seen": self._seen,
            "returns": self._returns.copy(),
        }

    def load_state_dict(self, state: dict[str, Any], expected: Obs) -> tuple[Obs, bool]:
        """Restore the environments; return the rows' observations, and whether it is exact."""
        del expected  # part of what the environments have shown
        self._returns = np.array(state["returns"], np.float64)
        vectors, exact = self.teams.load_state_dict(state["teams"], np.asarray(state["seen"]))
        return self._shown(vectors), exact

    def close(self) -> None:
        """Close the environments."""
        self.teams.close()
