"""``rl-training export``: a trained policy as a file for deployment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.terminal import one_line, show
from rl_training.trust import trust_from_flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write a trained policy as a file that runs without rl_training.

    The file takes observations as the environment returns them and returns actions in the
    environment's format: normalisation, image layout, masks, memory and action bounds are inside.
    It is compared with ``predict`` on observations of the run's environment, and kept only if it
    chooses the same actions (parity.json). policy.json describes inputs and outputs.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its last checkpoint is used) or a checkpoint file."""
    out: Path
    """Folder to write; if it exists, it must be empty."""
    format: Literal["onnx", "torch", "safetensors"] = "onnx"
    """'onnx': for ONNX Runtime and others; 'torch': a program of torch.export, for PyTorch alone;
    'safetensors': the weights and their description, for rl_training.export.load_exported."""
    stochastic: bool = False
    """Sample actions, as predict(deterministic=False) does, from random numbers that are an input
    of the file; without it: the most likely actions."""
    tolerance: float = 1e-5
    """Largest accepted difference of an action from that of predict, as a part of its range."""
    env_id: str | None = None
    """Gymnasium id of the environment whose observations are compared, with the spaces of the
    policy; unset: that of the run, or random observations where it cannot be made."""
    env_kwargs: dict[str, Any] | None = None
    """Keyword arguments of gymnasium.make (YAML: '{gravity: -5.0}'); unset: those of the run, or
    none with --env-id."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command."""
    text = HelpText(
        "RUN --out DIR [flags]",
        examples=(
            "rl-training export runs/RUN --out deployed",
            "rl-training export runs/RUN --out deployed --format safetensors",
            "rl-training export runs/RUN/checkpoints/best.pt --out sampled --stochastic",
        ),
    )
    options: ExportArgs = parse_flags(ExportArgs, args, "rl-training export", text)
    from rl_training.checkpointing import find_checkpoint
    from rl_training.export import export_policy
    from rl_training.export.metadata import origin_of
    from rl_training.export.observations import reason_without
    from rl_training.export.writing import check_request
    from rl_training.runtime.stored import load_stored, with_environment
    from rl_training.runtime.workflows import policy_from_state

    check_request(options.out, options.format, options.stochastic, options.tolerance)
    found = find_checkpoint(options.checkpoint)
    stored = load_stored(found, trust=trust_from_flag(options.trust_modules))
    state = with_environment(stored.state, options.env_id, options.env_kwargs)
    exported = export_policy(
        policy_from_state(state, "cpu"),
        options.out,
        options.format,
        stochastic=options.stochastic,
        tolerance=options.tolerance,
        needs_env=options.env_id is not None or options.env_kwargs is not None,
        without_env=reason_without(state, None),
        origin=origin_of(state, stored.digest),
    )
    parity = exported.parity
    show(f"{one_line(str(exported.file))}\n{parity.in_words()}\n")
    if options.json:
        described = {
            "folder": str(exported.folder),
            "file": str(exported.file),
            "format": exported.format,
            "parity": parity.described(),
        }
        show(json.dumps(described) + "\n")
    return 0
