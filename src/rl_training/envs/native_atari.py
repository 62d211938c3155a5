"""Atari games by ale-py's own vector: the frames of `atari`, many consoles at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_training.envs.atari import needs_seed, sticky_probability
from rl_training.seeding import stream_seed
from rl_training.types import Array

if TYPE_CHECKING:
    from rl_training.config import AtariConfig

_UNLIMITED = 2**31 - 1


class NativeAtari(VectorEnv[Any, Any, Any]):
    """ale-py's vector of one game, with games seeded by us and played again to restore a state.

    `step` shows the end of a game, and `reset` with a ``reset_mask`` what comes then: a new game,
    or the same one where only a life was lost. The emulator has started most of those games by
    itself, beside stepping the others. Observations are fresh arrays in every step.
    """

    def __init__(
        self,
        spec: EnvSpec,
        env_kwargs: dict[str, Any],
        num_envs: int,
        atari: AtariConfig,
        first_index: int = 0,
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        kwargs = {**spec.kwargs, **env_kwargs}
        self._vector = AtariVectorEnv(
            kwargs["game"],
            num_envs,
            repeat_action_probability=sticky_probability(spec, atari),
            full_action_space=kwargs.get("full_action_space", False),
            max_num_frames_per_episode=_UNLIMITED,
            autoreset_mode=AutoresetMode.SAME_STEP,
            img_height=atari.screen_size,
            img_width=atari.screen_size,
            stack_num=atari.frame_stack,
            frameskip=atari.frame_skip,
            noop_max=atari.noop_max,
            reward_clipping=False,
            use_fire_reset=atari.fire_on_reset,
        )
        self.num_envs = num_envs
        self.single_observation_space = self._vector.single_observation_space
        self.single_action_space = self._vector.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {
            "autoreset_mode": AutoresetMode.DISABLED,
            "rl_training/whole_games": True,
            "rl_training/frame_stack": atari.frame_stack,
            "rl_training/fresh_observations": True,
        }
        self._atari = atari
        self._max_steps = atari.max_frames // atari.frame_skip
        self._first_index = first_index
        self._seed = 0
        self._games = np.zeros(num_envs, np.int64)
        self._scores = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._lives = np.zeros(num_envs, np.int64)
        self._over = np.zeros(num_envs, bool)
        self._started = np.zeros(num_envs, bool)
        self._obs: Any = None
        # Actions of all environments since the oldest seeded start that any of them depends on;
        # where in them each one's own start was, and which game that began.
        self._history: list[Array] = []
        self._seeded_at = np.zeros(num_envs, np.int64)
        self._seeded_game = np.zeros(num_envs, np.int64)
        self.restorable = atari.seed_interval > 0
        """Whether `get_state` holds what `set_state` needs."""

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start all games, as a new sequence, or those of a mask that are over."""
        if options is None or "reset_mask" not in options:
            self._seed = self._seed if seed is None else int(seed)
            self._games[:] = 0
            self._history.clear()
            everywhere = np.ones(self.num_envs, bool)
            self._start(everywhere, seeded=everywhere)
        else:
            over = self._over & np.asarray(options["reset_mask"], bool)
            if over.any():
                self._next_games(over)
        return self._obs, {}

    def _next_games(self, over: Array) -> None:
        self._games += over
        ago = len(self._history) - self._seeded_at
        seeded = over & needs_seed(ago, self._atari)
        starts = seeded | (over & ~self._started)
        if starts.any():
            self._start(starts, seeded)
        self._begin_counts(over)

    def _begin_counts(self, chosen: Array) -> None:
        self._scores[chosen] = 0.0
        self._lengths[chosen] = 0
        self._over[chosen] = False

    def _start(self, chosen: Array, seeded: Array) -> None:
        """Begin the current games of some environments, with seeds of our own or without."""
        self._seeded_at[seeded] = len(self._history)
        self._seeded_game[seeded] = self._games[seeded]
        seeds = [
            # Seeds are positive 32-bit integers there; -1 is none.
            max(1, stream_seed(self._seed, "environment", self._first_index + i, game) >> 32)
            if seeded[i]
            else -1
            for i, game in enumerate(self._games.tolist())
            if chosen[i]
        ]
        self._obs, told = self._vector.reset(
            seed=np.asarray(seeds, np.int64), options={"reset_mask": chosen}
        )
        self._lives[chosen] = told["lives"][chosen]
        self._begin_counts(chosen)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every game."""
        self.send(actions)
        return self.recv()

    def send(self, actions: Any) -> None:
        """Begin a step; :meth:`recv` waits for what it gives."""
        self._history.append(np.asarray(actions, np.uint8))
        self._vector.send(np.asarray(actions, np.int64))

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Return the results of the last actions; ``info`` has the scores of finished games."""
        obs, points, game_over, _, told = self._vector.recv()
        self._obs, self._started = obs, game_over
        if game_over.any():
            obs = obs.copy()
            obs[game_over] = told["final_obs"][game_over]
        reward = points.astype(np.float64)
        self._scores += reward
        self._lengths += 1
        lost = told["lives"] < self._lives
        self._lives[:] = told["lives"]
        truncated = ~game_over & (self._lengths >= self._max_steps)
        self._over = game_over | truncated
        terminated = game_over | lost if self._atari.terminal_on_life_loss else game_over.copy()
        info: dict[str, Any] = {"_life_lost": terminated & ~self._over}
        if self._over.any():
            scores = {"game_score": self._scores.copy(), "game_length": self._lengths.copy()}
            info |= {**scores, "_game_score": self._over.copy(), "_game_length": self._over.copy()}
            self._forget_old_games()
        if self._atari.clip_rewards:
            reward = np.sign(reward)
        return obs, reward, terminated, truncated, info

    def _forget_old_games(self) -> None:
        oldest = len(self._history) if not self.restorable else int(self._seeded_at.min())
        if oldest > len(self._history) // 2:
            del self._history[:oldest]
            self._seeded_at -= oldest

    def get_state(self) -> dict[str, Any]:
        """The games last seeded, and every action since the oldest of them began."""
        oldest = int(self._seeded_at.min())
        history = self._history[oldest:]
        return {
            "seed": self._seed,
            "seeded_game": self._seeded_game.copy(),
            "seeded_at": self._seeded_at - oldest,
            "history": np.stack(history) if history else np.zeros((0, self.num_envs), np.uint8),
        }

    def set_state(self, state: dict[str, Any]) -> Any:
        """Play again all since each environment was seeded; what they show then."""
        self._seed = int(state["seed"])
        seeded_at = np.array(state["seeded_at"], np.int64)
        everywhere = np.ones(self.num_envs, bool)
        self._history.clear()
        self._games = np.array(state["seeded_game"], np.int64)
        self._start(everywhere, seeded=everywhere)
        for row, actions in enumerate(np.asarray(state["history"]), start=1):
            self.step(actions)
            # Those seeded later play anything meanwhile, and start over when it is their turn.
            self.reset(options={"reset_mask": seeded_at < row})
            begin_now = seeded_at == row
            if begin_now.any():
                self._games[begin_now] = np.asarray(state["seeded_game"])[begin_now]
                self._start(begin_now, seeded=begin_now)
        return self._obs

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002 - Gymnasium's signature
        """Threads end with the vector."""
        self._vector.close()
