"""``rl-training import-zoo``: hyperparameters of RL Baselines3 Zoo as a config file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training._internal.yaml_io import dump_yaml, load_yaml_file
from rl_training.config import FORMAT, config_from_mapping
from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.runs import storage_errors
from rl_training.terminal import one_line, say, show
from rl_training.tools.importing.zoo_settings import Translated, translate

_ATARI, _DEFAULT = "atari", "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZooArgs:
    """Convert an entry of a file of hyperparameters of RL Baselines3 Zoo to a config file.

    What the entry leaves out gets the defaults of Stable-Baselines3. Hyperparameters without a
    counterpart are listed, and nothing is written, unless --skip-unsupported is given.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The YAML file, such as hyperparams/ppo.yml."""
    algo: Literal["ppo", "a2c", "dqn", "sac", "td3"]
    """The algorithm that the file is for."""
    env_id: str
    """Gymnasium id of the environment to train on."""
    out: Path
    """The config file to write."""
    entry: str | None = None
    """Name of the entry in the file; unset: --env-id, for Atari games 'atari', or 'default'."""
    skip_unsupported: bool = False
    """Write the file without what has no counterpart; it is listed in its first lines."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command."""
    text = HelpText(
        "FILE --algo ALGO --env-id ENV --out FILE [flags]",
        examples=("rl-training import-zoo ppo.yml --algo ppo --env-id CartPole-v1 --out my.yaml",),
    )
    options: ZooArgs = parse_flags(ZooArgs, args, "rl-training import-zoo", text)
    if options.out.exists() or options.out.is_symlink():
        raise UserError(f"{options.out} exists: choose another file")
    entries = load_yaml_file(options.file)
    if not isinstance(entries, dict):
        raise ConfigError(f"{options.file} holds no entries of hyperparameters")
    name = _entry_name(options, entries)
    entry = entries[name]
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        raise ConfigError(f"{options.file}: the entry {name!r} is no mapping of hyperparameters")
    try:
        translated = translate(entry, options.algo, options.env_id)
        config_from_mapping(translated.settings)
    except ConfigError as error:
        raise ConfigError(f"{options.file}, entry {name!r}: {error}") from None
    missing = [f"{one} ({reason})" for one, reason in translated.missing.items()]
    if missing and not options.skip_unsupported:
        raise ConfigError(
            f"{options.file}, entry {name!r}, has what this package does not:"
            f" {'; '.join(missing)}. To write the file without it, add --skip-unsupported"
        )
    with storage_errors():
        try:
            options.out.write_text(_file(options, name, translated), encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"cannot write {options.out}: its folder does not exist") from None
    for line in (*translated.notes, *(f"left out: {one}" for one in missing)):
        say(f"note: {line}")
    out = one_line(str(options.out))
    show(f"wrote {out}\ntrain: rl-training train --config {out}\n")
    if options.json:
        result = {"file": str(options.out), "entry": name, "left_out": translated.missing}
        show(json.dumps({**result, "notes": translated.notes}) + "\n")
    return 0


def _entry_name(options: ZooArgs, entries: dict[Any, Any]) -> str:
    """Return the entry for an environment, as RL Baselines3 Zoo finds it."""
    wanted = options.env_id if options.entry is None else options.entry
    if wanted in entries:
        return wanted
    names = [name for name in entries if isinstance(name, str)]
    is_atari = "NoFrameskip" in options.env_id or options.env_id.startswith("ALE/")
    for name in (_ATARI,) if is_atari else (_DEFAULT,):
        if options.entry is None and name in names:
            return name
    hint = did_you_mean(wanted, names)
    raise ConfigError(
        f"{options.file} has no entry {wanted!r}.{hint} (--entry NAME takes another entry)"
    )


def _file(options: ZooArgs, name: str, translated: Translated) -> str:
    """Return the text of the config file."""
    lines = [f"From the entry {name!r} of {options.file.name} of RL Baselines3 Zoo."]
    lines += [f"Note: {note}." for note in translated.notes]
    lines += [f"Left out: {one} ({reason})." for one, reason in translated.missing.items()]
    head = "".join(f"# {one_line(line)}\n" for line in lines)
    return head + dump_yaml({"format": FORMAT, **translated.settings})
