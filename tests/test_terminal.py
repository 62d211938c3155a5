"""Text on the terminal: what a file holds cannot drive it, and a lost line ends nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_training.terminal import one_line, printable, say, show, show_result

CASES = [
    ("plain text, üñí \N{SNOWMAN}", "plain text, üñí \N{SNOWMAN}"),
    ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    ("a\rb\x08\x7f\x9b", r"a\rb\x08\x7f\x9b"),
    ("\u202eright to left", r"\u202eright to left"),
    ("\ud800", r"\ud800"),
    ("end\u2028line", r"end\u2028line"),
]


@pytest.mark.parametrize(("text", "shown"), CASES)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == one_line(text) == shown


def test_lines_and_tabs_are_kept_unless_one_line_is_asked_for() -> None:
    assert printable("a\n\tb\x1b") == "a\n\tb\\x1b"
    assert one_line("a\n\tb\x1b") == r"a\n\tb\x1b"


def test_lines_reach_the_streams(capsys: pytest.CaptureFixture[str]) -> None:
    say("to \x1b the user")
    show("a result\n")
    captured = capsys.readouterr()
    assert captured.err == "to \\x1b the user\n"
    assert captured.out == "a result\n"


@pytest.mark.parametrize(
    ("encoding", "expected"), [("ascii", rb"l\xe4ufe \u2603"), ("latin-1", b"l\xe4ufe \\u2603")]
)
def test_what_the_encoding_lacks_is_escaped(
    encoding: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, "strict"))
    show("läufe \N{SNOWMAN}")
    assert raw.getvalue() == expected


class _Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, _Broken(), _closed()], ids=["none", "broken", "closed"])
def test_a_line_that_nobody_reads_ends_nothing(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    say("line")


def test_a_result_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Broken())
    show("also on disk")
    with pytest.raises(BrokenPipeError):
        show_result("lost")
    monkeypatch.setattr(sys, "stdout", None)
    show_result("nobody asked for it")


PROGRAM = """
from pathlib import Path
from rl_training.terminal import say, show
for _ in range(3):
    say("line")
    show("text")
Path("reached").touch()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_nothing(unbuffered: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    src = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        stdout=writing,
        stderr=writing,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(src), "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writing)
    assert (tmp_path / "reached").exists()
    assert done.returncode == 0, "not even when Python flushes its streams at the end"
