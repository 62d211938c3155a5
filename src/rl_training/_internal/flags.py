"""Command-line flags by Tyro, taking whole numbers as 1e6 and nested values as YAML."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rl_training._internal.coerce import coerce, to_plain
from rl_training._internal.field_docs import without_none
from rl_training._internal.flag_help import HelpText, help_text
from rl_training._internal.flag_table import Flag, flags_of
from rl_training._internal.yaml_io import load_yaml
from rl_training.config import WrapperConfig
from rl_training.errors import ConfigError, did_you_mean_flag
from rl_training.terminal import say, show_result

_REGISTRY = ConstructorRegistry()
_VALUES = {
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "whole numbers with spaces between them",
    tuple[float, ...]: "numbers with spaces between them",
}
"""What a flag takes, by the type of its value."""
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off")
"""Words after a switch that were meant as its value."""


class UnknownWordError(ConfigError):
    """A word on the command line that is neither a flag of the command nor a value of one."""

    def __init__(self, message: str, word: str) -> None:
        super().__init__(message)
        self.word = word
        """The word, a flag with its dashes; the first one if there are several."""


def parse_flags(
    typed: Any,
    args: Sequence[str],
    prog: str,
    text: HelpText | None = None,
    *,
    default: Any = None,
    without_prefix: tuple[str, ...] = (),
) -> Any:
    """Parse flags into a dataclass; ``--help`` prints the help text and exits.

    Raises:
        UnknownWordError: A word is not expected.
        ConfigError: A value is missing or cannot be used.

    Args:
        typed: the dataclass, or a parametrised one.
        args: the words after the command.
        prog: the command, for messages.
        text: usage, examples and groups of the help text.
        default: an instance with the values of flags that are not given.
        without_prefix: fields whose own fields are flags without a prefix.
    """
    kind = typing.get_origin(typed) or typed
    flags = flags_of(kind, default, without_prefix)
    if "--help" in args or "-h" in args:
        text = text or HelpText()
        show_result(help_text(prog, text, flags, inspect.cleandoc(kind.__doc__ or "")))
        raise SystemExit(0)
    words = _tyro_words(flags, args, prog)
    options = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with _REGISTRY, contextlib.redirect_stderr(printed):
            parsed = tyro.cli(typed, args=words, prog=prog, add_help=False, **options)
    except SystemExit:
        message = _tyro_message(printed.getvalue())
        if unknown := re.match(r"Unrecognized options: (.+)", message):
            first = unknown[1].partition(", ")[0]
            reason = f"unexpected argument {first!r} (see {prog} --help)"
            raise UnknownWordError(reason, first) from None
        raise ConfigError(f"{_in_one_line(message, flags, words)} (see {prog} --help)") from None
    if warned := printed.getvalue().rstrip():
        say(warned)
    return parsed


def _split(word: str) -> tuple[str, str, str]:
    name, equals, value = word.removeprefix("--").partition("=")
    return name.replace("_", "-"), equals, value


def _tyro_words(flags: Sequence[Flag], args: Sequence[str], prog: str) -> list[str]:
    """Return the words as Tyro parses them: full names, positional values first.

    Raises:
        ConfigError: A flag is unknown, or a value is missing.
    """
    names = {name: (flag, full) for flag in flags for name, full in flag.spellings()}
    first: list[str] = []
    words: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        name, equals, value = _split(word)
        if not word.startswith("--") or word == "--":
            words.append(word)
            continue
        if name not in names:
            known = [flag.name for flag in flags if not flag.is_positional]
            hint = did_you_mean_flag(name, known) or f" See {prog} --help."
            raise UnknownWordError(f"unknown flag --{name}.{hint}", f"--{name}")
        flag, full = names[name]
        if flag.is_switch:
            following = "".join(left[:1])
            if equals or following.lower() in _TRUTH_VALUES:
                _refuse_value(flag, name, value if equals else following)
        if flag.is_positional:
            if not equals and not left:
                raise ConfigError(f"--{name} needs a value")
            first.append(value if equals else left.pop(0))
        elif flag.is_switch and flag.is_optional and not equals:
            words += _optional_switch(flag, full, left)
        else:
            words.append(f"--{full}{equals}{value}")
    return [*first, *words]


def _refuse_value(flag: Flag, name: str, value: str) -> None:
    """Raise ConfigError for ``--progress false``; a switch that may be unset takes ``False``."""
    if not (flag.is_optional and value in ("True", "False", "None")):
        raise ConfigError(f"--{name} takes no value: write --{flag.name} or --{flag.negated}")


def _optional_switch(flag: Flag, full: str, left: list[str]) -> list[str]:
    """Return ``--x True`` or ``--x False``: Tyro wants a value where a switch may be unset."""
    if full != flag.full_name:
        return [f"--{flag.full_name}", "False"]
    if left[:1] in (["True"], ["False"], ["None"]):
        return [f"--{full}", left.pop(0)]
    return [f"--{full}", "True"]


def _tyro_message(printed: str) -> str:
    """Return the reason in what Tyro printed, with a frame or without (in ASCII)."""
    lines = [line.strip("│ ") for line in printed.splitlines() if not line.startswith(("╭", "╰"))]
    parts = re.split(r"(?:^|\n)[─-]{5,}(?:\n|$)", "\n".join(lines))
    part = parts[0] if printed.startswith("╭") else "".join(parts[1:2])  # after the title
    return " ".join(part.split())


def _in_one_line(message: str, flags: Sequence[Flag], words: Sequence[str]) -> str:
    """Return the reason in our own words; ``words`` are those that Tyro parsed."""
    by_name = {flag.full_name: flag for flag in flags}
    if missing := re.match(r"Missing from [^:]+: (\S+)", message):
        return f"{missing.group(1)} is missing"
    if wrong := re.match(r"invalid choice '(.*?)' for argument '--([\w.-]+)'", message):
        flag = by_name[wrong.group(2)]
        choices = ", ".join(map(str, typing.get_args(flag.hint)))
        return f"--{flag.name}: {wrong.group(1)!r} is none of {choices}"
    empty = re.match(r"Missing value for argument '--([\w.-]+)'", message)
    if empty and empty.group(1) in by_name:
        return f"--{by_name[empty.group(1)].name} needs a value"
    message = re.sub(r"^(Error parsing |TrainConfig: |algo-kwargs: |atari: )*", "", message)
    refused = re.match(r"--([\w.-]+): ", message)
    named = by_name.get(refused.group(1)) if refused else None
    return _refused(named, words) if named is not None and named.hint in _VALUES else message


def _refused(flag: Flag, words: Sequence[str]) -> str:
    """Return the message for a value that is not a number, or for several."""
    given = _values_of(flag, words)
    taken = _VALUES[flag.hint]
    if typing.get_origin(flag.hint) is not tuple:
        return f"--{flag.name}: {given!r} is not {taken}"
    separate = " ".join(re.sub(r"[][(),;]", " ", given).split())
    if separate == given:
        return f"--{flag.name} takes {taken}; got {given!r}"
    return f"--{flag.name} takes {taken}: write --{flag.name} {separate} instead of {given!r}"


def _values_of(flag: Flag, words: Sequence[str]) -> str:
    """Return what follows a flag, up to the next one."""
    values: list[str] = []
    is_value = False
    for word in words:
        if word.startswith("--"):
            name, equals, value = _split(word)
            is_value = name == flag.full_name
            values = [value] if is_value and equals else [] if is_value else values
        elif is_value:
            values.append(word)
    return " ".join(values)


@_REGISTRY.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is int:
        return _one_word("INT", _whole_number, str)
    if info.type in (dict[str, Any], dict[str, Any] | None, tuple[WrapperConfig, ...]):
        return _one_word("YAML", lambda text: _from_yaml(text, info.type), _inline)
    return None


def _one_word(
    metavar: str, parse: Callable[[str], Any], show: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [show(value)],
    )


def _whole_number(text: str) -> int:
    for convert in (int, float):
        try:
            number = convert(text)
        except ValueError:
            continue
        if number == number // 1:
            return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _from_yaml(text: str, hint: Any) -> Any:
    try:
        value = load_yaml(text, "the value")
        return coerce(value, hint, "value")
    except ConfigError as error:
        advice = _as_mapping(text) if without_none(hint) == dict[str, Any] else ""
        raise ValueError(str(error).replace("'value'", "the value") + advice) from None


def _as_mapping(text: str) -> str:
    """Return how to write ``name=value`` as YAML."""
    name, equals, value = text.partition("=")
    return f": write '{{{name}: {value}}}'" if equals and name.isidentifier() else ""


def _inline(value: Any) -> str:
    return json.dumps(to_plain(value))
