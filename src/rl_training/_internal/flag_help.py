"""The text of ``rl-training COMMAND --help``: usage, examples, and flags in groups."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Sequence

from rl_training._internal.coerce import to_plain
from rl_training._internal.field_docs import value_text
from rl_training._internal.flag_table import Flag

_COLUMN = 30
"""Where the meaning of a flag starts."""
_WIDEST = 100


@dataclasses.dataclass(frozen=True)
class Group:
    """Flags under one heading."""

    heading: str
    fields: tuple[str, ...]
    """Fields of the outermost dataclass; one that is a dataclass itself contributes its fields."""


@dataclasses.dataclass(frozen=True)
class HelpText:
    """What a help text contains besides the flags."""

    usage: str = "[flags]"
    """What follows the name of the command."""
    summary: str = ""
    """What the command does; empty: the docstring of the dataclass."""
    examples: tuple[str, ...] = ()
    """Commands, each with an optional comment after ``#``."""
    groups: tuple[Group, ...] = ()
    """Empty: all flags under one heading."""


def help_text(prog: str, text: HelpText, flags: Sequence[Flag], docstring: str) -> str:
    """Return the help of a command; ``docstring`` is used where ``text`` has no summary."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    lines = [f"usage: {prog} {text.usage}"]
    if text.examples:
        lines += ["", *_in_columns(text.examples)]
    lines += ["", *_paragraphs(text.summary or docstring, width)]
    groups = text.groups or (Group("flags", tuple(dict.fromkeys(f.path[0] for f in flags))),)
    for group in groups:
        members = [flag for name in group.fields for flag in flags if flag.path[0] == name]
        lines += ["", f"{group.heading}:"]
        for flag in members:
            lines += _entry(flag, width)
    return "\n".join(lines) + "\n"


def _paragraphs(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in text.replace("``", "").split("\n\n"):
        lines += ["", *textwrap.wrap(paragraph, width)]
    return lines[1:]


def _in_columns(examples: Sequence[str]) -> list[str]:
    """Return example lines with their comments in one column."""
    parts = [line.partition("#") for line in examples]
    column = max(len(command.rstrip()) for command, _, _ in parts) + 2
    return [f"  {command.rstrip():{column}s}{mark}{note}".rstrip() for command, mark, note in parts]


def _entry(flag: Flag, width: int) -> list[str]:
    """Return the lines of one flag: its name on the left, what it does on the right."""
    if flag.is_hidden:
        return []
    shown = _shown(flag)
    meaning = f"{flag.meaning}{_default(flag)}"
    indent = " " * _COLUMN
    lines = textwrap.wrap(
        meaning, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    if len(shown) + 4 > _COLUMN:
        return [f"  {shown}", *lines]
    return [f"  {shown}".ljust(_COLUMN) + lines[0].lstrip(), *lines[1:]]


def _shown(flag: Flag) -> str:
    if flag.is_positional:
        return flag.metavar
    if flag.is_switch and flag.default is not False:
        return f"--{flag.name}, --{flag.negated}"
    return f"--{flag.name} {flag.metavar}".rstrip()


def _default(flag: Flag) -> str:
    if flag.default is dataclasses.MISSING:
        return "" if flag.is_positional else " (required)"
    if flag.is_switch:
        return "" if flag.is_optional else f" (default: {'on' if flag.default else 'off'})"
    if flag.default is None:
        return "" if "nset:" in flag.meaning or flag.is_positional else " (default: unset)"
    if flag.default == () or flag.default == {}:
        return "" if "nset:" in flag.meaning else " (default: none)"
    if flag.metavar == "YAML":
        return f" (default: {json.dumps(to_plain(flag.default))})"
    shown = f"{flag.default:g}" if isinstance(flag.default, float) else value_text(flag.default)
    return f" (default: {shown})"
