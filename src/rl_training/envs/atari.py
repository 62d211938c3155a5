"""Atari 2600 games with the standard preprocessing, one at a time.

`native_atari` is the same by ale-py's own vector (`tests/test_atari_envs.py` compares their
frames). A *game* ends when the console's game is over. An *episode* is what the agent is trained
on: it ends with a lost life where `terminal_on_life_loss` is set. Rewards are clipped here, after
the score was counted.

Seeding makes the emulator load its ROM again, which takes as long as hundreds of steps. So a game
is seeded only if `seed_interval` steps have passed since the last seeding. Games in between
continue with the console's own random numbers, and depend on that seed and all actions since.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from rl_training.config import AtariConfig

_SET_BY_PIPELINE = (
    "frameskip",
    "repeat_action_probability",
    "obs_type",
    "max_num_frames_per_episode",
    "max_episode_steps",
)
_TAKEN = {"full_action_space", "mode", "difficulty", "render_mode"}
_TAKEN_BY_NATIVE = {"full_action_space"}
_NOOP, _FIRE = 0, 1
_NEVER = 2**62
"""Steps since the last seeding, where there was none."""


def check_atari(spec: EnvSpec, env_kwargs: dict[str, Any], *, native: bool) -> None:
    """Refuse what is no game, and keyword arguments that the pipeline sets by itself."""
    if "game" not in spec.kwargs:
        raise ConfigError(
            "preprocessing: atari is for games such as ALE/Breakout-v5;"
            f" {spec.id} is not an Atari game"
        )
    for name in _SET_BY_PIPELINE:
        if name in env_kwargs:
            raise ConfigError(f"'env_kwargs.{name}' is set by preprocessing: atari; use 'atari'")
    if not native and importlib.util.find_spec("cv2") is None:
        raise ConfigError(f"{spec.id} needs an extra: pip install 'rl_training[atari]'")
    if native and (others := set(env_kwargs) - _TAKEN_BY_NATIVE):
        raise ConfigError(
            f"'env_kwargs.{min(others)}' is unknown to ale-py's native vector;"
            " use vectorization: sync or async"
        )
    if others := set(env_kwargs) - _TAKEN:
        raise ConfigError(
            f"'env_kwargs.{min(others)}' does not go with preprocessing: atari, which takes"
            f" {', '.join(sorted(_TAKEN))}"
        )


def silence_greeting() -> None:
    """Keep the emulator from greeting on stderr for every game made, in this process."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def atari_kwargs(spec: EnvSpec, atari: AtariConfig) -> dict[str, Any]:
    """What `gymnasium.make` must be given for an `AtariGame`."""
    return {
        "frameskip": 1,
        "obs_type": "grayscale",
        "repeat_action_probability": sticky_probability(spec, atari),
        "max_num_frames_per_episode": 0,
    }


def sticky_probability(spec: EnvSpec, atari: AtariConfig) -> float:
    """Return the probability of repeating the last action: the config's, else that of the id."""
    if atari.sticky_actions is not None:
        return atari.sticky_actions
    return float(spec.kwargs.get("repeat_action_probability", 0.25))


def needs_seed(seeded_ago: Any, atari: AtariConfig) -> Any:
    """Whether the next game is to be seeded."""
    return seeded_ago >= (atari.seed_interval or _NEVER)


class AtariGame(gym.Wrapper[Any, Any, Any, Any]):
    """One game: no-op start, skipped frames, pooled, resized and stacked; lives, score, clipping.

    It plays the console itself, without the detour over the wrapped environment's `step`, which
    would render every frame. It can save and restore its state.
    """

    def __init__(self, env: gym.Env[Any, Any], atari: AtariConfig) -> None:
        import ale_py
        import cv2

        cv2.setNumThreads(1)  # one frame is too little work to share
        super().__init__(env)
        game: Any = env.unwrapped
        meanings = game.get_action_meanings()
        self._atari = atari
        self._ale: Any = game.ale
        self._actions = [getattr(ale_py.Action, name) for name in meanings]
        self._fires = atari.fire_on_reset and "FIRE" in meanings
        self._max_steps = atari.max_frames // atari.frame_skip
        size = (atari.screen_size, atari.screen_size)
        self._resize = functools.partial(cv2.resize, dsize=size, interpolation=cv2.INTER_AREA)
        self._screens = np.zeros((2, *env.observation_space.shape), np.uint8)  # type: ignore[misc]
        self._frames = np.zeros((atari.frame_stack, *size), np.uint8)
        self._score, self._length, self._lives = 0.0, 0, 0
        self._goes_on = False
        self._seeded_ago = _NEVER
        self._beginning: dict[str, Any] = {}
        self._played: list[int] = []
        self.observation_space = gym.spaces.Box(0, 255, self._frames.shape, np.uint8)
        self.metadata = {
            **env.metadata,
            "rl_training/whole_games": True,
            "rl_training/frame_stack": atari.frame_stack,
        }

    def on_reseed(self) -> None:
        """A new sequence of episodes begins: with a new game, and a seed."""
        self._goes_on = False
        self._seeded_ago = _NEVER

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a game, or continue it as the next episode where only a life was lost."""
        if self._goes_on:
            self._goes_on = False
            return self._frames.copy(), {}
        reseeds = needs_seed(self._seeded_ago, self._atari)
        self._seeded_ago = 0 if reseeds else self._seeded_ago
        self.env.reset(seed=seed if reseeds else None, options=options)
        self._begin()
        return self._frames.copy(), {}

    def _begin(self) -> None:
        """Begin the game that the console has loaded."""
        console = self._ale.cloneState(include_rng=True).serialize()
        rng = self.unwrapped.np_random.bit_generator.state
        self._beginning = {"console": np.frombuffer(console, np.uint8), "rng": rng}
        self._played.clear()
        self._start()
        self._score, self._length, self._lives = 0.0, 0, self._ale.lives()
        self._ale.getScreenGrayscale(self._screens[0])
        self._screens[1] = 0
        self._frames[:] = 0
        self._show()

    def _start(self) -> None:
        """A random number of no-ops, then FIRE: one frame each, counted together."""
        noop_max = self._atari.noop_max
        noops = int(self.unwrapped.np_random.integers(noop_max)) if noop_max else 0
        for _ in range(noops + (noop_max > 0 and not self._fires)):
            self._ale.act(self._actions[_NOOP])
            if self._ale.game_over(with_truncation=False):
                self._ale.reset_game()
        if self._fires:
            self._ale.act(self._actions[_FIRE])

    def _show(self) -> None:
        """Push the brighter of the last two screens, resized, on the stack of frames."""
        newest, before = self._screens
        if self._atari.frame_skip > 1:
            np.maximum(newest, before, out=newest)
        self._frames[:-1] = self._frames[1:]
        self._frames[-1] = self._resize(newest)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step; where the game is over, ``info`` has ``game_score`` and ``game_length``."""
        ale, chosen, game_over, points = self._ale, self._actions[action], False, 0
        self._played.append(int(action))
        for left in range(self._atari.frame_skip - 1, -1, -1):
            points += ale.act(chosen)
            game_over = ale.game_over(with_truncation=False)
            if game_over:
                break
            if left < 2:
                ale.getScreenGrayscale(self._screens[left])
        self._show()
        self._score += points
        self._length += 1
        self._seeded_ago += 1
        lives = ale.lives()
        lost, self._lives = lives < self._lives, lives
        truncated = not game_over and self._length >= self._max_steps
        terminated = game_over or (self._atari.terminal_on_life_loss and lost)
        self._goes_on = terminated and not (game_over or truncated)
        info: dict[str, Any] = {"life_lost": True} if self._goes_on else {}
        if game_over or truncated:
            info = {"game_score": self._score, "game_length": self._length}
        reward = np.sign(points) if self._atari.clip_rewards else points
        return self._frames.copy(), float(reward), terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """The console and its random numbers as this game began, and the actions since.

        A console's state leaves out the action that sticky actions repeat, so that only a game's
        beginning, where there is none yet, can be restored exactly.
        """
        return {
            **self._beginning,
            "actions": np.asarray(self._played, np.uint8),
            "goes_on": self._goes_on,
            "seeded_ago": self._seeded_ago,
        }

    def set_state(self, state: dict[str, Any]) -> Any:
        """Play this game again; what it shows."""
        import ale_py

        self._ale.reset_game()
        self._ale.restoreState(ale_py.ALEState(np.asarray(state["console"]).tobytes()))
        self.unwrapped.np_random.bit_generator.state = state["rng"]
        self._begin()
        for action in np.asarray(state["actions"]).tolist():
            self.step(action)
        self._goes_on = bool(state["goes_on"])
        self._seeded_ago = int(state["seeded_ago"])
        return self._frames.copy()
