"""`policy.json`: what a deployer must know to feed an exported policy, and to load its weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.checkpointing import state_digest, to_storable
from rl_training.config import TrainConfig
from rl_training.export.formats import FILES, packages_of
from rl_training.export.module import PolicyModule
from rl_training.runs import versions
from rl_training.runtime.policy import TrainedPolicy
from rl_training.types import ActionSpec, ObsSpec

POLICY_FILE = "policy.json"
PARITY_FILE = "parity.json"
LAYOUT = 1
"""Version of the layout of `POLICY_FILE`."""
_OF_THIS_MACHINE = ("output_dir", "init_from")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a policy is from."""

    checkpoint_digest: str | None = None
    """SHA-256 in the checkpoint; None for a policy that has no file."""
    step: int | None = None
    """Environment steps (of a run from a dataset alone: updates) it was trained for, if known."""


def origin_of(state: Mapping[str, Any], digest: str | None) -> Origin:
    """Return where the policy of a checkpoint's state is from."""
    training = state.get("training")
    step = training["counters"]["global_step"] if isinstance(training, Mapping) else None
    return Origin(digest, None if step is None else int(step))


def description(config: TrainConfig[Any], obs: ObsSpec, action: ActionSpec) -> dict[str, Any]:
    """Return what a policy is rebuilt from, besides its weights, as JSON values."""
    settings = {k: v for k, v in config.to_dict().items() if k not in _OF_THIS_MACHINE}
    described = {
        "config": settings,
        "obs_spec": obs.to_plain(),
        "action_spec": action.to_plain(),
    }
    plain: dict[str, Any] = _finite(to_storable(described))
    return plain


def weights_of(policy: TrainedPolicy) -> dict[str, Tensor]:
    """Return all weights, each in memory of its own."""
    return {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in policy.module.state_dict().items()
    }


def policy_digest(described: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over what `description` returned and all weights."""
    ordered = dict(sorted(weights.items()))
    return state_digest({"described": json.dumps(described), "weights": ordered})


def policy_metadata(
    policy: TrainedPolicy, module: PolicyModule, name: str, origin: Origin
) -> dict[str, Any]:
    """Return the content of `POLICY_FILE`, as JSON values."""
    described = description(policy.config, policy.obs_spec, policy.action_spec)
    found = versions() | {one: metadata.version(one) for one in packages_of(name)}
    about = {
        "layout": LAYOUT,
        "format": name,
        "file": FILES[name],
        "algo": policy.config.algo,
        "env_id": policy.config.env_id,
        "digest": policy_digest(described, weights_of(policy)),
        "checkpoint_digest": origin.checkpoint_digest,
        "step": origin.step,
        "stochastic": bool(module.noises),
        "inputs": [port.described() for port in module.signature.inputs],
        "outputs": [port.described() for port in module.signature.outputs],
        "action_space": described["action_spec"],
        "versions": found,
    }
    return {**about, "rebuilt_from": described} if name == "safetensors" else about


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that any parser reads: without NaN and infinities."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """Return a value with infinities as text, which ``float`` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
