"""Evaluation of an actor on environments of its own: exactly N whole episodes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.envs import EnvFn, VectorAdapter, make_vector_env
from rl_training.envs.factory import has_single_env
from rl_training.errors import Paused
from rl_training.types import Progress, StopRequest, never

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.actors import Actor

_MAX_EVAL_ENVS = 10
MAX_EPISODE_STEPS = 100_000
"""Steps after which an evaluation episode is cut: some environments never end one."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Returns and lengths of the evaluated episodes."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    def metrics(self) -> dict[str, float]:
        """As logged."""
        return {
            "eval/return_mean": self.mean_return,
            "eval/return_std": float(np.std(self.returns)),
            "eval/return_min": float(np.min(self.returns)),
            "eval/return_max": float(np.max(self.returns)),
            "eval/length_mean": float(np.mean(self.lengths)),
            "eval/episodes": float(len(self.returns)),
        }


def make_eval_env(
    config: TrainConfig[Any], num_episodes: int, env_fn: EnvFn | None = None
) -> VectorAdapter:
    """Environments for evaluation, apart from those trained on."""
    if config.preprocessing == "atari":
        whole_games = {"terminal_on_life_loss": False, "clip_rewards": False}
        config = config.with_overrides(atari=whole_games, overlap=False)
    elif config.vectorization == "native" and has_single_env(config):
        config = config.with_overrides(vectorization="sync")
    count = min(num_episodes, _MAX_EVAL_ENVS)
    return VectorAdapter(make_vector_env(config, count, env_fn=env_fn), config.seed)


def evaluate_actor(
    actor: Actor,
    env: VectorAdapter,
    *,
    num_episodes: int,
    seed: int,
    stop: StopRequest = never,
    max_steps: int = MAX_EPISODE_STEPS,
) -> EvalResult:
    """Play ``num_episodes`` whole episodes; raises `Paused` where ``stop`` requests it.

    Each environment plays a share fixed beforehand: counting the first N to finish would favour
    short episodes.
    """
    if stop():
        raise Paused
    share, rest = divmod(num_episodes, env.num_envs)
    quota = [share + (i < rest) for i in range(env.num_envs)]
    finished: list[list[tuple[float, int]]] = [[] for _ in range(env.num_envs)]
    obs = env.reseed(seed)
    actor.reset(np.ones(env.num_envs, bool))
    progress = Progress(1, 1)
    steps = 0
    while any(len(done) < wanted for done, wanted in zip(finished, quota, strict=True)):
        if stop():
            raise Paused
        action, _ = actor.act(obs, progress)
        step = env.step(action)
        for episode in step.episodes:
            if len(finished[episode.env]) < quota[episode.env]:
                finished[episode.env].append((episode.ret, episode.length))
        cut = step.cut
        if cut.any():
            actor.reset(cut)
        obs = step.obs
        steps += 1
        if steps % max_steps == 0:
            _cut_long_episodes(env, finished, quota, max_steps)
    played = [episode for episodes in finished for episode in episodes]
    return EvalResult(tuple(r for r, _ in played), tuple(n for _, n in played))


def _cut_long_episodes(
    env: VectorAdapter, finished: list[list[tuple[float, int]]], quota: list[int], max_steps: int
) -> None:
    """Count episodes of ``max_steps`` or more as they are now, and play no more in their places."""
    lengths, returns = env.episode_lengths, env.episode_returns
    for i in np.flatnonzero(lengths >= max_steps):
        if len(finished[i]) < quota[i]:
            finished[i].append((float(returns[i]), int(lengths[i])))
            quota[i] = len(finished[i])
            warnings.warn(
                f"evaluation: an episode did not end within {int(lengths[i]):,} steps (the limit is"
                f" {max_steps:,}) and is counted as it is; limit episodes of the environment with"
                " env_kwargs: {max_episode_steps: ...}",
                stacklevel=2,
            )
