"""`TrainedPolicy`: a policy that can act and be evaluated, without training state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_training._internal.tree import tree_leaves
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn
from rl_training.errors import ConfigError
from rl_training.eval import EvalResult, evaluate_actor, make_eval_env
from rl_training.seeding import stream_seed, torch_stream
from rl_training.types import (
    ACTION_MASK,
    ActionSpec,
    Array,
    Obs,
    ObsSpec,
    OutsideSpaceError,
    Progress,
)

if TYPE_CHECKING:
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.spec import AlgorithmSpec


class TrainedPolicy:
    """A trained policy: maps observations to actions and needs no environment."""

    def __init__(
        self,
        spec: AlgorithmSpec,
        config: TrainConfig[Any],
        algorithm: Any,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        device: torch.device,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.obs_spec = obs_spec
        self.action_spec = action_spec
        self.device = device
        self._spec = spec
        self._greedy: Any = spec.eval_actor(algorithm, device, None)
        sampling = torch_stream(config.seed, "prediction")
        self._sampling: Any = spec.eval_actor(algorithm, device, sampling)

    @property
    def module(self) -> torch.nn.Module:
        """The networks."""
        module: torch.nn.Module = self.algorithm.module
        return module

    @property
    def acting_spec(self) -> ObsSpec:
        """The observations that `predict` takes."""
        return self.obs_spec

    def act(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the action for one observation, or actions for a batch of them."""
        batch, single = self._as_batch(obs)
        action = self._choose(self._greedy if deterministic else self._sampling, batch)
        return self.action_spec.joined(action[0] if single else action)

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, Any]:
        """Return the action, or actions for a batch, and the next state: None without memory."""
        refuse_bool(state)
        if state is not None:
            raise ConfigError("this policy has no memory: its state is None")
        del episode_start
        return self.act(obs, deterministic), None

    def _choose(self, actor: Actor, batch: Obs) -> Array:
        """Return actions for a batch, in the environment's format."""
        mask = batch.get(ACTION_MASK) if isinstance(batch, dict) else None
        if mask is not None and self.action_spec.without_choice(mask).any():
            raise ConfigError(f"'{ACTION_MASK}' allows no action at all")
        module = self.algorithm.module
        was_training = module.training
        module.eval()
        try:
            policy_action, _ = actor.act(batch, Progress(1, 1))
        finally:
            module.train(was_training)
        action: Array = self.action_spec.to_env(policy_action)
        return action

    def _as_batch(self, obs: Any) -> tuple[Obs, bool]:
        return self.batch_of(self.acting_spec, obs)

    @staticmethod
    def batch_of(spec: ObsSpec, obs: Any) -> tuple[Obs, bool]:
        """Return an observation as a batch, and whether it was a single observation."""
        _check_structure(obs, [spec.path(name) for name in spec.leaves])
        parts = {
            name: _leaf_batch(part, spec.leaves[name].given_shape, name or "observation")
            for name, part in spec.parts(obs).items()
        }
        singles = {single for _, single in parts.values()}
        if len(singles) != 1:
            raise ConfigError("some entries of the observation are batched and some are not")
        try:
            batch = spec.stored({name: array for name, (array, _) in parts.items()})
        except OutsideSpaceError as error:
            raise ConfigError(str(error)) from None
        return batch, singles.pop()

    def evaluate(
        self,
        num_episodes: int = 10,
        *,
        deterministic: bool | None = None,
        seed: int | None = None,
        env_fn: EnvFn | None = None,
    ) -> EvalResult:
        """Evaluate the policy for ``num_episodes`` whole episodes.

        ``seed`` selects the episodes (default: the run's seed; they differ from those of training).
        ``deterministic`` defaults to the run's ``eval_deterministic``.
        """
        if num_episodes < 1:
            raise ConfigError(f"'num_episodes' must be at least 1; got {num_episodes}")
        spaces = (self.obs_spec, self.action_spec)
        env = make_eval_env(self.config, num_episodes, env_fn, spaces)
        try:
            episodes = stream_seed(self.config.seed if seed is None else seed, "evaluation")
            actor = self.evaluation_actor(deterministic, episodes)
            return evaluate_actor(actor, env, num_episodes=num_episodes, seed=episodes)
        finally:
            env.close()

    def evaluation_actor(self, deterministic: bool | None, seed: int) -> Actor:
        """Return an actor for whole episodes; ``seed`` is for its sampling."""
        if deterministic is None:
            deterministic = self.config.eval_deterministic
        sampling = None if deterministic else torch_stream(seed, "evaluation_actions")
        self.algorithm.module.eval()
        return self._spec.eval_actor(self.algorithm, self.device, sampling)


def refuse_bool(state: Any) -> None:
    """Raise `ConfigError` where ``predict`` got ``deterministic`` in place of the state."""
    if isinstance(state, bool):
        raise ConfigError(
            "the second argument of predict is the state, not deterministic: write"
            f" predict(obs, deterministic={state}), or act(obs, {state}) for the action alone"
        )


def _check_structure(
    obs: Any, paths: Sequence[tuple[str | int, ...]], where: str = "the observation"
) -> None:
    """Raise `ConfigError` unless ``obs`` has arrays exactly at ``paths``."""
    entries: dict[str | int, list[tuple[str | int, ...]]] = {}
    for path in paths:
        if path:
            entries.setdefault(path[0], []).append(path[1:])
    if not entries:  # an array
        return
    keys = range(len(obs)) if isinstance(obs, tuple) else obs if isinstance(obs, dict) else ()
    if set(keys) != set(entries):
        is_tuple = list(entries) == list(range(len(entries)))
        names = sorted(entries, key=str)
        wanted = f"a tuple of {len(entries)}" if is_tuple else f"a dict with {names}"
        given = sorted(obs, key=str) if isinstance(obs, dict) else type(obs).__name__
        raise ConfigError(f"{where} must be {wanted}; got {given}")
    for key, inner in entries.items():
        _check_structure(obs[key], inner, f"{where}[{key!r}]")


def _leaf_batch(value: Any, shape: tuple[int, ...], name: str) -> tuple[Array, bool]:
    array = np.asarray(value)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"{name} holds a NaN or an infinity")
    if array.shape == shape:
        return array[None], True
    if array.shape[1:] == shape and array.ndim == len(shape) + 1:
        return array, False
    raise ConfigError(
        f"{name} has shape {array.shape}; expected {shape}, or"
        f" ({', '.join(map(str, ('n', *shape)))}{'' if shape else ','}) for a batch"
    )


class RecurrentTrainedPolicy(TrainedPolicy):
    """A recurrent policy: every call of `predict` takes and returns its state."""

    def act(self, obs: Any, deterministic: bool = True) -> Any:
        """Raise ConfigError: a recurrent policy needs its state to choose an action."""
        del obs, deterministic
        raise ConfigError("a recurrent policy has a state: use action, state = predict(obs, state)")

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, Any]:
        """Return the action, or actions for a batch, and the next state.

        ``state`` is what the last call returned; None is the state at the start of an episode, and
        so is any state where ``episode_start`` is true.
        """
        refuse_bool(state)
        batch, single = self._as_batch(obs)
        actor = self._greedy if deterministic else self._sampling
        rows, size = len(tree_leaves(batch)[0]), actor.model.state_size
        actor.memory.set(memory_before(state, episode_start, rows, size, single=single))
        action = self._choose(actor, batch)
        after = torch.as_tensor(actor.memory.state).cpu().numpy().copy()
        chosen = self.action_spec.joined(action[0] if single else action)
        return chosen, after[0] if single else after


def memory_before(
    state: Any, episode_start: Any, rows: int, size: int, *, single: bool, group: str = ""
) -> Array:
    """Return recurrent states, (rows, size), from arguments of `predict`, which are checked."""
    where = f" of {group}" if group else ""
    memory = np.zeros((rows, size), np.float32)
    if state is not None:
        expected = (size,) if single else (rows, size)
        try:
            given = np.asarray(state, np.float32)
        except (TypeError, ValueError):
            raise ConfigError(f"state{where} must be numbers of shape {expected}") from None
        if given.shape != expected:
            raise ConfigError(f"state{where} has shape {given.shape}; expected {expected}")
        if not np.isfinite(given).all():
            raise ConfigError(f"state{where} holds a NaN or an infinity")
        memory += given
    if episode_start is not None:
        starts = np.asarray(episode_start, bool)
        if starts.shape not in ((), (rows,)):
            raise ConfigError(f"episode_start{where} has shape {starts.shape}; expected ({rows},)")
        memory[np.broadcast_to(starts, (rows,))] = 0.0
    return memory
