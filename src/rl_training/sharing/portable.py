"""Write a policy as a shared folder: weights, config, spaces and a model card."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError
from rl_training.runs import read_json
from rl_training.runtime.stored import config_from_state
from rl_training.shared_folder import require_free, write_shared
from rl_training.sharing.card import Origin, Played, model_card

_OF_THE_MACHINE = {
    "output_dir": Path("runs"),
    "init_from": None,
    "device": "auto",
    "torch_threads": None,
    "wandb": False,
    "mlflow": False,
    "trackers": (),
}
"""Settings that concern the machine of a run and not its policy, and their values elsewhere."""


def portable_config(config: TrainConfig[Any]) -> TrainConfig[Any]:
    """Return a config without the folders and the devices of this machine."""
    changes = dict(_OF_THE_MACHINE)
    if config.dataset is not None and Path(config.dataset).expanduser().is_absolute():
        changes["dataset"] = Path(config.dataset).name
    return config.with_overrides(**changes)


def origin_of(checkpoint: Path | None, state: Mapping[str, Any], digest: str) -> Origin:
    """Return where a policy is from: its checkpoint, and the metadata of its run folder."""
    step = None
    if "training" in state:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            step = int(state["training"]["counters"]["global_step"])
    metadata: dict[str, Any] = {}
    if checkpoint is not None and checkpoint.parent.name == "checkpoints":
        metadata = read_json(checkpoint.parent.parent / "metadata.json")
    return Origin(digest=digest, step=step, metadata=metadata)


def share_policy(
    folder: Path, state: Mapping[str, Any], origin: Origin, played: Played | None = None
) -> Path:
    """Write the policy of a checkpoint's state to a new folder; return the folder.

    Args:
        folder: where it is written; it must be missing or empty.
        state: the state of a checkpoint or of a portable policy file.
        origin: where the policy is from.
        played: the evaluation that the model card shows.
    """
    require_free(folder)
    model = state["algorithm"]["model"]
    if not all(hasattr(value, "dtype") for value in model.values()):
        raise CheckpointError("the weights of this policy are no tensors: it cannot be shared")
    config = portable_config(config_from_state(state))
    spaces = {name: state[name] for name in ("custom_env", "obs_spec", "action_spec")}
    card = model_card(config, spaces, origin, played)
    write_shared(folder, config.to_dict(), spaces, model, card)
    return folder
