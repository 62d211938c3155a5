"""The model card of a shared policy: what it is, how well it plays, and where it is from."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training._internal.yaml_io import dump_yaml
from rl_training.config import TrainConfig
from rl_training.eval import EvalResult, spec_in_words
from rl_training.registry import find_entry
from rl_training.runs import versions
from rl_training.terminal import one_line
from rl_training.types import ActionSpec, ObsSpec


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a policy is from."""

    digest: str
    """SHA-256 of the checkpoint, or of the imported file."""
    step: int | None = None
    """Step of the checkpoint; None where it is unknown."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The metadata of its run folder; empty where there is none."""
    imported: str | None = None
    """What it was converted from; None for policies of this package."""


@dataclasses.dataclass(frozen=True)
class Played:
    """An evaluation of exactly the shared weights."""

    result: EvalResult
    deterministic: bool
    seed: int


def model_card(
    config: TrainConfig[Any], spaces: Mapping[str, Any], origin: Origin, played: Played | None
) -> str:
    """Return the text of a README with metadata for Hugging Face."""
    name = find_entry(config.algo).class_name_of(config.algo)
    env = config.env_id or config.dataset or "an environment"
    parts = [
        f"# {name} on {_plain(env)}",
        f"A policy of `rl_training`, algorithm {_code(config.algo)}, for {_code(env)}.",
        "## Results\n\n" + _results(played),
        "## Use\n\n" + _use(name, bool(spaces["custom_env"])),
        "## Spaces\n\n" + _listed(_spaces(spaces)),
        "## Training\n\n" + _training(config, origin),
        "## Provenance\n\n" + _listed(_provenance(config, origin, played)),
    ]
    return f"---\n{dump_yaml(_metadata(config, env, played))}---\n\n" + "\n\n".join(parts) + "\n"


def _metadata(config: TrainConfig[Any], env: str, played: Played | None) -> dict[str, Any]:
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "rl_training", config.algo]
    metadata: dict[str, Any] = {
        "library_name": "rl_training",
        "pipeline_tag": "reinforcement-learning",
        "tags": [*map(str, tags), str(env)],
    }
    if played is None:
        return metadata
    value = f"{played.result.mean_return:.2f} +/- {played.result.std_return:.2f}"
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"type": str(env), "name": str(env)},
        "metrics": [
            {"type": "mean_reward", "name": "mean_reward", "value": value, "verified": False}
        ],
    }
    return {**metadata, "model-index": [{"name": f"{config.algo}-{env}", "results": [result]}]}


def _results(played: Played | None) -> str:
    if played is None:
        return "It was not evaluated when it was shared."
    result = played.result
    how = "most likely actions" if played.deterministic else "sampled actions"
    row = (
        f"| {result.mean_return:.2f} | {result.std_return:.2f} | {min(result.returns):.2f} |"
        f" {max(result.returns):.2f} | {len(result.returns)} | {how} | {played.seed} |"
    )
    head = "| mean return | std | min | max | episodes | actions | seed |\n" + "| --- " * 7 + "|"
    return f"Of exactly these weights, over whole episodes:\n\n{head}\n{row}"


def _use(name: str, custom_env: bool) -> str:
    env = ", env_fn=MyEnv" if custom_env else ""
    evaluate = "" if custom_env else "    rl-training eval FOLDER\n\n"
    return (
        f"{evaluate}"
        f"    from rl_training import {name}\n\n"
        f'    model = {name}.load("FOLDER"{env})\n'
        "    action = model.act(observation)\n\n"
        "`FOLDER` is this folder; `rl-training fetch USER/REPO` downloads it. Nothing in it is"
        " unpickled, and no\nmodule that it names is imported without your consent."
    )


def _spaces(spaces: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "observations", spec_in_words(ObsSpec.from_plain(spaces["obs_spec"]))
    yield "actions", spec_in_words(ActionSpec.from_plain(spaces["action_spec"]))


def _training(config: TrainConfig[Any], origin: Origin) -> str:
    if origin.imported is not None:
        return (
            f"Converted from {_plain(origin.imported)}. Of `config.yaml` the environment, the"
            " networks and `gamma` are\nthose of the converted model; other settings are defaults."
        )
    command = _command(origin.metadata)
    shown = "" if command is None else f"The command of the run:\n\n    {command}\n\n"
    return (
        f"{shown}All settings are in `config.yaml`:\n\n"
        "    rl-training train --config config.yaml\n\n"
        f"Seed {config.seed}, planned for {config.total:,} {config.unit}."
    )


def _command(metadata: Mapping[str, Any]) -> str | None:
    """Return the command line of a run, with the program's name in place of its path."""
    words = metadata.get("command")
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        return None
    program = Path(words[0]).name
    names = {"cli.py": ["rl-training"], "rl-training": ["rl-training"]}
    return one_line(shlex.join([*names.get(program, ["python", program]), *words[1:]]))


def _provenance(
    config: TrainConfig[Any], origin: Origin, played: Played | None
) -> Iterator[tuple[str, str]]:
    yield ("imported file" if origin.imported else "checkpoint") + " SHA-256", origin.digest
    yield "weights SHA-256", "{model_sha256}"
    if origin.step is not None:
        yield f"trained {config.unit}", f"{origin.step:,}"
    seeds = "" if played is None else f", of the evaluation {played.seed}"
    yield "seeds", f"of the run {config.seed}{seeds}"
    for key in ("created", "git_commit", "device", "resume"):
        value = origin.metadata.get(key)
        if isinstance(value, str):
            yield key, value
    resumes = origin.metadata.get("resumes")
    if isinstance(resumes, list) and resumes:
        yield "resumed", f"{len(resumes)} times" if len(resumes) > 1 else "once"
    yield "shared with", _in_words(versions())
    trained = origin.metadata.get("versions")
    if isinstance(trained, Mapping):
        yield "trained with", _in_words(trained)


def _in_words(found: Mapping[Any, Any]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found.items())


def _listed(rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {_code(value)}" for name, value in rows)


def _code(text: str) -> str:
    """Return text as code of Markdown that it cannot end."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def _plain(text: str) -> str:
    """Return text without the characters that Markdown and HTML give a meaning."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>()#!|" else char for char in one_line(text))
