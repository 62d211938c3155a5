"""`benchmarks/peers.py`: its scripts, its tables, and libraries that are missing."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

_BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def peers() -> Any:
    spec = importlib.util.spec_from_file_location("peers_benchmark", _BENCHMARKS / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _passed_names(peers: Any, algo: str) -> set[str]:
    return set(peers.TASKS[algo].settings)


def test_every_library_has_a_script_that_parses(peers: Any) -> None:
    scripts = {path.name: path.read_text() for path in peers.SCRIPTS.glob("*.py")}
    for text in scripts.values():
        assert "answer" in {getattr(node, "name", "") for node in ast.walk(ast.parse(text))}
    assert {library.script for library in peers.LIBRARIES.values()} == set(scripts) - {"common.py"}


def test_settings_are_ours_by_name(peers: Any) -> None:
    from rl_training.config import algo_config_type

    for algo in peers.TASKS:
        algo_config_type(algo)(**peers.request_of(algo, "ours", 1, seconds=1.0)["settings"])
        assert _passed_names(peers, algo) >= {"learning_rate", "hidden_sizes", "gamma"}


def test_speed_rows_are_medians_with_ratios_to_sb3(peers: Any) -> None:
    rates = {"sb3": [100.0, 80.0, 90.0], "ours": [210.0, 150.0, 180.0], "skrl": [30.0, 30.0, 30.0]}
    cores = {"sb3": [1.0, 1.0, 1.0], "ours": [1.0, 0.5, 1.0], "skrl": [0.5, 0.5, 0.5]}
    rows = peers.speed_rows(rates, cores)
    assert list(rows) == ["ours", "sb3", "skrl"]
    # Of ours per CPU second: 210, 300 and 180.
    assert rows["ours"] == peers.Row(180.0, 150.0, 210.0, 2.0, 3, 210.0)
    assert rows["sb3"].ratio == 1.0
    assert rows["skrl"] == peers.Row(30.0, 30.0, 30.0, pytest.approx(1 / 3), 3, 60.0)


@pytest.mark.parametrize(
    ("ours", "other", "said"),
    [
        ([20.0, 22.0], [10.0, 12.0], "ours is first, 1.91x SBX"),
        ([20.0, 24.0], [23.0, 25.0], "ours is within noise of SBX (0.92x)"),
        ([10.0, 12.0], [20.0, 24.0], "ours is behind SBX (0.50x)"),
        ([20.0], [21.0], "ours is behind SBX (0.95x)"),  # one round says nothing of noise
    ],
)
def test_verdict(peers: Any, ours: list[float], other: list[float], said: str) -> None:
    rates = {"ours": ours, "sbx": other, "ours_compile": [1000.0] * len(ours)}
    cores = {name: [1.0] * len(values) for name, values in rates.items()}
    assert peers.verdict(peers.speed_rows(rates, cores)) == said


def _fake_environment(peers: Any, folder: Path, name: str, script: str) -> None:
    library = peers.LIBRARIES[name]
    python = folder / library.environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    record = folder / library.environment / "complete.txt"
    record.write_text("\n".join(library.requirements))


def test_missing_and_failing_libraries_are_named_and_left_out(
    peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fake_environment(peers, tmp_path, "skrl", "echo ImportError: no skrl here >&2; exit 1")
    answer = '{"steps_per_second": 2000.0, "cores": 1.0, "versions": {"sbx-rl": "0.28.0"}}'
    _fake_environment(peers, tmp_path, "sbx", f"echo '{answer}'")
    flags = ["--rounds", "2", "--algorithms", "ppo", "--libraries", "tianshou", "skrl", "sbx"]
    peers.main([*flags, "--environments", str(tmp_path), "--no-install"])
    lines = capsys.readouterr().out.splitlines()
    missing = f"Tianshou: skipped: no complete environment in {tmp_path / 'tianshou'}"
    assert [line for line in lines if "Tianshou" in line] == [missing]
    failed = "round 1, ppo, skrl: skipped: failed: ImportError: no skrl here"
    assert [line for line in lines if "skrl" in line] == [failed]
    assert "round 2, ppo, SBX: 2,000 steps/s, 1.00 cores used" in lines
    (row,) = (line for line in lines if line.startswith("SBX"))
    assert row.split() == ["SBX", "2,000", "2,000", "2,000", "2", "2,000"]


def test_without_rounds_a_new_round_begins_only_if_it_ends_in_time(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def measure(python: str, request: Any) -> dict[str, Any]:
        nonlocal now
        now += 140.0
        return {"steps_per_second": 1.0, "cores": 1.0, "versions": {}}

    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    table = peers.Table()
    peers.speed(peers.parse_args(["--algorithms", "ppo"]), {"ours": "python"}, table)
    assert len(table.cells["ppo"]["ours"]) == 2


def test_runs_in_the_file_are_not_repeated(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []

    def measure(python: str, request: Any) -> dict[str, Any]:
        made.append(request["seed"])
        return {"returns": [1.0, 3.0], "seconds": 1.0, "versions": {}}

    monkeypatch.setattr(peers, "measure", measure)
    flags = ["returns", "--algorithms", "ppo", "--json", str(tmp_path / "found.json")]
    table = peers.Table()
    for seeds in (["1"], ["1", "2"]):
        table = peers.Table()
        peers.returns(peers.parse_args([*flags, "--seeds", *seeds]), {"ours": "python"}, table)
    assert made == [1, 2]
    assert [answer["returns"] for answer in table.cells["ppo"]["ours"]] == [[1.0, 3.0]] * 2
