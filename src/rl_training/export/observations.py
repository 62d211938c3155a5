"""Observations on which an exported policy is compared with `predict`."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_training._internal.tree import tree_map
from rl_training.envs import EnvFn, TeamAdapter
from rl_training.envs.given import GivenEnvironment
from rl_training.errors import EnvironmentFailure, UserError, WorkerError
from rl_training.eval import make_eval_env
from rl_training.models.observing import ObservingModule
from rl_training.runtime.actors import Actor
from rl_training.runtime.policy import TrainedPolicy
from rl_training.seeding import stream_seed
from rl_training.types import ACTION_MASK, Array, ArraySpec, ObsSpec, Progress

STEPS = 300
"""Observations that are compared."""
_LONGEST = 60
"""Steps after which an episode is left, so that several starts are among them."""
_NOT_MADE = (UserError, EnvironmentFailure, WorkerError, ImportError, OSError)


@dataclasses.dataclass(frozen=True)
class Observations:
    """Observations in the order in which they were seen, one row each."""

    parts: dict[str, Array]
    """Arrays by their names in the `ObsSpec`, as the environment returned them."""
    starts: Array
    """True where a row is the first of an episode."""
    origin: str
    """Where they are from, in words."""

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, index: Any) -> dict[str, Array]:
        """Return the arrays of some rows."""
        return {name: array[index] for name, array in self.parts.items()}


def reason_without(state: Mapping[str, Any], env_fn: EnvFn | None) -> str | None:
    """Return why the environment of a run cannot be made; None where it can be tried."""
    if state.get("custom_env") and env_fn is None:
        return "the run was trained with env_fn, which is not saved"
    if isinstance(env_fn, GivenEnvironment) and not env_fn.can_be_copied:
        return "the environment that was given has no spec to make a copy from"
    if env_fn is None and not state["config"].get("env_id"):
        return "the run has no environment"
    return None


def observe(
    policy: TrainedPolicy, model: Any, env_fn: EnvFn | None, *, without: str | None, required: bool
) -> Observations:
    """Return observations of the run's environment, or random ones where it cannot be made.

    Args:
        policy: the policy, which plays with sampled actions.
        model: its network, whose normaliser gives the scale of random observations.
        env_fn: a function that makes the environment; None: that of the config.
        without: why there is no environment; None: there is one.
        required: raise where the environment cannot be made.
    """
    if without is None:
        try:
            return _recorded(policy, env_fn)
        except _NOT_MADE as error:
            if required:
                raise
            without = " ".join(str(error).split())
    warnings.warn(f"the export is compared on random observations: {without}", stacklevel=3)
    return _random(policy, model, without)


def _recorded(policy: TrainedPolicy, env_fn: EnvFn | None) -> Observations:
    spec, seed = policy.obs_spec, stream_seed(policy.config.seed, "evaluation")
    config = policy.config.with_overrides(vectorization="sync", overlap=False)
    adapter = make_eval_env(config, 1, env_fn, (spec, policy.action_spec))
    actor = policy.evaluation_actor(deterministic=False, seed=seed)
    origin = f"recorded from {adapter.name}"
    if isinstance(adapter, TeamAdapter):
        with contextlib.closing(adapter):
            return Observations(*_rows_of_agents(policy, adapter, actor, seed), origin)
    seen: list[dict[str, Array]] = []
    starts: list[bool] = []
    with contextlib.closing(adapter):
        vector: Any = adapter.env
        env = vector.envs[0]
        env.reseed(seed)
        length, over = 0, True
        while len(seen) < STEPS:
            if over:
                obs, _ = env.reset()
                actor.reset(np.ones(1, bool))
                length = 0
            # Copies: an environment may write every observation into one array.
            seen.append({name: np.array(part) for name, part in spec.parts(obs).items()})
            starts.append(over)
            batch = tree_map(lambda leaf: leaf[None], spec.cast(obs))
            action, _ = actor.act(batch, Progress(1, 1))
            obs, _, terminated, truncated, _ = env.step(policy.action_spec.to_env(action)[0])
            length += 1
            over = bool(terminated or truncated or length == _LONGEST)
    parts = {key: np.stack([one[key] for one in seen]) for key in spec.leaves}
    return Observations(parts, np.array(starts), origin)


def _rows_of_agents(
    policy: TrainedPolicy, adapter: TeamAdapter, actor: Actor, seed: int
) -> tuple[dict[str, Array], Array]:
    """Return what several agents observe, a row for each agent and step, and starts of episodes."""
    leaves = policy.acting_spec.leaves
    seen: list[dict[str, Array]] = []
    starts: list[Array] = []
    obs: Any = adapter.reseed(seed)
    first = np.ones(adapter.num_envs, bool)
    while sum(len(rows) for rows in starts) < STEPS:
        own = {
            name: obs[name or "observation"] if isinstance(obs, dict) else obs for name in leaves
        }
        acts = np.ones(adapter.num_envs, bool)
        if ACTION_MASK in own:  # an agent whose episode has ended may have no legal action
            acts = ~policy.action_spec.without_choice(own[ACTION_MASK])
        seen.append({name: leaf.returned(own[name][acts]) for name, leaf in leaves.items()})
        starts.append(first[acts])
        action, _ = actor.act(obs, Progress(1, 1))
        step = adapter.step(action)
        obs, first = step.obs, step.cut
    parts = {name: np.concatenate([one[name] for one in seen])[:STEPS] for name in leaves}
    return parts, np.concatenate(starts)[:STEPS]


def _random(policy: TrainedPolicy, model: Any, reason: str) -> Observations:
    spec = policy.acting_spec
    random = np.random.default_rng(stream_seed(policy.config.seed, "export"))
    parts = {
        name: _random_leaf(leaf, random, _moments(model, name))
        for name, leaf in spec.leaves.items()
        if name != ACTION_MASK
    }
    if spec.has_mask:
        parts[ACTION_MASK] = _random_masks(policy.action_spec.nvec, random)
    starts = np.arange(STEPS) % _LONGEST == 0
    return Observations(_ordered(parts, spec), starts, f"random, because {reason}")


def _ordered(parts: dict[str, Array], spec: ObsSpec) -> dict[str, Array]:
    return {name: parts[name] for name in spec.leaves}


def _moments(model: Any, name: str) -> tuple[Array, Array] | None:
    """Return mean and deviation of what a network's normaliser saw."""
    norm = model.norm_of(name) if isinstance(model, ObservingModule) else None
    return None if norm is None else (norm.shift.numpy(), 1 / norm.scale.numpy())


def _random_leaf(
    leaf: ArraySpec, random: np.random.Generator, moments: tuple[Array, Array] | None
) -> Array:
    shape = (STEPS, *leaf.given_shape)
    if leaf.nvec:
        low = np.asarray(leaf.start, np.int64).reshape(leaf.given)
        return low + random.integers(np.asarray(leaf.nvec).reshape(leaf.given), size=shape)
    if leaf.dtype == "uint8":
        return random.integers(256, size=shape, dtype=np.uint8)
    if leaf.dtype == "bool":
        return random.random(shape) < 0.5
    drawn = random.standard_normal(shape)
    if moments is not None:
        drawn = moments[0] + drawn * moments[1]
    return drawn.astype(np.float32)


def _random_masks(nvec: tuple[int, ...], random: np.random.Generator) -> Array:
    """Return masks that allow at least one action of each component."""
    columns = []
    for count in nvec:
        allowed = random.random((STEPS, count)) < 0.5
        allowed[np.arange(STEPS), random.integers(count, size=STEPS)] = True
        columns.append(allowed)
    return np.concatenate(columns, axis=1)
