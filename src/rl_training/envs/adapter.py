"""`VectorAdapter`: one way to step environments, right under every autoreset mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.envs import checks, spaces
from rl_training.envs.episodes import Restored
from rl_training.envs.time_limits import vector_advice, vector_has_time_limit
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import ConfigError, EnvironmentFailure
from rl_training.seeding import shard_key, stream_seed
from rl_training.types import ACTION_MASK, Array, Episode, Obs, OutsideSpaceError, VectorStep

_NATIVE_STATE: dict[type, tuple[str, ...]] = {CartPoleVectorEnv: ("state", "steps", "prev_done")}
"""Native vectors whose state is these arrays and their random generator."""
_NEVER = 2**62
_OF_RESETS = ("final_obs", "final_info")


class VectorAdapter:
    """Steps a Gymnasium vector environment of any autoreset mode and returns `VectorStep`s."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], seed: int, *, first_index: int = 0, shard: int = 0
    ) -> None:
        self.env = env
        self.first_index = first_index
        """Index of the first of these environments in the run."""
        self.num_envs = env.num_envs
        self.name = str(env.metadata.get("rl_training/name") or checks.name_of(env))
        """Id of the environment, or the name of its class."""
        self.action_spec = spaces.action_spec(env.single_action_space)
        self.obs_spec = spaces.obs_spec(env.single_observation_space, self.action_spec)
        self.mode = _autoreset_mode(env)
        self.has_invalid_rows = self.mode is AutoresetMode.NEXT_STEP
        self.frame_stack = int(env.metadata.get("rl_training/frame_stack", 1))
        """Images that an observation stacks: each shows again all but the oldest of the last."""
        self.has_time_limit = vector_has_time_limit(env)
        """Whether a limit of the length of episodes is known."""
        self.limit_advice = vector_advice(env)
        """The setting that limits the length of episodes."""
        self._counts_games = bool(env.metadata.get("rl_training/whole_games", False))
        self._cast: Callable[[Any], Obs] = self._stored
        if env.metadata.get("rl_training/fresh_observations", False):
            self._cast = lambda obs: obs
        self._seed = seed
        self._valid = np.ones(self.num_envs, bool)
        self._none_done = np.zeros(self.num_envs, bool)
        self._pending_reset = np.zeros(self.num_envs, bool)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._last_info: Mapping[str, Any] = {}
        self._last_done = self._none_done
        self._on_episode: Callable[[int, dict[str, Any]], None] | None = None
        self._state = _StateAccess(env, shard)
        self._max_recorded = int(env.metadata.get("rl_training/max_recorded_steps", _NEVER))
        self._steps = 0
        self._check_lengths_at = self._max_recorded
        self.has_unrecorded_episodes = False
        """Whether an episode was longer than `max_recorded_steps` allows to record.

        A resume of the run may be approximate from then on; it stays True for the run's life.
        """

    @property
    def episode_lengths(self) -> Array:
        """Steps so far of each environment's current episode."""
        return self._lengths.copy()

    @property
    def num_episodes(self) -> int:
        """Number of episodes at a time: one per environment."""
        return self.num_envs

    def episodes_so_far(self) -> tuple[Array, Array]:
        """Return the length and the summed rewards of each environment's current episode."""
        return self._lengths.copy(), self._returns.copy()

    def reset(self) -> Obs:
        """Begin the first episode of every environment."""
        obs, _ = self._state.first_reset(self._seed)
        self._steps = 0
        return self._begin(obs)

    def _begin(self, obs: Any) -> Obs:
        """Count from the first observations of new episodes."""
        self._returns[:] = 0
        self._lengths[:] = 0
        self._pending_reset = self._none_done
        self._check_lengths_at = self._steps + self._max_recorded
        first = self._cast(obs)
        self._check_choice(first, self._valid)
        return first

    def reseed(self, seed: int) -> Obs:
        """Begin anew, as another run with another seed would."""
        self._seed = seed
        self._state.reseed(seed)
        self._max_recorded = _NEVER  # only evaluation does this, and it is never resumed
        return self.reset()

    def step(self, action: Array) -> VectorStep:
        """Step with policy actions (see `ActionSpec`); resets happen underneath."""
        return self._digest(*self.env.step(self.action_spec.to_env(action)))

    def step_with(self, actions: Array) -> VectorStep:
        """Step with actions as the environments take them."""
        return self._digest(*self.env.step(actions))

    def send(self, action: Array) -> None:
        """Begin a step of an environment that can be waited for (`NativeAtari`)."""
        self.env.send(self.action_spec.to_env(action))  # type: ignore[attr-defined]

    def recv(self) -> VectorStep:
        """The step that :meth:`send` began."""
        return self._digest(*self.env.recv())  # type: ignore[attr-defined]

    def _digest(
        self, raw: Any, reward: Array, terminated: Array, truncated: Array, info: dict[str, Any]
    ) -> VectorStep:
        self._steps += 1
        if self._steps > self._check_lengths_at:
            self._check_lengths()
        obs = self._cast(raw)
        valid = self._valid
        if self.has_invalid_rows and self._pending_reset.any():
            valid = ~self._pending_reset
            reward = np.where(valid, reward, 0.0)
        done = terminated | truncated
        self._last_info, self._last_done = info, done
        self._returns += reward
        self._lengths += valid
        if not done.any():
            self._pending_reset = self._none_done
            self._check_choice(obs, self._valid)
            return VectorStep(obs, obs, reward, terminated, truncated, valid, ())
        episodes = self._games(done, info) if self._counts_games else self._episodes(done)
        if self._on_episode is not None:
            for episode in episodes:
                self._on_episode(episode.env, _row_of_step(info, done, episode.env))
        self._returns[done] = 0.0
        self._lengths[done] = 0
        obs, final_obs = self._across_reset(obs, done, info)
        self._check_choice(obs, ~self._pending_reset)
        return VectorStep(obs, final_obs, reward, terminated, truncated, valid, episodes)

    def watch_episodes(self, on_episode: Callable[[int, dict[str, Any]], None]) -> None:
        """Call ``on_episode(env, info)`` at the end of each episode, with its last step's info."""
        self._on_episode = on_episode

    def infos_reader(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that returns the info of each environment's last step until now.

        Where an episode ended, that is its final info, not the one of the reset.
        """
        info, done = self._last_info, self._last_done
        return lambda: [_row_of_step(info, done, i) for i in range(self.num_envs)]

    def _check_lengths(self) -> None:
        """Warn, once, of an episode that is too long to be recorded."""
        longest = int(self._lengths.max())
        if longest <= self._max_recorded:
            self._check_lengths_at = self._steps + self._max_recorded - longest
            return
        self._check_lengths_at = _NEVER
        self.has_unrecorded_episodes = True
        warnings.warn(
            f"the episode of environment {self.first_index + int(self._lengths.argmax())} is"
            " longer than"
            f" max_recorded_steps ({self._max_recorded:,}): it is no longer recorded, so a resume"
            " begins a new episode there and is approximate. Raise max_recorded_steps, or limit"
            f" episodes with {self.limit_advice}",
            stacklevel=2,
        )

    def _episodes(self, done: Array) -> tuple[Episode, ...]:
        return tuple(
            Episode(int(i), float(self._returns[i]), int(self._lengths[i]))
            for i in np.flatnonzero(done)
        )

    def _games(self, done: Array, info: dict[str, Any]) -> tuple[Episode, ...]:
        """Return whole games with their raw scores, without clipped rewards and ends at lost lives.

        Where neither a game ended nor a life, a wrapper has cut the episode short.
        """
        last = info.get("final_info", info)
        over = last.get("_game_score", self._none_done)
        cut_short = done & ~over & ~last.get("_life_lost", self._none_done)
        games = tuple(
            Episode(int(i), float(last["game_score"][i]), int(last["game_length"][i]))
            for i in np.flatnonzero(over)
        )
        return games + self._episodes(cut_short)

    def _stored(self, obs: Any, env: int | None = None) -> Obs:
        """Observations in the form of storage; with ``env``, the one of that environment."""
        try:
            return self.obs_spec.cast(obs)
        except OutsideSpaceError as error:
            row = error.row if env is None else env
            index = None if row is None else self.first_index + row
            raise EnvironmentFailure(
                f"environment {index} ({self.name}) returned an observation outside its space:"
                f" {error}"
            ) from None

    def _check_choice(self, obs: Obs, acting: Array) -> None:
        """An environment whose action counts must leave something to choose."""
        if isinstance(obs, dict) and ACTION_MASK in obs:
            stuck = np.flatnonzero(self.action_spec.without_choice(obs[ACTION_MASK]) & acting)
            if stuck.size:
                raise EnvironmentFailure(
                    f"environment {self.first_index + stuck[0]} ({self.name}) allows no action:"
                    f" what action_masks() returns, or '{ACTION_MASK}' in the observation, must be"
                    " true for at least one action (for MultiDiscrete: one in each component)"
                )

    def _across_reset(self, obs: Obs, done: Array, info: dict[str, Any]) -> tuple[Obs, Obs]:
        """The observation the actor sees next and the true successor, where episodes ended."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self._pending_reset = done
            return obs, obs
        if self.mode is AutoresetMode.DISABLED:
            raw, _ = self.env.reset(options={"reset_mask": done})
            return self._cast(raw), obs
        final_obs = tree_map(np.copy, obs)
        if (given := info.get("final_obs")) is None:
            raise EnvironmentFailure(
                f"{self.name} resets within a step (SAME_STEP) and returned no final observations"
                " (info['final_obs']) where episodes ended: truncation cannot be right without them"
            )
        for i in np.flatnonzero(done):
            of_row = tree_map(lambda leaf, i=i: leaf[i], given) if type(given) is dict else given[i]
            row = self._stored(of_row, int(i))
            tree_map(lambda leaf, one, i=i: leaf.__setitem__(i, one), final_obs, row)
        return obs, final_obs

    @property
    def exactly_resumable(self) -> bool:
        """Whether :meth:`load_state_dict` can restore the environments bit for bit."""
        return self._can_restore() and not self.has_unrecorded_episodes

    def _can_restore(self) -> bool:
        return self._state.kind != "none" and self._state.is_exact()

    def state_dict(self) -> dict[str, Any]:
        """Everything that restores the environments."""
        return {
            "seed": self._seed,
            "steps": self._steps,
            "has_unrecorded_episodes": self.has_unrecorded_episodes,
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "pending_reset": self._pending_reset.copy(),
            "envs": self._state.save(),
        }

    def load_state_dict(self, state: dict[str, Any], expected: Obs) -> tuple[Obs, bool]:
        """Restore the environments; return the current observation, and whether it is exact.

        It is not where the state could not be saved (new episodes begin then), nor where the
        restored environments show something else than ``expected``.
        """
        self._seed = int(state["seed"])
        # States of earlier versions have neither of the two.
        self._steps = int(state.get("steps", 0))
        self.has_unrecorded_episodes = bool(state.get("has_unrecorded_episodes", False))
        if self._state.kind == "none" or state["envs"] is None:
            obs, _ = self._state.reset_anew(self._seed, self._steps)
            return self._begin(obs), False
        restored = self._state.load(state["envs"])
        self._returns = np.array(state["returns"], np.float64)
        self._lengths = np.array(state["lengths"], np.int64)
        self._pending_reset = np.array(state["pending_reset"], bool)
        self._after_restore(restored)
        return self._shown(restored, expected)

    def _after_restore(self, restored: list[Restored]) -> None:
        """Count new episodes from zero, and warn of those that replace unrecorded ones."""
        new = np.array([one.new_episode for one in restored])
        unrecorded = np.flatnonzero(new & (self._lengths > self._max_recorded))
        self._returns[new] = 0.0
        self._lengths[new] = 0
        if unrecorded.size:
            self.has_unrecorded_episodes = True
            warnings.warn(
                f"environments {(self.first_index + unrecorded).tolist()} begin new episodes:"
                f" theirs were longer than max_recorded_steps ({self._max_recorded:,}) and not"
                " recorded; this resume is approximate",
                stacklevel=4,
            )
        self._check_lengths_at = _NEVER if self.has_unrecorded_episodes else self._steps

    def _shown(self, restored: list[Restored], expected: Obs) -> tuple[Obs, bool]:
        """What the restored environments show, and whether it is exactly as ``expected``."""
        obs = tree_map(np.array, expected)
        exact = self._can_restore()
        for i, one in enumerate(restored):
            exact = exact and one.exact
            if one.obs is None:  # the environment restores a state of its own and shows nothing
                continue
            pairs = zip(tree_leaves(obs), tree_leaves(self._stored(one.obs, i)), strict=True)
            for leaf, seen in pairs:
                exact = exact and np.array_equal(leaf[i], seen, equal_nan=seen.dtype.kind == "f")
                leaf[i] = seen
        return obs, exact

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ConfigError(
            f"{type(env).__name__} does not state its autoreset mode (metadata['autoreset_mode']):"
            " without it truncation cannot be right"
        )
    return mode


def _row_of_step(info: Mapping[str, Any], done: Array, index: int) -> dict[str, Any]:
    """Return one environment's info of a step; of an ended episode, its final info."""
    if done[index] and isinstance(info.get("final_info"), Mapping):
        info = info["final_info"]
    return _row_of_info(info, index, len(done))


def _row_of_info(info: Mapping[str, Any], index: int, num_envs: int) -> dict[str, Any]:
    """Return one environment's part of a vector's info, without what belongs to a reset.

    Gymnasium merges infos by key, with a mask ``_KEY`` of the environments that have it.
    """
    row: dict[str, Any] = {}
    for key, value in info.items():
        mask = info.get(f"_{key}")
        is_mask = key.startswith("_") and mask is None
        if is_mask or key in _OF_RESETS or (mask is not None and not mask[index]):
            continue
        if isinstance(value, Mapping):
            row[key] = _row_of_info(value, index, num_envs)
        else:
            has_rows = isinstance(value, (np.ndarray, list, tuple)) and len(value) == num_envs
            row[key] = value[index] if has_rows else value
    return row


class _StateAccess:
    """How the state of one kind of vector environment is seeded, saved and restored."""

    def __init__(self, env: VectorEnv[Any, Any, Any], shard: int = 0) -> None:
        self._env = env
        self._shard_key = shard_key(shard)
        base = env.unwrapped
        self._base: Any = base
        self.kind = "none"
        if isinstance(base, (SyncVectorEnv, WorkerVectorEnv)) and self._episodes_are_ours():
            self.kind = "episodes"
        elif env is base and type(base) in _NATIVE_STATE:
            self.kind = "arrays"
        # Of a wrapped vector: the state of the wrapper, which must contain that of the vector.
        elif hasattr(env, "get_state") and hasattr(env, "set_state"):
            self._base = env
            self.kind = "own" if getattr(env, "restorable", True) else "none"

    def _episodes_are_ours(self) -> bool:
        if isinstance(self._base, SyncVectorEnv):
            return all(hasattr(env, "snapshot") for env in self._base.envs)
        return True

    def is_exact(self) -> bool:
        if self.kind != "episodes":
            return True
        return all(self._each("is_replayable", [()] * self._env.num_envs))

    def first_reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        if self.kind == "episodes":
            return self._env.reset()
        return self._env.reset(seed=stream_seed(seed, "environment", *self._shard_key) >> 32)

    def reset_anew(self, seed: int, steps: int) -> tuple[Any, dict[str, Any]]:
        """Begin episodes that the run has not had before its vector step ``steps``."""
        if not steps:
            return self.first_reset(seed)
        anew = stream_seed(seed, "resumed environment", steps, *self._shard_key)
        self.reseed(anew)
        return self._env.reset() if self.kind == "episodes" else self._env.reset(seed=anew >> 32)

    def reseed(self, seed: int) -> None:
        if self.kind == "episodes":
            self._each("reseed", [(seed,)] * self._env.num_envs)

    def save(self) -> Any:
        if self.kind == "episodes":
            return self._each("snapshot", [()] * self._env.num_envs)
        if self.kind == "arrays":
            state = {name: getattr(self._base, name) for name in _NATIVE_STATE[type(self._base)]}
            return {**state, "rng": self._base.np_random.bit_generator.state}
        return self._base.get_state() if self.kind == "own" else None

    def load(self, saved: Any) -> list[Restored]:
        """Restore each environment."""
        if self.kind == "episodes":
            # A vector steps only after a reset; the snapshot then takes each environment over.
            self._env.reset()
            return self._each("restore", [(one,) for one in saved])
        self._env.reset(seed=0)
        if self.kind == "arrays":
            for name in _NATIVE_STATE[type(self._base)]:
                current = getattr(self._base, name)
                setattr(self._base, name, np.array(saved[name], dtype=current.dtype))
            self._base.np_random.bit_generator.state = saved["rng"]
            shown = self._base.state.T.astype(np.float32)
            return [Restored(row, exact=True) for row in shown]
        shown = self._base.set_state(saved)
        if shown is None:
            return [Restored(None, exact=True)] * self._env.num_envs
        return [Restored(row, exact=True) for row in shown]

    def _each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        if isinstance(self._base, WorkerVectorEnv):
            return self._base.call_each(method, arguments)
        envs: list[Any] = self._base.envs
        pairs = zip(envs, arguments, strict=True)
        return [getattr(env, method)(*given) for env, given in pairs]
