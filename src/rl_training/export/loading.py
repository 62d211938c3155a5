"""Rebuild a policy from exported weights, without unpickling anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_training.checkpointing import to_storable
from rl_training.errors import CheckpointError
from rl_training.export.formats import FILES, require_packages
from rl_training.export.metadata import LAYOUT, POLICY_FILE, policy_digest
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.workflows import policy_from_weights
from rl_training.trust import Trust, require_trust
from rl_training.untrusted_files import read_regular

_LARGEST_JSON = 16 << 20
_LARGEST_WEIGHTS = 16 << 30
_DESCRIBED = ("config", "obs_spec", "action_spec")


def load_exported(
    folder: str | Path, device: str | None = None, *, trust: Trust = False
) -> TrainedPolicy:
    """Return the policy of a folder that was exported with ``format="safetensors"``.

    ``device``: device of the networks; unset: as in training. ``trust``: modules that may be
    imported if the folder names them (a list of module names, or True for all); unset: only those
    of folders that you exported on this machine.
    """
    folder = Path(folder)
    about = _described(folder / POLICY_FILE)
    weights = _weights(folder / FILES["safetensors"])
    described = {name: about["rebuilt_from"][name] for name in _DESCRIBED}
    digest = policy_digest(described, weights)
    if digest != about.get("digest"):
        raise CheckpointError(
            f"{folder} was altered or damaged: its digest does not match. Export it again"
        )
    require_trust(described["config"], trust, folder, digest)
    state = {**described, "custom_env": False, "algorithm": {"model": weights}}
    return policy_from_weights(state, device)


def _described(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(read_regular(path, _LARGEST_JSON))
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} holds no exported policy: cannot read {path}: {error.strerror}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(about, dict) or about.get("layout") != LAYOUT:
        raise CheckpointError(f"{path} does not describe an exported policy of this version")
    rebuilt_from = about.get("rebuilt_from")
    if about.get("format") != "safetensors" or not isinstance(rebuilt_from, dict):
        raise CheckpointError(
            f"{path.parent} was exported with format {about.get('format')!r}, which is run without"
            " rl_training: to load a policy here, export it with format safetensors"
        )
    if missing := [name for name in _DESCRIBED if not isinstance(rebuilt_from.get(name), dict)]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return about


def _weights(path: Path) -> dict[str, Any]:
    require_packages("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = read_regular(path, _LARGEST_WEIGHTS)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        weights: dict[str, Any] = to_storable(load(content))
    except (SafetensorError, ValueError, KeyError) as error:
        detail = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a safetensors file: {detail}") from None
    return weights
