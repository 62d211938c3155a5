"""Text on the terminal: control characters are escaped, and what cannot be encoded, too."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_KEPT = "\n\t"
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control codes, invisible format codes (text direction among them), surrogates, line ends."""


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that a file cannot drive the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char in _KEPT else _escaped(char) for char in text)


def one_line(text: str) -> str:
    """Return ``text`` as :func:`printable` does, with line breaks and tabs escaped as well.

    For text of a file inside a line of ours: it cannot start a line that looks like one of ours.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _ESCAPED:
        return character
    return character.encode("unicode_escape").decode("ascii")


def say(line: str) -> None:
    """Write a line to standard error; nothing happens where it cannot be written."""
    try:
        _write(sys.stderr, line + "\n")
    except BrokenPipeError:
        _discard(sys.stderr)
    except (OSError, ValueError):  # a full disk, a closed file
        return


@contextlib.contextmanager
def progress_bar(text: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal while the block runs; yield what moves it by a number of items."""
    if not (shown and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(one_line(text), total=total)
        yield lambda count: bar.advance(task, count)


def show(text: str) -> None:
    """Write text to standard output; nothing happens where nobody reads it (a broken pipe).

    For what is also on disk by then, such as how a run ended.
    """
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        _discard(sys.stdout)


def show_result(text: str) -> None:
    """Write to standard output what a command was called for; raise OSError where it is lost."""
    _write(sys.stdout, text)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed by whoever started the program
        return
    text = printable(text)
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _discard(stream: TextIO) -> None:
    """Have all that is written to ``stream`` thrown away.

    A stream keeps what it could not write, and Python fails when it tries again at its end.
    """
    devnull = Path(os.devnull)
    with contextlib.suppress(OSError, ValueError), devnull.open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
