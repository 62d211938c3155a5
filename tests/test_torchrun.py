"""Runs under torchrun: the same result wherever shards are executed, and one end for all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import sharded_child_review
import sharded_runs
from rl_training.checkpointing import load_checkpoint
from rl_training.registry import ALGORITHMS, TORCHRUN
from rl_training.runs import read_json
from sharded_child_env import FAULT, MARKER, NUM_ENVS
from sharded_child_review import Outcome, outcome_file
from state_compare import differences, final_state, metric_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

TESTS = Path(__file__).parent
RUNS = str(TESTS / "sharded_runs.py")
CLI = ("-m", "rl_training.cli")
SECONDS_TO_END = 30.0
FEW = ["ppo_normalized", "recurrent_ppo_native", "dqn_prioritized"]


class Launched(NamedTuple):
    """How a launch ended."""

    codes: list[int]
    """Exit codes: that of torchrun, or of every rank."""
    output: str
    errors: str
    ended: float
    """Time of its end."""

    @property
    def lines(self) -> list[str]:
        """The lines that the command line itself printed about errors."""
        return error_lines(self.errors)


def error_lines(errors: str) -> list[str]:
    """Return the lines that the command line itself printed about errors."""
    lines = errors.splitlines()
    return [line for line in lines if line.startswith(("error:", "failed:", "stopped"))]


def launch(
    ranks: int,
    *arguments: str,
    marker: Path,
    fault: str = "",
    agent: bool = True,
    own: Sequence[Sequence[str]] = (),
) -> Launched:
    """Run Python's ``arguments`` on so many ranks and wait for all of them to end.

    Without torchrun's ``agent``, which ends the other ranks after a failure, they are started
    directly, as on several machines, with further arguments of their ``own``. Fails if a process is
    left.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        MARKER: str(marker),
        FAULT: fault,
    }
    if agent:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environments = [environment]
    else:
        start, environments = [], _environments_of_ranks(ranks, environment)
    command = [sys.executable, *start, *arguments]
    commands = [[*command, *more] for more in own or [()] * len(environments)]
    outputs, errors = (
        [marker.with_name(f"{marker.name}.{i}.{kind}") for i in range(len(environments))]
        for kind in ("out", "err")
    )
    started = [
        subprocess.Popen(command, env=one, stdout=output.open("w"), stderr=error.open("w"))
        for command, one, output, error in zip(commands, environments, outputs, errors, strict=True)
    ]
    try:
        end = time.monotonic() + 200.0
        codes = [process.wait(max(0.0, end - time.monotonic())) for process in started]
        left = list(_marked(marker))
        while left and time.monotonic() < end:  # helpers of multiprocessing end a little later
            time.sleep(0.1)
            left = list(_marked(marker))
        ended = time.time()
    finally:
        for process in _marked(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    printed = "".join(path.read_text() for path in outputs)
    complaints = "".join(path.read_text() for path in errors)
    assert left == [], f"processes are left after {arguments}: {complaints}"
    return Launched(codes, printed, complaints, ended)


def _environments_of_ranks(ranks: int, common: dict[str, str]) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            **common,
            "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        for rank in range(ranks)
    ]


def _marked(marker: Path) -> Iterator[int]:
    """Yield the processes that a launch with this marker started."""
    wanted = f"{MARKER}={marker}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def train(
    ranks: int, folder: Path, shards: int, cases: Sequence[str], **options: Any
) -> dict[str, list[dict[str, Any]]]:
    """Train cases under torchrun; return how each of them ended on every rank."""
    folder.mkdir(exist_ok=True)
    marker = folder / f"marker{len(list(folder.iterdir()))}"
    found = launch(ranks, RUNS, str(folder), str(shards), *cases, marker=marker, **options)
    assert set(found.codes) == {0}, found.errors
    names = [case.partition(":")[0] for case in cases]
    return {
        name: [read_json(folder / f"{name}.rank{rank}.json") for rank in range(ranks)]
        for name in names
    }


def reference(folder: Path, shards: int, cases: Sequence[str]) -> Path:
    """Train cases in this process."""
    folder.mkdir(exist_ok=True)
    for case in cases:
        sharded_runs.run_case(case, shards, folder)
    return folder


def differing(cases: Sequence[str], a: Path, b: Path) -> dict[str, list[str]]:
    """Return where the runs of each case differ, without cases that do not."""
    found = {}
    for case in cases:
        here = differences(final_state(a / case), final_state(b / case))
        if metric_rows(a / case) != metric_rows(b / case):
            here.append("metrics.jsonl")
        if here:
            found[case] = here
    return found


# -- placement ------------------------------------------------------------------------------------


def test_one_rank_is_a_plain_run(tmp_path: Path) -> None:
    cases = [name for name in ALGORITHMS if TORCHRUN in ALGORITHMS[name].engines]
    plain = reference(tmp_path / "plain", 1, cases)
    train(1, tmp_path / "torchrun", 1, cases)
    assert differing(cases, plain, tmp_path / "torchrun") == {}


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    cases = sharded_runs.case_names()
    assert {"ppo", "recurrent_ppo", "ppg", "dqn", "drqn", "sac", "td3"} <= set(cases)
    alone = reference(tmp_path / "alone", 2, cases)
    ends = train(2, tmp_path / "two", 2, cases)
    assert differing(cases, alone, tmp_path / "two") == {}
    rows = metric_rows(alone / "ppo_normalized")
    epochs = {row["losses/epochs"] for row in rows if "losses/epochs" in row}
    assert len(epochs) > 1, "target_kl stops no learning phase of this case"
    for case, (first, second) in ends.items():
        assert first["callbacks"], case
        assert second["callbacks"] == [], case
        own = ("callbacks", "metrics")
        assert {k: v for k, v in first.items() if k not in own} == {
            k: v for k, v in second.items() if k not in own
        }


def four_shards(tmp_path: Path, cases: Sequence[str]) -> None:
    alone = reference(tmp_path / "alone", 4, [*cases, "ppo_interruptible"])
    # One run is started by four ranks, continued by two and ended in one process.
    moved = "ppo_interruptible"
    train(4, tmp_path / "four", 4, [*cases, f"{moved}:sigterm:3:0:5"], agent=False)
    assert differing(cases, alone, tmp_path / "four") == {}
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "four" / moved, tmp_path / "two" / moved)
    # SIGTERM in an evaluation: environments 0 and 1 of a rank are those of training.
    ends = train(2, tmp_path / "two", 4, [*cases, f"{moved}:sigterm:0:2:5"], agent=False)
    assert differing(cases, alone, tmp_path / "two") == {}
    assert [end["interrupted"] for end in ends[moved]] == [True, True]
    state = load_checkpoint(tmp_path / "two" / moved / "checkpoints" / "last.pt")
    assert state["training"]["unfinished"]["report"] is not None
    reference(tmp_path / "two", 4, [moved])
    assert differing([moved], alone, tmp_path / "two") == {}


def test_four_shards_on_four_two_and_one(tmp_path: Path) -> None:
    four_shards(tmp_path, FEW)


@pytest.mark.full
def test_four_shards_of_every_case(tmp_path: Path) -> None:
    cases = [name for name in sharded_runs.case_names() if name != "ppo_interruptible"]
    four_shards(tmp_path, cases)


def test_world_size_changes_between_resumes(tmp_path: Path) -> None:
    cases = ["ppo_interruptible", "dqn_interruptible"]
    whole = reference(tmp_path / "whole", 2, cases)
    moved = tmp_path / "moved"
    # SIGTERM to either rank; within the first rollout, and within an iteration of the replay.
    stops = ["ppo_interruptible:sigterm:1:0:5", "dqn_interruptible:sigterm:0:1:20"]
    ends = train(2, moved, 2, [*stops, "a2c:stop:128"], agent=False)
    for case in cases:
        first, second = ends[case]
        assert first["interrupted"], case
        assert second["interrupted"], case
        assert first["current_step"] == second["current_step"] < sharded_runs.TOTAL
        state = load_checkpoint(moved / case / "checkpoints" / "last.pt")
        assert state["training"]["unfinished"]["iteration"] is not None, case
    # A callback, which rank 0 alone has, stops all ranks.
    assert [end["global_step"] for end in ends["a2c"]] == [128, 128]
    assert {end["stop_reason"] for end in ends["a2c"]} == {"far enough"}
    for case in cases:
        before = read_json(moved / f"{case}.rank0.json")["current_step"]
        sharded_runs.run_case(case, 2, moved, "sigterm:0:3:6")
        now = read_json(moved / f"{case}.rank0.json")
        assert now["interrupted"]
        assert now["current_step"] == before + 6 * NUM_ENVS
    train(2, moved, 2, cases, agent=False)
    assert differing(cases, whole, moved) == {}


# -- failures -------------------------------------------------------------------------------------


def config_file(tmp_path: Path, case: str = "ppo_interruptible", **overrides: Any) -> Path:
    """Write the config of a case with two shards; its runs are made under tmp_path/runs."""
    config = sharded_runs.make_case(case, 2, tmp_path / "runs").with_overrides(**overrides)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    return path


def only_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "runs").iterdir()
    return run


def failed(tmp_path: Path, fault: str, *, agent: bool = False, **overrides: Any) -> Launched:
    """Train with a fault by the command line on two ranks; check how they end."""
    marker = tmp_path / "marker"
    arguments = [*CLI, "train", "--config", str(config_file(tmp_path, **overrides))]
    found = launch(2, *arguments, marker=marker, fault=fault, agent=agent)
    assert marker.exists(), found.errors
    assert found.ended - marker.stat().st_mtime < SECONDS_TO_END
    assert 0 not in found.codes, found.errors
    return found


def assert_continues(tmp_path: Path) -> None:
    """Resume the only run in this process: its end is that of a run without a fault."""
    case = "ppo_interruptible"
    only_run(tmp_path).rename(tmp_path / "runs" / case)
    reference(tmp_path / "runs", 2, [case])
    whole = reference(tmp_path / "whole", 2, [case])
    assert differing([case], tmp_path / "runs", whole) == {}


POLE = "RuntimeError: the pole fell on my foot"


@pytest.mark.parametrize(
    ("fault", "agent", "message"),
    [
        ("raise:1:1:20", True, f"environment 3 (CartPole-v1) failed in step .*{POLE}"),
        pytest.param(
            "raise:0:1:20",
            False,
            f"environment 1 (CartPole-v1) failed in step .*{POLE}",
            marks=pytest.mark.full,
        ),
        ("raise:1:1:0", False, f"environment 3 (CartPole-v1) failed in reset .*{POLE}"),
        ("raise:1:2:5", False, f"evaluation: environment 2 (CartPole-v1) failed in .*{POLE}"),
        ("nan:1:1:20", False, "environment 3 returned a non-finite reward in step .* nan"),
    ],
    ids=["step", "step of rank 0", "reset", "evaluation", "nan"],
)
def test_a_failure_of_one_rank_ends_all(
    fault: str, agent: bool, message: str, tmp_path: Path
) -> None:
    found = failed(tmp_path, fault, agent=agent)
    rank = fault.split(":")[1]
    pattern = f"failed: rank {rank}: {message}".replace("(", r"\(").replace(")", r"\)")
    (line,) = found.lines
    assert_matches(pattern, line)
    summary = read_json(only_run(tmp_path) / "summary.json")
    assert summary["status"] == "failed"
    assert_matches(message.replace("(", r"\(").replace(")", r"\)"), summary["reason"])
    assert_continues(tmp_path)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.mark.full
def test_workers_of_all_ranks_end_with_a_failure(tmp_path: Path) -> None:
    # In a worker every environment is the first one: those of rank 1 all fail.
    found = failed(tmp_path, "raise:1:0:20", vectorization="async")
    (line,) = found.lines
    assert_matches(r"failed: rank 1: .*environment [23] .*failed", line)


@pytest.mark.parametrize(
    ("fault", "agent"),
    [("kill:1:1:40", True), pytest.param("kill:0:1:40", False, marks=pytest.mark.full)],
)
def test_a_killed_rank_ends_all_and_the_run_continues_exactly(
    fault: str, agent: bool, tmp_path: Path
) -> None:
    found = failed(tmp_path, fault, agent=agent)
    (line,) = found.lines
    survivor = 1 - int(fault.split(":")[1])
    start = f"failed: rank {survivor}: another rank was lost without a message"
    assert line.startswith(start), found.errors
    case = "ppo_interruptible"
    only_run(tmp_path).rename(tmp_path / "runs" / case)
    saved = load_checkpoint(tmp_path / "runs" / case / "checkpoints" / "last.pt")
    assert 0 < saved["training"]["counters"]["global_step"] < 40 * NUM_ENVS
    train(2, tmp_path / "runs", 2, [case], agent=False)
    whole = reference(tmp_path / "whole", 2, [case])
    assert differing([case], tmp_path / "runs", whole) == {}


_CONSTRUCTOR = r"failed: rank 1: environment 1 \(broken_on_rank_1\) failed in its constructor: .*"
FAILURES = {
    "fail_first": f"{_CONSTRUCTOR}the first reason",
    "fail_second": f"{_CONSTRUCTOR}the second reason",
    "resume_without_env": f"{_CONSTRUCTOR}no simulator here",
    "init_from_missing": "error: rank 1: no checkpoint or run folder at .*missing.pt",
    "fail_in_evaluation": r"failed: rank 1: evaluation: environment 1 \(.*the simulator crashed",
}
"""The line that rank 1 prints in cases of `sharded_child_review`."""


STOPS = {
    "stop_between_evaluations": "evaluation 1 at 32\nSIGTERM\n",  # the second one is not played
    "stop_while_waiting": "SIGTERM\n",
}
"""The output of rank 0 in other cases."""


def test_failures_and_stops_in_unusual_places(tmp_path: Path) -> None:
    script, total = str(TESTS / "sharded_child_review.py"), sharded_child_review.TOTAL
    found = launch(2, script, str(tmp_path), marker=tmp_path / "marker", agent=False)
    ends = {
        case.__name__: [outcome(tmp_path, case.__name__, rank) for rank in (0, 1)]
        for case in sharded_child_review.CASES
    }
    assert found.codes == [0, 0], found.errors
    assert set(ends) == {"show_progress", *FAILURES, *STOPS}
    for end in ends["show_progress"]:
        assert (end.code, end.output) == (0, "total_timesteps reached\n"), end.errors
    table = ends["show_progress"][0].errors
    assert f"{total} of {total} steps" in table
    assert "Training (last 100 episodes)" in table
    for case, pattern in FAILURES.items():
        first, second = ends[case]
        assert 0 not in (first.code, second.code), case
        assert (first.output, first.errors, second.output) == ("", "", ""), case
        assert len(error_lines(second.errors)) == 1, (case, second.errors)
        assert_matches(pattern, error_lines(second.errors)[0])
    for case, output in STOPS.items():
        first, second = ends[case]
        assert (first.code, first.output, first.errors) == (0, output, ""), case
        assert (second.code, second.output, second.errors) == (0, "SIGTERM\n", ""), case
        assert max(first.seconds, second.seconds) < SECONDS_TO_END / 2, case
        state = load_checkpoint(tmp_path / case / "checkpoints" / "last.pt")
        assert state["training"]["counters"]["global_step"] == 32, case
        assert state["training"]["unfinished"]["report"] is not None, case


def outcome(folder: Path, case: str, rank: int) -> Outcome:
    path = outcome_file(folder, case, rank)
    assert path.is_file(), f"rank {rank} did not end {case}"
    return Outcome(**read_json(path))


# -- the command line -----------------------------------------------------------------------------


def test_rank_0_alone_writes_and_prints(tmp_path: Path) -> None:
    config = config_file(tmp_path, tensorboard=True)
    settings = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**settings, "shards": 1}))
    arguments = [*CLI, "train", "--config", str(config), "--shards", "2"]
    found = launch(2, *arguments, marker=tmp_path / "first", fault="sigterm:1:1:20")
    assert found.codes == [0], found.errors
    assert found.lines == []
    assert found.output.count("SIGTERM at step") == 1, found.output
    assert found.output.count("resume:") == 1
    run = only_run(tmp_path)
    assert len(list(run.rglob("*tfevents*"))) == 1
    steps = [row["step"] for row in metric_rows(run) if "losses/loss" in row]
    assert steps == sorted(set(steps))
    resume = [*CLI, "resume", str(run), "--json"]
    found = launch(2, *resume, marker=tmp_path / "second", agent=False)
    assert found.codes == [0, 0], found.errors
    (last,) = [line for line in found.output.splitlines() if line.startswith("{")]
    assert json.loads(last)["global_step"] == sharded_runs.TOTAL
    steps = [row["step"] for row in metric_rows(run) if "losses/loss" in row]
    assert steps == [64, 128, 192, 256]
    run.rename(tmp_path / "runs" / "ppo_interruptible")
    whole = reference(tmp_path / "whole", 2, ["ppo_interruptible"])
    state, expected = (final_state(path / "ppo_interruptible") for path in (run.parent, whole))
    assert state["config"].pop("tensorboard") != expected["config"].pop("tensorboard")
    assert differences(state, expected) == []


class Mistake(NamedTuple):
    """A launch that is refused: how it is started, and the line that is printed."""

    message: str
    ranks: int = 2
    program: tuple[str, ...] = CLI
    own: tuple[tuple[str, ...], ...] = ()


MISTAKES = {
    "no shards": Mistake(
        "error: 'shards' = 1 cannot be divided equally among 2 processes: start torchrun with 1"
        " of them .* multiples of 2",
        own=(("--shards", "1"),) * 2,
    ),
    "world size": Mistake(
        "error: 'shards' = 2 cannot be divided equally among 3 processes: start ", 3
    ),
    "settings": Mistake(
        "error: rank 1: ranks were started with different settings: 'seed' is 5 here and 4 on"
        " rank 0; give every rank the same settings",
        own=(("--seed", "4"), ("--seed", "5")),
    ),
    "folder": Mistake(
        "error: rank 1: the run folder .* of rank 0 is not here: output_dir must be on a file"
        " system that all ranks share",
        program=(str(TESTS / "sharded_child_folder.py"),),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in MISTAKES if name != "world size"),
        pytest.param("world size", marks=pytest.mark.full),
    ],
)
def test_a_mistake_in_the_launch_is_one_line(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    arguments = [*mistake.program, "train", "--config", str(config_file(tmp_path))]
    marker, started = tmp_path / "marker", time.time()
    found = launch(mistake.ranks, *arguments, marker=marker, agent=False, own=mistake.own)
    assert found.ended - started < SECONDS_TO_END
    assert 0 not in found.codes
    assert 2 in found.codes
    (line,) = found.lines
    assert_matches(mistake.message, line)
    assert "Traceback" not in found.errors
    assert len(found.errors.splitlines()) == 1, found.errors
