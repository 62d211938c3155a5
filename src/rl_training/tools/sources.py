"""Where ``rl-training train`` takes its settings from, and advice for wrong words."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training._internal.flags import UnknownWordError
from rl_training.config import (
    TrainConfig,
    algo_config_type,
    find_config,
    preset_names,
    settings_from_file,
)
from rl_training.errors import ConfigError, is_name_elsewhere, nearest_name
from rl_training.registry import ALGORITHMS

NOTHING_TO_TRAIN = (
    "nothing to train: name a preset (rl-training train ppo/cartpole), a file (rl-training train"
    " --config my.yaml), or an environment (rl-training train --algo ppo --env-id CartPole-v1)"
)


def take_source(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the preset (the first word) or the file of --config, and the other words."""
    words = list(args)
    file = value_of(words, "--config")
    if words and not words[0].startswith("-"):
        if file is not None:
            raise ConfigError(
                f"name a preset or --config FILE, not both ({words[0]} and {file}): a file may"
                f" contain the line 'preset: {words[0]}'"
            )
        return words[0], words[1:]
    if file is None:
        return None, words
    at = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--config")
    return file, words[:at] + words[at + (1 if "=" in words[at] else 2) :]


def value_of(args: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag, None if it is not given; raises ConfigError without a value."""
    if sum(word.partition("=")[0] == flag for word in args) > 1:
        raise ConfigError(f"{flag} is given twice")
    for i, word in enumerate(args):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag:
            if i + 1 == len(args) or args[i + 1].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            return args[i + 1]
    return None


def source_settings(source: str) -> dict[str, Any]:
    """Return the settings of a preset or file."""
    if not _is_source(source):
        _refuse_source(source)
    settings = settings_from_file(source)
    if not settings:
        raise ConfigError(f"{source} holds no settings: it needs at least the line 'env_id: ...'")
    return settings


def is_env_id(name: str) -> bool:
    """Return whether a name has the form of an environment's id, such as CartPole-v1."""
    return re.search(r"-v\d+$", name) is not None


def explained(error: UnknownWordError, source: str | None, algo: str) -> ConfigError:
    """Return the error for a word that ``rl-training train`` does not expect, with what to write.

    Args:
        error: the error of the parser.
        source: the preset or file that was named before.
        algo: name of the algorithm.
    """
    word = error.word
    if word == "--config":
        return ConfigError("--config is given twice: name one file")
    if word.startswith("--"):
        return _explained_flag(error, algo)
    if _is_source(word):
        shown = shlex.quote(word)
        if source is None:
            return ConfigError(f"{shown} must come first: rl-training train {shown} [flags]")
        return ConfigError(f"name one preset or file, not both {source} and {shown}")
    return error


def kept_setting(error: UnknownWordError) -> ConfigError:
    """Return the error for a flag of ``rl-training resume``; a run keeps its settings."""
    field = error.word.removeprefix("--").rpartition(".")[2].replace("-", "_")
    settings = {one.name for one in dataclasses.fields(TrainConfig)}
    if field not in settings and not any(_has_setting(name, field) for name in ALGORITHMS.names()):
        return error
    return ConfigError(
        f"resume cannot change {error.word}: a run keeps its settings. For a new run from these"
        f" weights: rl-training train ... --init-from RUN {error.word} ..."
    )


def _explained_flag(error: UnknownWordError, algo: str) -> ConfigError:
    """Return the error for a flag, naming the algorithms that have it."""
    field = error.word.removeprefix("--").rpartition(".")[2].replace("-", "_")
    owners = [name for name in ALGORITHMS.names() if _has_setting(name, field)]
    if not owners:
        return error
    _, found, hint = str(error).partition(" Did you mean ")
    end = f".{found}{hint}" if found and is_name_elsewhere(field) else ""
    return ConfigError(f"{error.word} is a setting of {', '.join(owners)}, not of {algo}{end}")


def _has_setting(algo: str, field: str) -> bool:
    field = field.removeprefix("no_")
    with contextlib.suppress(ConfigError, ImportError, AttributeError):  # a broken package
        kind = algo_config_type(algo)
        refused = getattr(kind, "NOT_SUPPORTED", {})
        return field in {one.name for one in dataclasses.fields(kind)} - refused.keys()
    return False


def _is_source(word: str) -> bool:
    try:
        return find_config(word).is_file()
    except ConfigError:
        return False


def _refuse_source(word: str) -> None:
    """Raise ConfigError for the name of an algorithm or environment, or of no preset."""
    shown = shlex.quote(word)
    if (algo := word.lower().replace("-", "_")) in ALGORITHMS:
        raise ConfigError(f"{word!r} is an algorithm: rl-training train --algo {algo} --env-id ENV")
    if is_env_id(word):
        raise ConfigError(f"{word!r} is an environment: rl-training train --env-id {shown}")
    if Path(word).suffix in (".yaml", ".yml") or nearest_name(word, preset_names()):
        return
    similar = [name for name in preset_names() if word.lower() in name]
    if similar:
        raise ConfigError(
            f"no preset or file {word!r}. Presets with this word: {', '.join(similar)}"
        )
    raise ConfigError(f"no preset or file {word!r}: rl-training presets lists the presets")
