"""Read the content of a checkpoint, and check it before anything is built from it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_training._internal.coerce import require
from rl_training._internal.tree import tree_leaves
from rl_training.checkpointing import Stored, read_checkpoint
from rl_training.communicator import ALONE, saved_shards
from rl_training.config import TrainConfig, config_from_mapping
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFailure,
    NonFiniteError,
    RankFailure,
    StorageError,
    UserError,
    WorkerError,
)
from rl_training.registry import TORCHRUN, check_spaces, find_entry, spec_of
from rl_training.shared_folder import CONFIG, SharedPolicy, is_shared, open_shared
from rl_training.stored_zip import quote
from rl_training.trust import Trust, foreign_names, require_trust
from rl_training.types import ActionSpec, ObsSpec

IN_MEMORY = Path("a model in memory")
"""What the config of a run records as ``init_from`` where the weights are of no file."""
_POLICY = {"config", "custom_env", "obs_spec", "action_spec", "algorithm"}
_EXPLAINED = (
    *(UserError, EnvironmentFailure, WorkerError, NonFiniteError, RankFailure, StorageError),
    OSError,
)


def load_state(path: Path, *, trust: Trust = False) -> dict[str, Any]:
    """Read a checkpoint's state; ``trust`` lists the modules that its config may name."""
    return load_stored(path, trust=trust).state


def load_stored(path: Path, *, trust: Trust = False) -> Stored:
    """Read a checkpoint's state and its digest, as `load_state` does."""
    if is_shared(path):
        with open_shared(path) as shared:
            require_trust(shared.state["config"], trust, path.parent, shared.digest)
            _require_shapes(shared)
            stored = Stored(shared.digest, shared.with_weights())
        _require_policy(path, stored.state)
        return stored
    stored = read_checkpoint(path)
    _require_policy(path, stored.state)
    require_trust(stored.state["config"], trust, path, stored.digest)
    _upgrade(stored.state)
    return stored


def _upgrade(state: dict[str, Any]) -> None:
    """Convert the state of an earlier version to the current layout."""
    training = state.get("training")
    if not isinstance(training, dict) or "source" in training:
        return
    collector = training.pop("collector", None)
    if isinstance(collector, dict):  # other types are refused when they are read
        training["source"] = {"actor": training.pop("actor", None), **collector}


def load_model_weights(path: Path) -> dict[str, Any]:
    """Read a checkpoint's state to use only its weights: nothing that it names is imported."""
    if is_shared(path):
        with open_shared(path) as shared:
            if not foreign_names(shared.state["config"]):  # else making the networks would import
                _require_shapes(shared)
            state = shared.with_weights()
    else:
        state = read_checkpoint(path).state
    _require_policy(path, state)
    return state


def _require_shapes(shared: SharedPolicy) -> None:
    """Raise CheckpointError unless a file has exactly the weights of the networks of its config.

    The networks are made without memory (torch's device "meta"), before the weights are read.
    """
    path, state = shared.path, shared.state
    config = config_from_state(state)
    with malformed_state(path):
        obs_spec = ObsSpec.from_plain(state["obs_spec"])
        action_spec = ActionSpec.from_plain(state["action_spec"])
        check_spaces(config.algo, obs_spec, action_spec)
        more = (ALONE,) if TORCHRUN in find_entry(config.algo).engines else ()
        meta = torch.device("meta")
        with meta:
            learner = spec_of(config).build(config, obs_spec, action_spec, meta, *more)
        expected = learner.module.state_dict()
    for name in sorted(expected.keys() ^ shared.shapes.keys()):
        problem = "lacks" if name in expected else "has an unexpected"
        raise CheckpointError(f"{path} {problem} weight {quote(name)}, by {CONFIG} of its folder")
    for name, (dtype, shape) in shared.shapes.items():
        wanted = expected[name]
        if (dtype, shape) != (wanted.dtype, tuple(wanted.shape)):
            raise CheckpointError(
                f"{path}: {quote(name)} is {dtype} of shape {shape}; {CONFIG} of its folder needs"
                f" {wanted.dtype} of shape {tuple(wanted.shape)}"
            )


def _require_policy(path: Path, state: dict[str, Any]) -> None:
    if missing := _POLICY - set(state):
        raise CheckpointError(f"{path} contains no policy: it lacks {', '.join(sorted(missing))}")
    if type(state["custom_env"]) is not bool:
        raise CheckpointError(f"{path} contains no policy: its 'custom_env' is not true or false")
    algorithm = state["algorithm"]
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("model"), dict):
        raise CheckpointError(f"{path} contains no policy: it lacks the weights (algorithm.model)")
    _refuse_nan(path, algorithm, "algorithm")


def _refuse_nan(path: Path, value: Any, name: str) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            raise CheckpointError(f"{path}: {name} holds a NaN")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_nan(path, item, f"{name}.{key}")


def config_from_state(state: Mapping[str, Any]) -> TrainConfig[Any]:
    """Return the config of a checkpoint."""
    config = state["config"]
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise CheckpointError("the checkpoint's config is not a mapping of settings")
    try:
        with warnings.catch_warnings():  # no warnings about old names of settings
            warnings.simplefilter("ignore", FutureWarning)
            return config_from_mapping(config)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint's config cannot be used: {error}") from None


def with_environment(
    state: dict[str, Any], env_id: str | None, env_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a checkpoint's state with the environment that its policy is to play.

    ``env_id`` None is the run's own; ``env_kwargs`` None are the run's own, or with ``env_id``
    none. The policy is unchanged: its spaces are compared when the environment is made.
    """
    changes: dict[str, Any] = {}
    if env_id is not None:
        require(bool(env_id.strip()), "env_id", "the id of an environment", env_id)
        changes = {"env_id": env_id, "env_kwargs": {}}
    if env_kwargs is not None:
        changes["env_kwargs"] = dict(env_kwargs)
    if not changes:
        return state
    config = config_from_state(state).with_overrides(**changes)
    by_function = state["custom_env"] and env_id is None
    return {**state, "config": config.to_dict(), "custom_env": by_function}


@contextlib.contextmanager
def malformed_state(where: object) -> Iterator[None]:
    """Raise a one-line `CheckpointError` if a state does not have the expected form."""
    try:
        yield
    except _EXPLAINED:
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{where} cannot be restored: its content does not have the expected form"
            f" ({type(error).__name__}{': ' + detail if detail else ''})"
        ) from error


def require_plausible_sizes(config: TrainConfig[Any], state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the config has larger networks than the file has weights.

    This is checked before memory is allocated. A layer of n units has at least n weights, and two
    consecutive layers have at least n m.
    """
    held = sum(
        value.numel()
        for value in state["algorithm"]["model"].values()
        if isinstance(value, torch.Tensor)
    )
    obs, action = ObsSpec.from_plain(state["obs_spec"]), ActionSpec.from_plain(state["action_spec"])
    sizes = {"action_spec": max(action.size, *action.nvec, 0)}
    settings = config.algo_kwargs
    is_own = any(getattr(settings, name, None) is not None for name in ("encoder", "network"))
    if not is_own:  # a network of the user's own may have fewer weights than its input
        # Convolutions have fewer weights than an image has pixels.
        for key, leaf in obs.encoded.items():
            sizes[f"obs_spec {key!r}"] = leaf.size // (64 if leaf.is_image else 1)
    has_cnn = obs.has_images and not is_own
    for name, size in {**sizes, **dict(_layer_sizes(settings, has_cnn))}.items():
        if size > held:
            raise CheckpointError(
                f"the checkpoint describes {name} = {size:,}, but it contains {held:,} weights"
            )


def _layer_sizes(knobs: Any, has_images: bool) -> Iterator[tuple[str, int]]:
    """Yield settings and the least number of weights that each implies."""
    for name in (field.name for field in dataclasses.fields(knobs)):
        value = getattr(knobs, name)
        if name.endswith("_sizes"):
            yield f"{name}, the widest,", max(value or (), default=0)
            pairs = [a * b for a, b in itertools.pairwise(value or ())]
            yield f"{name}, two layers,", max(pairs, default=0)
        elif name == "lstm_size" and getattr(knobs, "memory", "lstm") != "none":
            yield "lstm_size squared", value**2
        elif name in ("num_critics", "mixing_size") or (name == "feature_size" and has_images):
            yield name, value


_LARGE_BATCH = 1 << 20
_LARGEST_UPDATE = 1 << 25


def require_plausible_run(config: TrainConfig[Any], training: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the config contradicts the saved training state.

    This is checked before memory is allocated.
    """
    knobs, counters = config.algo_kwargs, training["counters"]
    source = training["source"]
    sources = saved_shards(source["shards"] if config.lag else source)
    if len(sources) != config.shards:
        raise _contradicted("shards", config.shards, f"{len(sources):,} shards")
    for source in sources:
        obs = source.get("obs")
        for leaf in [] if obs is None else tree_leaves(obs):
            rows = config.num_envs // config.shards
            several = find_entry(config.algo).multi_agent  # a row for each agent
            if len(leaf) % rows if several else len(leaf) != rows:
                held = f"observations of {len(leaf) * config.shards:,}"
                raise _contradicted("num_envs", config.num_envs, held)
    rollout = config.num_envs * getattr(knobs, "num_steps", 0)
    if rollout > counters["total"]:
        raise _contradicted("num_steps", knobs.num_steps, f"a total of {counters['total']:,} steps")
    if (rows := getattr(knobs, "rows_per_update", 0)) > _LARGEST_UPDATE:
        raise _contradicted("batch_size x samples", rows, f"room for {_LARGEST_UPDATE:,}")
    if hasattr(knobs, "buffer_size") and not config.is_offline:
        _require_plausible_replay(config, training)


def _require_plausible_replay(config: TrainConfig[Any], training: Mapping[str, Any]) -> None:
    knobs, capacity = config.algo_kwargs, config.algo_kwargs.buffer_size
    for replay in saved_shards(training["extra"]["replay"]):
        rows, envs, _ = replay["ring"]["shape"]
        held = rows * envs * config.shards
        if capacity > held:
            raise _contradicted("buffer_size", capacity, f"a replay of {held:,} transitions")
    if (drawn := knobs.samples_per_update) > max(capacity, _LARGE_BATCH):
        raise _contradicted("batch_size", drawn, f"a buffer_size of {capacity:,}")


def _contradicted(name: str, value: int, held: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's config has {name} = {value:,}, but its state has {held}"
    )
