"""A checkpoint's content, checked before anything is built from it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_training._internal.tree import tree_leaves
from rl_training.checkpointing import read_checkpoint
from rl_training.config import TrainConfig, config_from_mapping
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFailure,
    NonFiniteError,
    StorageError,
    UserError,
    WorkerError,
)
from rl_training.trust import Trust, require_trust
from rl_training.types import ActionSpec, ObsSpec

_POLICY = {"config", "custom_env", "obs_spec", "action_spec", "algorithm"}
_EXPLAINED = (UserError, EnvironmentFailure, WorkerError, NonFiniteError, StorageError, OSError)


def load_state(path: Path, *, trust: Trust = False) -> dict[str, Any]:
    """Read all that makes a policy; ``trust`` says which modules it may name."""
    stored = read_checkpoint(path)
    state = stored.state
    _require_policy(path, state)
    require_trust(state["config"], trust, path, stored.digest)
    _upgrade(state)
    return state


def _upgrade(state: dict[str, Any]) -> None:
    """Bring the state of an earlier version into today's layout."""
    training = state.get("training")
    if not isinstance(training, dict) or "source" in training:
        return
    collector = training.pop("collector", None)
    if isinstance(collector, dict):  # else it is refused where it is read
        training["source"] = {"actor": training.pop("actor", None), **collector}


def load_model_weights(path: Path) -> dict[str, Any]:
    """Read a policy's content for its weights alone: nothing that it names is imported."""
    state = read_checkpoint(path).state
    _require_policy(path, state)
    return state


def _require_policy(path: Path, state: dict[str, Any]) -> None:
    if missing := _POLICY - set(state):
        raise CheckpointError(f"{path} holds no policy: it lacks {', '.join(sorted(missing))}")
    if type(state["custom_env"]) is not bool:
        raise CheckpointError(f"{path} holds no policy: its 'custom_env' is not true or false")
    algorithm = state["algorithm"]
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("model"), dict):
        raise CheckpointError(f"{path} holds no policy: it lacks the weights (algorithm.model)")
    _refuse_nan(path, algorithm, "algorithm")


def _refuse_nan(path: Path, value: Any, name: str) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            raise CheckpointError(f"{path}: {name} holds a NaN")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_nan(path, item, f"{name}.{key}")


def config_from_state(state: Mapping[str, Any]) -> TrainConfig[Any]:
    """The config a checkpoint was written with."""
    config = state["config"]
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise CheckpointError("the checkpoint's config is not a mapping of settings")
    try:
        with warnings.catch_warnings():  # its old names of settings were written by this package
            warnings.simplefilter("ignore", FutureWarning)
            return config_from_mapping(config)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint's config cannot be used: {error}") from None


@contextlib.contextmanager
def malformed_state(where: object) -> Iterator[None]:
    """Raise `CheckpointError` in one line where a state does not have the form it should have."""
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
    """Refuse sizes that the saved weights contradict, before memory is taken for them.

    A layer of n units has at least n weights, and two layers in a row have n m: a file is at least
    as large as the networks that it describes.
    """
    held = sum(
        value.numel()
        for value in state["algorithm"]["model"].values()
        if isinstance(value, torch.Tensor)
    )
    obs, action = ObsSpec.from_plain(state["obs_spec"]), ActionSpec.from_plain(state["action_spec"])
    sizes = {"action_spec": max(action.size, *action.nvec, 0)}
    if getattr(config.algo_kwargs, "encoder", None) is None:
        # Convolutions have fewer weights than an image has pixels.
        for key, leaf in obs.encoded.items():
            sizes[f"obs_spec {key!r}"] = leaf.size // (64 if leaf.is_image else 1)
    for name, size in {**sizes, **dict(_layer_sizes(config.algo_kwargs, obs.has_images))}.items():
        if size > held:
            raise CheckpointError(
                f"the checkpoint describes {name} = {size:,}, but it holds {held:,} weights"
            )


def _layer_sizes(knobs: Any, has_images: bool) -> Iterator[tuple[str, int]]:
    """Numbers of weights that the knobs imply at least."""
    for name in (field.name for field in dataclasses.fields(knobs)):
        value = getattr(knobs, name)
        if name.endswith("_sizes"):
            yield f"{name}, the widest,", max(value or (), default=0)
            pairs = [a * b for a, b in itertools.pairwise(value or ())]
            yield f"{name}, two layers,", max(pairs, default=0)
        elif name == "lstm_size":
            yield "lstm_size squared", value**2
        elif name == "num_critics" or (name == "feature_size" and has_images):
            yield name, value


_LARGE_BATCH = 1 << 20


def require_plausible_run(config: TrainConfig[Any], training: Mapping[str, Any]) -> None:
    """Refuse numbers that the saved training state contradicts, before memory is taken for them."""
    knobs, counters = config.algo_kwargs, training["counters"]
    obs = training["source"].get("obs")
    for leaf in [] if obs is None else tree_leaves(obs):
        if len(leaf) != config.num_envs:
            raise _contradicted("num_envs", config.num_envs, f"observations of {len(leaf):,}")
    rollout = config.num_envs * getattr(knobs, "num_steps", 0)
    if rollout > counters["total"]:
        raise _contradicted("num_steps", knobs.num_steps, f"a total of {counters['total']:,} steps")
    if (capacity := getattr(knobs, "buffer_size", None)) is not None:
        rows, envs, _ = training["extra"]["replay"]["ring"]["shape"]
        if capacity > rows * envs:
            raise _contradicted("buffer_size", capacity, f"a replay of {rows * envs:,} transitions")
        if (drawn := knobs.samples_per_update) > max(capacity, _LARGE_BATCH):
            raise _contradicted("batch_size", drawn, f"a buffer_size of {capacity:,}")


def _contradicted(name: str, value: int, held: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's config has {name} = {value:,}, but it holds {held}")
