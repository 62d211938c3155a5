"""Evaluation of an actor on environments of its own: exactly N whole episodes."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.envs import EnvFn, PlainAdapter, make_vector_env, plain_adapter
from rl_training.envs.factory import has_single_env
from rl_training.envs.given_vector import GivenVector
from rl_training.errors import ConfigError, EnvironmentFailure, Paused, WorkerError
from rl_training.runtime.actors import Actor, after_step
from rl_training.types import (
    ActionSpec,
    ArraySpec,
    HybridActionSpec,
    ObsSpec,
    Progress,
    StopRequest,
    leaf_name,
    never,
)

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

_MAX_EVAL_ENVS = 10
MAX_EPISODE_STEPS = 100_000
"""Steps after which an evaluation episode is cut where the environment has a time limit."""
MAX_STEPS_WITHOUT_LIMIT = 10_000
"""Steps after which it is cut where no time limit is known: the episode may never end."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Returns and lengths of the evaluated episodes."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation over episodes."""
        return float(np.std(self.returns))

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the names they are logged with."""
        return {
            "eval/return_mean": self.mean_return,
            "eval/return_std": self.std_return,
            "eval/return_min": float(np.min(self.returns)),
            "eval/return_max": float(np.max(self.returns)),
            "eval/length_mean": float(np.mean(self.lengths)),
            "eval/episodes": float(len(self.returns)),
        }


def make_eval_env(
    config: TrainConfig[Any],
    num_episodes: int,
    env_fn: EnvFn | None = None,
    spaces: tuple[ObsSpec, ActionSpec] | None = None,
    first_index: int = 0,
    shard: int = 0,
) -> PlainAdapter:
    """Return environments for evaluation, separate from those of training.

    Those of a shard have indices from ``first_index`` on. Raises `ConfigError` where their spaces
    differ from ``spaces``, those of the policy.
    """
    if isinstance(env_fn, GivenVector) and env_fn.env_fn is not None:
        env_fn = env_fn.env_fn
    if config.preprocessing == "atari":
        whole_games = {"terminal_on_life_loss": False, "clip_rewards": False}
        config = config.with_overrides(atari=whole_games, overlap=False)
    elif config.vectorization == "device" or (
        config.vectorization == "native" and (env_fn or has_single_env(config))
    ):
        config = config.with_overrides(vectorization="sync")
    if env_fn is not None and config.env_kwargs:  # they belong to the environment of the id
        config = config.with_overrides(env_kwargs={})
    count = eval_envs_for(num_episodes)
    with _failures_in_evaluation():
        vector = make_vector_env(config, count, env_fn=env_fn, first_index=first_index)
        env = plain_adapter(vector, config.seed, first_index, shard)
    if spaces is not None:
        try:
            require_same_spaces(env, *spaces)
        except ConfigError:
            env.close()
            raise
    return env


def eval_envs_for(num_episodes: int) -> int:
    """Return how many environments play so many episodes."""
    return min(num_episodes, _MAX_EVAL_ENVS)


def require_same_spaces(env: PlainAdapter, obs_spec: ObsSpec, action_spec: ActionSpec) -> None:
    """Raise `ConfigError` unless environments have the spaces that a policy was trained on."""
    pairs: tuple[tuple[str, ObsSpec | ActionSpec, ObsSpec | ActionSpec], ...] = (
        ("observations", obs_spec, env.obs_spec),
        ("actions", action_spec, env.action_spec),
    )
    for name, own, given in pairs:
        if own.to_plain() != given.to_plain():
            raise ConfigError(
                f"evaluation: {env.name} does not match the policy: its {name} are"
                f" {spec_in_words(given)}, but the policy was trained on {spec_in_words(own)}"
            )


def spec_in_words(spec: ObsSpec | ActionSpec) -> str:
    """Shapes and dtypes of observations, or the kind of actions with their sizes and bounds."""
    if isinstance(spec, ObsSpec):
        parts = {name: _array_in_words(leaf) for name, leaf in spec.leaves.items()}
        return parts.get("") or ", ".join(f"{name!r}: {part}" for name, part in parts.items())
    if isinstance(spec, HybridActionSpec):
        named = (f"{leaf_name(path)!r}: {spec_in_words(part)}" for path, part in spec.parts)
        return f"hybrid({', '.join(named)})"
    if spec.nvec:
        start = f", start {', '.join(map(str, spec.start))}" if any(spec.start) else ""
        return f"{spec.described}({', '.join(map(str, spec.nvec))}{start})"
    bounds = f", low {list(spec.low)}, high {list(spec.high)}" if spec.low else ""
    return f"{spec.described} of shape {spec.shape}{bounds}"


def _array_in_words(leaf: ArraySpec) -> str:
    if leaf.nvec:
        return f"Discrete({', '.join(map(str, leaf.nvec))})"
    return f"{leaf.dtype} of shape {leaf.given_shape}"


def require_env_fn(custom_env: bool, env_fn: EnvFn | None, call: str) -> None:
    """Raise `ConfigError` where a policy was trained with ``env_fn`` and none is given now."""
    if custom_env and env_fn is None:
        raise ConfigError(
            "the policy was trained with env_fn, which is not saved: pass"
            f" the function again, as in {call}"
        )


@contextlib.contextmanager
def _failures_in_evaluation() -> Iterator[None]:
    """Add to the message of an environment's failure that it happened in evaluation."""
    try:
        yield
    except (EnvironmentFailure, WorkerError) as error:
        raise type(error)(f"evaluation: {error}") from error.__cause__


def episodes_of_each(num_episodes: int, num_envs: int) -> list[int]:
    """Return how many episodes of each environment an evaluation counts, the first ones."""
    share, rest = divmod(num_episodes, num_envs)
    return [share + (i < rest) for i in range(num_envs)]


@_failures_in_evaluation()
def evaluate_actor(
    actor: Actor,
    env: PlainAdapter,
    *,
    num_episodes: int,
    seed: int,
    stop: StopRequest = never,
    max_steps: int | None = None,
) -> EvalResult:
    """Play ``num_episodes`` whole episodes; raises `Paused` where ``stop`` requests it.

    Each environment plays a share fixed beforehand: counting the first N to finish would favour
    short episodes. An episode that does not end is cut after ``max_steps`` (unset:
    `MAX_EPISODE_STEPS`, or `MAX_STEPS_WITHOUT_LIMIT` where no time limit is known), with a warning.
    """
    if stop():
        raise Paused
    if max_steps is None:
        max_steps = MAX_EPISODE_STEPS if env.has_time_limit else MAX_STEPS_WITHOUT_LIMIT
    quota = episodes_of_each(num_episodes, env.num_episodes)
    finished: list[list[tuple[float, int]]] = [[] for _ in range(env.num_episodes)]
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
        after_step(actor, step)
        obs = step.obs
        steps += 1
        if steps % max_steps == 0:
            _cut_long_episodes(env, finished, quota, max_steps)
    played = [episode for episodes in finished for episode in episodes]
    return EvalResult(tuple(r for r, _ in played), tuple(n for _, n in played))


def _cut_long_episodes(
    env: PlainAdapter, finished: list[list[tuple[float, int]]], quota: list[int], max_steps: int
) -> None:
    """Count episodes of ``max_steps`` or more as they are now, and play no more in their places."""
    lengths, returns = env.episodes_so_far()
    for i in np.flatnonzero(lengths >= max_steps):
        if len(finished[i]) < quota[i]:
            finished[i].append((float(returns[i]), int(lengths[i])))
            quota[i] = len(finished[i])
            warnings.warn(
                f"evaluation: an episode of {env.name} did not end within {max_steps:,} steps and"
                " is counted with its return so far. To limit episodes, set"
                f" {env.limit_advice}",
                stacklevel=2,
            )
