"""What a run shows: a live table on a terminal, lines elsewhere, nothing without ``progress``."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from rl_training.runtime.callbacks import IterationEnd
from rl_training.runtime.console import ProgressCallback
from rl_training.runtime.console_table import (
    MAX_LINES,
    Status,
    duration,
    fit,
    number,
    sections,
    table,
)
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import Trainer

METRICS = {
    "rollout/return_mean": 187.43,
    "rollout/length_mean": 180.0,
    "rollout/is_success_mean": 0.42,
    "losses/loss": 19.3,
    "losses/policy_loss": -0.000866,
    "losses/value_loss": 38.64,
    "losses/entropy": 0.6875,
    "losses/approx_kl": 1.59e-05,
    "losses/clip_fraction": 0.0712,
    "losses/explained_variance": 0.8556,
    "losses/epochs": 4.0,
    "losses/learning_rate": 2.5e-4,
    "time/elapsed": 12.4,
    "eval/return_mean": 232.0,
    "eval/return_std": 35.21,
    "eval/episodes": 10.0,
    "eval/is_success_mean": 0.5,
    "my/height": 1.25,
}
STATUS = Status(
    title="PPO on CartPole-v1",
    folder="runs/one",
    step=31_000,
    total=50_000,
    elapsed=12.4,
    speed=2583.2,
    metrics=METRICS,
    since=(26_000, {"rollout/return_mean": 175.3, "rollout/length_mean": 190.0}),
    evaluations=((10_000, 57.0), (20_000, 243.2), (30_000, 232.0)),
    best=(20_000, 243.2),
    checkpoint=(30_000, 4.2),
)


def shown(status: Status, width: int = 100, height: int = 40) -> list[str]:
    return [line.plain.rstrip() for line in table(status, width, height)]


# -- the table -------------------------------------------------------------------------------------


def test_the_table_shows_what_people_look_for() -> None:
    text = "\n".join(shown(STATUS))
    for part in (
        "PPO on CartPole-v1",
        "runs/one",
        "62%",
        "31,000 of 50,000 steps   2,583 steps/s   elapsed 12 s   ETA 7 s",
        "187.4  +12.13 since 26,000",
        "180.0  -10.00",
        "232.0  ± 35.21 at 30,000",
        "243.2  at 20,000",
        "30,000  4 s ago",
    ):
        assert part in text
    for row in (
        r"is_success +0\.420",
        r"is_success +0\.500",
        r"policy loss +-0\.000866",
        r"entropy +0\.688",
        r"KL divergence +1\.59e-05",
        r"clip fraction +0\.0712",
        r"explained variance +0\.856",
        r"learning rate +0\.000250",
        r"my/height +1\.250",
    ):
        assert re.search(row, text), row
    assert "epochs" not in text
    assert "+1 more" not in text


@pytest.mark.parametrize("width", [20, 40, 60, 75, 76, 80, 120, 200])
@pytest.mark.parametrize("height", [3, 8, 12, 24, 60])
def test_the_table_fits_every_terminal(width: int, height: int) -> None:
    lines = table(STATUS, width, height)
    assert len(lines) <= min(MAX_LINES, max(3, height - 1))
    assert all(line.cell_len <= width for line in lines)
    assert "31,000 of 50,000" in "\n".join(line.plain for line in lines) or height < 8


def test_a_short_terminal_shows_the_returns_and_counts_what_is_left_out() -> None:
    text = "\n".join(shown(STATUS, 60, 14))
    assert "187.4" in text
    assert "232.0" in text
    assert "more)" in text


def test_before_the_first_episode_and_evaluation() -> None:
    bare = Status("t", "f", 0, 100, 0.0, 0.0, {})
    text = "\n".join(shown(bare))
    assert "no episode has ended yet" in text
    assert "ETA -" in text
    assert "Evaluation" not in text
    assert "Losses" not in text


def test_metric_names_cannot_drive_the_terminal() -> None:
    status = Status("t", "f", 1, 2, 0.0, 0.0, {"a\x1b[2J": 1.0, "losses/b\nc": 1.0})
    text = "".join(shown(status))
    assert "\x1b" not in text
    assert r"a\x1b[2J" in text
    assert r"b\nc" in text


@pytest.mark.parametrize("lines", [0, 1, 2, 5, 9, 14, 100])
def test_sections_fit_into_any_number_of_lines(lines: int) -> None:
    kept = fit(sections(STATUS), lines)
    assert sum(1 + len(section.rows) for section in kept) <= lines
    assert not kept or kept[0].rows[0].label == "return"


def test_rows_are_left_out_of_the_longest_section_first() -> None:
    all_of_them = sections(STATUS)
    kept = fit(all_of_them, 12)
    assert sum(1 + len(section.rows) for section in kept) <= 12
    assert [section.title for section in kept] == [section.title for section in all_of_them]
    assert kept[3].hidden == len(all_of_them[3].rows) - len(kept[3].rows) > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1273.84, "1,274"),
        (-187.43, "-187.4"),
        (12.3456, "12.35"),
        (1.25, "1.250"),
        (0.00025, "0.000250"),
        (2.5e-5, "2.50e-05"),
        (1.5e7, "1.50e+07"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (185, "3:05"), (7385, "2:03:05"), (float("inf"), "-")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# -- lines -----------------------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train_ppo(make_config(eval_interval=256), callbacks=[ProgressCallback(0.0)])
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert lines[0].startswith("PPO on CartPole-v1, 2 environments, cpu, seed 7, 1 thread: 512")
    assert "/runs/ppo__CartPole-v1__seed7" in lines[0]
    steps = [line for line in lines if "steps/s" in line]
    assert {"128", "256", "384", "512"} <= {line.split("/")[0] for line in steps}
    assert re.fullmatch(r"512/512 steps  [\d,]+ steps/s  ETA 0 s  return \d+\.\d", steps[-1])
    evaluations = [line for line in lines if line.startswith("evaluation")]
    assert [line.split(":")[0] for line in evaluations] == [
        "evaluation at step 256",
        "evaluation at step 512",
    ]
    assert "(best so far)" in evaluations[0]
    assert re.search(r"return \d+\.\d \+/- \d+\.\d over 2 episodes", evaluations[0])


def test_lines_name_the_reason_of_an_early_end(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train_ppo(make_config(), callbacks=[ProgressCallback(), lambda *_: False])
    assert "training ended at step 128: on_iteration of <lambda> returned False" in (
        capsys.readouterr().err
    )


def test_without_progress_nothing_is_printed(
    make_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    train_ppo(make_config(progress=False))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


# -- a real terminal -------------------------------------------------------------------------------


class Screen:
    """As much of a terminal as the table uses; lines that scrolled away are kept."""

    def __init__(self, width: int) -> None:
        self.lines = [""]
        self.row = 0
        self.column = 0
        self.width = width
        self.cursor_visible = True

    def feed(self, text: str) -> None:
        for code, character in re.findall(r"(\x1b\[[?\d;]*[a-zA-Z])|(.)", text, re.DOTALL):
            if code:
                self._control(code)
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._down()
            else:
                self._write(character)

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _write(self, character: str) -> None:
        if self.column == self.width:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _control(self, code: str) -> None:
        kind, digits = code[-1], code[2:-1]
        if kind == "A":
            self.row = max(0, self.row - int(digits or 1))
        elif kind == "K":
            keep = 0 if digits == "2" else self.column
            self.lines[self.row] = self.lines[self.row][:keep]
        elif kind == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        elif kind in "hl" and digits == "?25":
            self.cursor_visible = kind == "h"
        else:
            assert kind == "m", f"the terminal of this test does not know {code!r}"

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


RUN = """
import sys, warnings
from pathlib import Path
from rl_training import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.ppo_trainer import train_ppo

class Talk(Callback):
    def on_iteration(self, trainer, event):
        trainer.log("my/number", event.step)
        if event.step == 256:
            warnings.warn("a warning in between")
            print("printed in between")

config = TrainConfig(
    env_id="CartPole-v1", num_envs=2, total_timesteps={steps}, seed=3, eval_episodes=2,
    eval_interval=512, tensorboard=False, output_dir=Path("runs"),
    algo_kwargs={{"num_steps": 64, "num_minibatches": 2}},
)
result = train_ppo(config, callbacks=[Talk()])
print("after the run", result.stop_reason)
"""


def run_in_terminal(
    program: str,
    folder: Path,
    *,
    size: tuple[int, int] = (30, 100),
    on_output: Callable[[str, int], None] | None = None,
) -> tuple[Screen, str]:
    """Run a Python program in a pseudo-terminal; return the screen at its end and all output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    src = Path(__file__).parents[1] / "src"
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**variables, "PYTHONPATH": str(src), "TERM": "xterm-256color"},
    )
    os.close(theirs)
    screen, output, deadline = Screen(size[1]), b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 1.0)
        try:
            part = os.read(ours, 65536) if ready else b"" if process.poll() is None else None
        except OSError:  # closed at the other end
            part = None
        if part is None:
            break
        output += part
        if on_output is not None and part:
            on_output(output.decode(errors="ignore"), process.pid)
    os.close(ours)
    assert process.wait(timeout=30) == 0, output.decode()
    screen.feed(output.decode())
    return screen, output.decode()


def test_a_terminal_shows_one_table_and_what_is_printed_above_it(tmp_path: Path) -> None:
    screen, output = run_in_terminal(RUN.format(steps=2048), tmp_path)
    assert output.count("PPO on CartPole-v1") > 1, "it is refreshed"
    assert screen.text.count("PPO on CartPole-v1") == 1, screen.text
    assert screen.text.count("Training (last 100 episodes)") == 1
    assert "2,048 of 2,048 steps" in screen.text
    assert re.search(r"my/number +2,048", screen.text)
    assert re.search(r"± [\d.]+ at 2,048", screen.text), "the last evaluation"
    assert re.search(r"step +2,048  \d s ago", screen.text), "the last checkpoint"
    warned, printed = screen.text.index("a warning in"), screen.text.index("printed in between")
    table_at = screen.text.index("PPO on CartPole-v1")
    assert max(warned, printed) < table_at < screen.text.index("after the run")
    assert screen.lines[-2].rstrip() == "after the run total_timesteps reached"
    assert screen.cursor_visible


def test_ctrl_c_leaves_the_last_table_and_a_clean_terminal(tmp_path: Path) -> None:
    """Also where the message of the signal is longer than a line of the terminal."""
    sent: list[int] = []

    def interrupt(output: str, pid: int) -> None:
        if not sent and "policy loss" in output:
            sent.append(pid)
            os.kill(pid, signal.SIGINT)

    program = "try:\n" + "".join(
        f"    {line}\n" for line in RUN.format(steps=10_000_000).splitlines()
    )
    program += "except KeyboardInterrupt:\n    print('after the run')\n"
    screen, _ = run_in_terminal(program, tmp_path, size=(24, 60), on_output=interrupt)
    assert sent
    assert screen.text.count("PPO on CartPole-v1") == 1, screen.text
    assert screen.text.count("of 10,000,000 steps") == 1, screen.text
    assert screen.text.count("SIGINT") >= 1
    assert "saving a checkpoint" not in screen.text
    assert "interrupted (SIGINT): resume the run to finish it" in screen.text
    assert screen.lines[-2].startswith("after the run")
    assert screen.cursor_visible


def shown_by(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    term: str = "xterm-256color",
    encoding: str = "utf-8",
    stdout: Any = None,
) -> str:
    """Train with a pseudo-terminal as standard error, and output unless it is given; return all."""
    ours, theirs = pty.openpty()
    for name, value in (("TERM", term), ("COLUMNS", "100"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # closed at the other end
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with (
        os.fdopen(theirs, "w", encoding=encoding, buffering=1) as terminal,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(sys, "stdout", stdout or terminal)
        train_ppo(config, callbacks=lambda *_: print("printed in between"))
    reader.join()
    os.close(ours)
    return b"".join(parts).decode()


def test_output_to_a_file_stays_in_the_file(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    output = shown_by(make_config(progress=True), monkeypatch, stdout=file)
    assert "printed in between" not in output
    assert file.getvalue().count("printed in between") == 4


def test_a_terminal_is_silent_without_progress(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown_by(make_config(), monkeypatch) == "printed in between\r\n" * 4


def test_a_dumb_terminal_gets_lines(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = shown_by(make_config(progress=True), monkeypatch, term="dumb")
    assert "\x1b" not in output
    assert "evaluation at step 512: return" in output


def test_a_terminal_without_unicode_gets_ascii(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = shown_by(make_config(progress=True), monkeypatch, encoding="ascii")
    assert output.isascii()
    assert "====" in output
    assert "+/-" in output


def test_a_terminal_that_is_gone_ends_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = os.fdopen(theirs, "w", buffering=1)

    def hang_up(trainer: Trainer, event: IterationEnd) -> None:
        if event.step == 128:
            os.close(ours)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        result = train_ppo(make_config(progress=True, eval_interval=128), callbacks=hang_up)
    assert result.metrics["global_step"] == 512
    with contextlib.suppress(OSError):
        terminal.close()
