"""``rl-training presets``: the packaged presets and what they reached."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated, Any

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training._internal.yaml_io import load_yaml_file
from rl_training.config import find_config, preset_names
from rl_training.errors import ConfigError
from rl_training.terminal import show_result
from rl_training.tools.zoo.names import zoo_preset_names

_TEXT = HelpText(
    "[WORD...] [--json]",
    examples=("rl-training presets", "rl-training presets pendulum lunarlander"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetsArgs:
    """List the presets that ``rl-training train NAME`` and ``rl-training zoo run NAME`` accept."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="WORD...")] = ()
    """List only the presets whose name or environment contains one of these words."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """One packaged preset."""

    name: str
    env_id: str
    steps: int
    reached: str
    """The measured return of the final policies, in the words of the preset."""


def packaged_presets(words: tuple[str, ...] = ()) -> list[Preset]:
    """Return the presets whose name or environment contains one of ``words``; all without words."""
    found = [_read(name) for name in [*preset_names(), *zoo_preset_names()]]
    wanted = [word.lower() for word in words]
    return [
        preset
        for preset in found
        if not wanted or any(w in f"{preset.name} {preset.env_id}".lower() for w in wanted)
    ]


def _read(name: str) -> Preset:
    """Return a preset without building its config, which would import the algorithm."""
    values: dict[str, Any] = load_yaml_file(find_config(name))
    measured = values.get("verified") or values.get("partial") or {}
    reached = " ".join(str(measured.get("return", "not measured")).split())
    if "preset" in values:
        values = {**load_yaml_file(find_config(values["preset"])), **values}
    total = values.get("total_updates") or values["total_timesteps"]
    return Preset(name, str(values["env_id"]), int(total), reached)


def _brief(reached: str) -> str:
    """The mean return, without the list of seeds."""
    return re.split(r"[,(]", reached)[0].strip()


def main(args: list[str]) -> int:
    """Run the command."""
    options: PresetsArgs = parse_flags(PresetsArgs, args, "rl-training presets", _TEXT)
    presets = packaged_presets(options.words)
    if not presets:
        raise ConfigError(f"no preset contains {' or '.join(map(repr, options.words))}")
    rows = [(p.name, p.env_id, f"{p.steps:,}", _brief(p.reached)) for p in presets]
    rows.insert(0, ("preset", "environment", "steps", "return"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    show_result("\n".join(lines) + "\n")
    if options.json:
        show_result(json.dumps({"presets": [dataclasses.asdict(p) for p in presets]}) + "\n")
    return 0
