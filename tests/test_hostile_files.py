"""Files made by somebody else: they drive neither the terminal, nor a report, nor the disk."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_training import cli
from rl_training._internal.yaml_io import MAX_BYTES, load_yaml, load_yaml_file
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.runs import describe_run
from rl_training.tools.doctor.advice import Advice, Result
from rl_training.tools.doctor.command import _recommendation
from rl_training.tools.doctor.trials import Trial
from rl_training.tools.record import RecordArgs, _default_output
from rl_training.tools.zoo import processes as zoo_processes
from rl_training.tools.zoo.jobs import latest_row, plan
from rl_training.tools.zoo.manifest import MANIFEST, load_benchmark
from rl_training.untrusted_files import open_regular, read_regular, require_no_links

ESCAPE = "\x1b]0;owned\x07"
SECONDS = 5.0
"""Of computing: no file may take longer."""


# -- reading ---------------------------------------------------------------------------------------


def test_only_regular_files_of_a_bounded_size_are_opened(tmp_path: Path) -> None:
    file, pipe, link = tmp_path / "file", tmp_path / "pipe", tmp_path / "link"
    file.write_bytes(b"12345")
    os.mkfifo(pipe)
    link.symlink_to(file)
    assert read_regular(file, 5) == read_regular(link, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        open_regular(file, 4)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="regular file"):
            open_regular(path, 5)
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_regular(Path("/proc/self/status"), 3)  # its size is given as 0
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 5)


def aliases(first: str, more: str) -> str:
    """A few lines in which every anchor repeats the one before ten times."""
    repeat = [more.format(",".join([f"*a{i}"] * 10)) for i in range(18)]
    return f"a0: &a0 {first}\n" + "".join(f"a{i}: &a{i} {r}\n" for i, r in enumerate(repeat, 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (aliases("[x]", "[{}]"), "more than 20,000 values"),
        (aliases("{x: 1}", "{{<<: [{}]}}"), "more than 20,000 values"),
        ("a: [" + "1," * 30_000 + "]", "more than 20,000 values"),
        (
            "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 300)),
            "100 levels",
        ),
        ("[" * 100_000, "100 levels"),
        ("a: &a [*a]", "contains itself"),
        ("a: &a {b: {<<: *a}}", "contains itself"),
        ("seed: " + "9" * 400, "longer than 100 digits"),
        ("seed: 0x" + "f" * 100_000, "longer than 100 digits"),
        ("seed: " + "1:" * 100_000 + "1", "longer than 100 digits"),
        ("seed: !!int ''", "does not fit its tag"),
        ("seed: !!timestamp x", "does not fit its tag"),
        ("x" * (MAX_BYTES + 1), "larger than 1 MiB"),
    ],
)
def test_yaml_that_is_small_as_text_and_huge_as_values(text: str, reason: str) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError, match=reason) as caught:
        load_yaml(text, "config.yaml")
    assert str(caught.value).startswith("config.yaml")
    assert time.process_time() - begun < SECONDS


def test_usual_yaml_with_aliases_and_merges_is_read() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: {<<: *a, x: 3}\nc: [*a, *a]\n"
    first = {"x": 1, "y": [1, 2]}
    assert load_yaml(text, "-") == {"a": first, "b": {**first, "x": 3}, "c": [first, first]}


def test_a_yaml_file_that_is_a_pipe_or_too_large(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml.*regular"):
        load_yaml_file(tmp_path / "pipe.yaml")
    (tmp_path / "large.yaml").write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=r"large\.yaml.*larger"):
        load_yaml_file(tmp_path / "large.yaml")


def test_links_below_a_folder_are_found_and_links_above_it_are_not(tmp_path: Path) -> None:
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    (real / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    linked = tmp_path / "linked"
    linked.symlink_to(real)
    require_no_links(linked / "sub" / "new.txt", linked)
    require_no_links(elsewhere / "x", real)
    (real / "out").symlink_to(elsewhere)
    for path, below in [
        (real / "out" / "x", real),
        (real / "out", linked),
        (linked / "out", linked),
    ]:
        with pytest.raises(UserError, match="out is a symbolic link"):
            require_no_links(path, below)


# -- reports ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Files:
    """What the files of a run hold, before they are written."""

    config: dict[str, Any]
    metadata: dict[str, Any]
    summary: dict[str, Any]
    rows: list[Any]

    def write(self, run: Path) -> Path:
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(json.dumps(self.config))
        (run / "metadata.json").write_text(json.dumps(self.metadata))
        (run / "summary.json").write_text(json.dumps(self.summary))
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return run


def good_files(env_id: str = "CartPole-v1") -> Files:
    return copy.deepcopy(_good_files(env_id))


@functools.cache
def _good_files(env_id: str) -> Files:
    config: TrainConfig[Any] = TrainConfig(env_id=env_id, output_dir=Path("runs"))
    metadata = describe_run(config, device="cpu", torch_threads=1, resume="exact")
    resumes = [{"step": 5, "command": ["rl-training", "resume"]}]
    rows = [{"step": s, "rollout/return_mean": s / 9, "time/elapsed": s / 99} for s in range(9, 99)]
    rows.append({"step": 99, "eval/return_mean": 7.0})
    summary = {"status": "finished", "reason": "", "global_step": 99, "total_timesteps": 99}
    return Files(
        {"format": 1, **config.to_dict()},
        {**metadata, "resumes": resumes},
        {"format": 1, **summary, "metrics": {"eval/return_mean": 7.0}},
        [{"format": 1}, *rows],
    )


HOSTILE_VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 2**63, 10**400, 10**4000, 1e100, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), "", ESCAPE, "x" * 300, "x" * 200_000, "\ud800", "\u202e\u2028"),
    *("<script>", r"$\frac{$", "a\nb\r\0", "../..", [], {}, [[[[[[1]]]]]], {"a": {"b": []}}),
    *(["a", 1, None], {"path": 3}, [{"path": 3}], [{"path": "a:b"}, 1]),
]


def change_value(rng: random.Random, content: Any) -> None:
    """Remove, rename or replace something anywhere in ``content``."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            places.append((value, key))
            if isinstance(part, (dict, list)):
                collect(part)

    collect(content)
    box, key = rng.choice(places)
    how = rng.random()
    if how < 0.15:
        del box[key]
    elif how < 0.25 and isinstance(box, dict):
        box[rng.choice(["", ESCAPE, "x" * 500, "a.b", "step"])] = box.pop(key)
    else:
        box[key] = rng.choice(HOSTILE_VALUES)


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Cut, insert into, remove from or splice ``content``."""
    at = rng.randrange(len(content))
    other = rng.randrange(len(content))
    inserted = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    kept = (content[other:], content[at + 20 :], inserted + content[at:], b"")
    return content[:at] + rng.choice(kept)


@pytest.fixture
def quick_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    report_stats = pytest.importorskip("rl_training.tools.report.stats")
    pytest.importorskip("rliable")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report_stats, "CURVE_REPETITIONS", 20)
    monkeypatch.setattr(report_stats, "SCORE_REPETITIONS", 20)


@pytest.mark.usefixtures("quick_bands")
def test_whatever_run_folders_hold_the_good_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.tools.report import data as report_data
    from rl_training.tools.report import write_report

    rng = random.Random(15)
    good = good_files("Good-v0").write(tmp_path / "runs" / "good")
    names = [field.name for field in dataclasses.fields(Files)]
    for number in range(300):
        files, run = good_files(), tmp_path / "runs" / f"changed{number:03d}"
        if number % 2:
            change_value(rng, getattr(files, rng.choice(names)))
            files.write(run)
        else:
            file = files.write(run) / rng.choice(sorted(path.name for path in run.iterdir()))
            file.write_bytes(change_bytes(rng, file.read_bytes()))
    seconds: dict[str, float] = {}
    read_run = report_data.read_run

    def timed(folder: Path, *args: Any) -> Any:
        begun = time.process_time()
        try:
            return read_run(folder, *args)
        finally:
            seconds[folder.name] = time.process_time() - begun

    monkeypatch.setattr(report_data, "read_run", timed)
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    report = written.report
    assert max(seconds.values()) < SECONDS
    assert len(seconds) == len(report.runs) + len(report.damaged) == 301
    assert good in [run.path for run in report.runs]
    assert len(report.damaged) > 100, "most changes are damage"
    assert len(report.runs) > 50, "but not all"
    unforeseen = [d for d in report.damaged if d.reason.startswith("cannot be read: ")]
    assert unforeseen == []
    text = written.page.read_bytes().decode("utf-8")
    assert "Good-v0" in text
    assert "\x1b" not in text
    assert "\x00" not in text
    assert len(text) < 5_000_000


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


def row(**changes: Any) -> Callable[[Path], None]:
    return text(json.dumps({"step": 1, "eval/return_mean": 1.0, **changes}) + "\n{}\n")


SPECIAL = [
    *((file, how, "") for file in ("config.yaml", "metadata.json", "summary.json", "metrics.jsonl")
      for how in (a_pipe, a_device, sparse)),
    ("metrics.jsonl", a_loop, "metrics.jsonl"),
    ("config.yaml", text(aliases("[x]", "[{}]")), "20,000 values"),
    ("config.yaml", text("a: &a {x: 1}\nb: !!python/object:os.system x"), "not valid YAML"),
    ("config.yaml", text(yaml.safe_dump({**good_files().config, "d": {1, 2}})), "set"),
    ("metadata.json", text('{"a": ' * 100_000), "nested"),
    ("metadata.json", text('{"resumes": 3}'), "'resumes'"),
    ("metadata.json", text('{"env_fn": ["x"]}'), "'env_fn'"),
    ("metadata.json", text(json.dumps({"x": list(range(30_000))})), "20,000 values"),
    ("metadata.json", text('{"x": ' + "[" * 50 + "]" * 50 + "}"), "32 levels"),
    ("summary.json", text('{"status": "finished", "global_step": 1e3}'), "'global_step'"),
    ("metrics.jsonl", row(step=float("nan")), "line 1"),
    ("metrics.jsonl", row(step=10**18), "line 1"),
    ("metrics.jsonl", row(step=10**400), "line 1"),
    ("metrics.jsonl", row(x=10**400), "line 1"),
    ("metrics.jsonl", row(x="5"), "line 1"),
    ("metrics.jsonl", text("[" * 100_000 + "\n"), "line 1"),
    ("metrics.jsonl", text('{"step": 9}\n{"step": 3}\n'), "line 2"),
    ("metrics.jsonl", text("x" * 2_000_000), "line 1"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "reason"), SPECIAL)
def test_a_folder_that_cannot_be_read_is_damaged(
    file: str, change: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    from rl_training.tools.report.data import find_run_folders, read_runs

    good_files().write(tmp_path / "good")
    change(good_files().write(tmp_path / "bad") / file)
    begun = time.process_time()
    runs, damaged = read_runs(find_run_folders([tmp_path]), ["eval/return_mean"])
    assert time.process_time() - begun < SECONDS
    assert [run.path.name for run in runs] == ["good"]
    (found,) = damaged
    assert found.path.name == "bad"
    assert file in found.reason
    assert reason in found.reason


def test_what_cannot_be_drawn_is_left_out_and_noted(tmp_path: Path) -> None:
    from rl_training.tools.report.data import read_run

    files = good_files()
    files.rows[3:6] = [
        {"step": 10, "rollout/return_mean": 1e308, "time/elapsed": 0.1},
        {"step": 11, "rollout/return_mean": float("nan"), "time/elapsed": float("nan")},
        {"step": 12, "rollout/return_mean": 4.0, "time/elapsed": 1e300},
    ]
    run = read_run(files.write(tmp_path / "run"), ["rollout/return_mean"])
    assert 4.0 in run.series["rollout/return_mean"].values
    assert max(abs(run.series["rollout/return_mean"].values)) < 100
    assert run.seconds < 2
    assert run.notes[0].startswith("4 values")


@pytest.mark.usefixtures("quick_bands")
def test_odd_names_and_settings_are_drawn(tmp_path: Path) -> None:
    from rl_training.tools.report import write_report
    from rl_training.tools.report.figures import literal
    from rl_training.tools.report.groups import _brief

    for number in range(2):
        files = good_files("\ud800\0$Odd$" + "x" * 100)
        files.config["env_kwargs"] = {f"{number} {key} {'x' * 100}": key for key in range(50)}
        files.write(tmp_path / "runs" / str(number))
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    assert written.report.damaged == ()
    labels = [result.group.label for result in written.report.results]
    assert len(set(labels)) == 2
    assert max(map(len, labels)) < 250, "legends stay readable"
    assert "\0" not in written.page.read_text(encoding="utf-8")
    assert _brief([{"path": 3}, {"path": None}]) == "3 + None"
    assert literal("\x1b\n$" + "x" * 500) == r"\x1b\n\$" + "x" * 113


@pytest.mark.usefixtures("quick_bands")
def test_a_report_is_not_written_through_links(tmp_path: Path) -> None:
    from rl_training.tools.report import write_report

    run = good_files().write(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (run / "report").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"report is a symbolic link"):
        write_report([run], run / "report")
    (run / "out").mkdir()
    (run / "out" / "report.html").symlink_to(elsewhere / "file")
    with pytest.raises(UserError, match=r"report\.html is a symbolic link"):
        write_report([tmp_path], run / "out")
    assert (elsewhere / "file").read_text() == "mine"
    (tmp_path / "of the user").symlink_to(elsewhere)
    os.mkfifo(elsewhere / "report.html")  # writing to it would wait for a reader
    (elsewhere / ".report.html.tmp").symlink_to(elsewhere / "file")
    assert write_report([run], tmp_path / "of the user").page.read_text().startswith("<!doctype")
    assert (elsewhere / "file").read_text() == "mine"


def test_a_video_is_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.pt").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    options = RecordArgs(checkpoint=tmp_path / "linked")
    output = _default_output(options, 7)
    assert output == tmp_path / "linked" / "videos" / "step_000000000007.mp4"
    output.parent.mkdir()
    output.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"step_000000000007\.mp4 is a symbolic link"):
        _default_output(options, 7)
    output.unlink()
    output.parent.rmdir()
    output.parent.symlink_to(tmp_path)
    with pytest.raises(UserError, match="videos is a symbolic link"):
        _default_output(options, 7)


# -- benchmarks ------------------------------------------------------------------------------------

QUICK = "format: 1\npreset: ppo/cartpole\neval_episodes: 2\ntensorboard: false\n"
ENTRY = {"preset": "quick", "steps": 1024, "seeds": [1], "expected": 20.0, "source": "us"}


def manifest(folder: Path, **changes: Any) -> Path:
    """A manifest of one preset; changes of its title, or else of its entry."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quick.yaml").write_text(QUICK)
    title = changes.pop("title", "Quick")
    content = {"format": 1, "title": title, "runs": [{**ENTRY, **changes}]}
    (folder / MANIFEST).write_text(yaml.safe_dump(content))
    return folder / MANIFEST


BAD_NAMES = [
    *("../quick", "..", ".", ".quick", "", " ", "/etc/quick", "a/b", r"a\b", "quick\n", "a\0b"),
    *(f"{ESCAPE}quick", "qüick", "quick*", "x" * 101),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_preset_is_the_name_of_a_file_beside_the_manifest(name: str, tmp_path: Path) -> None:
    path = manifest(tmp_path / "small", preset=name)
    (tmp_path / "quick.yaml").write_text(QUICK)
    with pytest.raises(ConfigError, match=r"runs\.preset") as caught:
        load_benchmark(path)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["quick", "a.b-c_1", "-x", "1"])
def test_usual_preset_names_are_taken(name: str, tmp_path: Path) -> None:
    path = manifest(tmp_path / "small", preset=name)
    (path.parent / f"{name}.yaml").write_text(QUICK)
    (job,) = plan(load_benchmark(path), tmp_path / "out")
    assert job.folder == tmp_path / "out" / "small" / name / "seed1"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"title": f"Quick{ESCAPE}"}, "title"),
        ({"title": "Quick\nfailed: nothing"}, "title"),
        ({"source": "\u202eus"}, r"quick\.source"),
        ({"seeds": [-1]}, r"quick\.seeds"),
        ({"seeds": [10**30]}, r"quick\.seeds"),
        ({"steps": 10**16}, r"quick\.steps"),
    ],
)
def test_what_a_manifest_may_not_hold(changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=where):
        load_benchmark(manifest(tmp_path, **changes))


def test_the_folder_of_a_benchmark_is_below_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(tmp_path / "small")
    (tmp_path / "small" / "below").mkdir()
    (tmp_path / "elsewhere.yaml").write_text(QUICK)
    (tmp_path / "small" / "quick.yaml").unlink()
    (tmp_path / "small" / "quick.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    for folder, path in [("small/below", f"../{MANIFEST}"), ("small", MANIFEST), ("small", ".")]:
        monkeypatch.chdir(tmp_path / folder)
        (job,) = plan(load_benchmark(path), Path("out"))
        assert job.folder == Path("out/small/quick/seed1")


@pytest.mark.parametrize("part", ["small", "small/quick", "small/quick/seed1/log.txt", "run"])
def test_runs_are_not_written_through_links(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path, elsewhere = manifest(tmp_path / "small"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = tmp_path / "out"
    link = out / (part if part != "run" else "small/quick/seed1/run")
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    monkeypatch.setattr(zoo_processes, "command", lambda *_: [sys.executable, "-c", "pass"])
    assert cli.main(["zoo", "run", str(path), "--output-dir", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"{link} is a symbolic link" in error
    assert not list(elsewhere.iterdir())
    (tmp_path / "linked").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "real").mkdir()
    assert cli.main(["zoo", "run", str(path), "--output-dir", str(tmp_path / "linked")]) == 0
    assert (tmp_path / "real" / "small" / "quick" / "seed1" / "log.txt").is_file()


FAILING = f"""
import sys
sys.stderr.buffer.write({ESCAPE.encode()!r} + b"a failure \\xff" + b"\\nlast {ESCAPE} words")
sys.exit(3)
"""


def test_the_last_line_of_a_failed_run_is_shown_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    path, out = manifest(tmp_path / "small"), tmp_path / "my $(out) folder"
    monkeypatch.setattr(zoo_processes, "command", lambda *_: [sys.executable, "-c", FAILING])
    assert cli.main(["zoo", "run", str(path), "--output-dir", str(out)]) == 1
    captured = capfdbinary.readouterr()
    assert b"\x1b" not in captured.out + captured.err
    assert rb"failed: quick seed 1: last \x1b]0;owned\x07 words" in captured.err
    (page,) = [line for line in captured.out.decode().splitlines() if line.startswith("page:")]
    assert shlex.split(page)[1:] == ["rl-training", "report", str(out / "small")]


def finished_run(path: Path, out: Path) -> Path:
    """A run of a manifest's only job, as far as a benchmark looks at it."""
    benchmark = load_benchmark(path)
    (job,) = plan(benchmark, out)
    files = good_files()
    files.summary["metrics"] = {"eval/return_mean": 7.0, "eval/episodes": 2, "time/elapsed": 3.0}
    run = files.write(job.folder / "run")
    config = benchmark.config(job.entry).with_overrides(seed=1, total_timesteps=job.steps)
    (run / "config.yaml").write_text(config.to_yaml())
    return run


MALFORMED = [
    ("summary.json", {"global_step": "many"}, "global_step"),
    ("summary.json", {"global_step": None}, "global_step"),
    ("summary.json", {"global_step": 10**400}, "global_step"),
    ("summary.json", {"metrics": [1]}, "metrics"),
    ("summary.json", {"metrics": {"eval/return_mean": "high"}}, "eval/return_mean"),
    ("summary.json", {"metrics": {"eval/return_mean": 10**400}}, "eval/return_mean"),
    ("summary.json", {"metrics": {"eval/return_mean": 1.0, "eval/episodes": []}}, "eval/episodes"),
    ("summary.json", {"metrics": {"eval/return_mean": 1.0, "time/elapsed": {}}}, "time/elapsed"),
    ("metadata.json", {"hardware": 3}, "hardware"),
    ("metadata.json", {"hardware": {"cpu_count": "two"}}, "cpu_count"),
    ("metadata.json", {"versions": ["x"]}, "versions"),
    ("metadata.json", {"git_commit": {"a": ESCAPE}}, "git_commit"),
    ("summary.json", a_pipe, "regular file"),
    ("metadata.json", a_pipe, "regular file"),
    ("summary.json", text("[" * 100_000), "nested"),
    ("config.yaml", text("algo: [1]"), "algo"),
    ("config.yaml", text(aliases("[x]", "[{}]")), "values"),
    ("config.yaml", a_pipe, "config.yaml"),
]


@pytest.mark.parametrize("command", ["report", "run"])
@pytest.mark.parametrize(("file", "change", "words"), MALFORMED)
def test_malformed_runs_of_a_benchmark_are_named_in_a_line(
    file: str, change: Any, words: str, command: str, tmp_path: Path, capsys: Any
) -> None:
    path, out = manifest(tmp_path / "small"), tmp_path / "out"
    run = finished_run(path, out)
    if isinstance(change, dict):
        content = json.loads((run / file).read_text())
        (run / file).write_text(json.dumps({**content, **change}))
    else:
        change(run / file)
    assert cli.main(["zoo", command, str(path), "--output-dir", str(out)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert str(run) in line
    assert words in line
    assert "\x1b" not in line


def test_a_well_formed_run_is_reported_and_commands_are_quoted(tmp_path: Path, capsys: Any) -> None:
    path, out = manifest(tmp_path / "my small", title="Klein, für alle\n"), tmp_path / "out"
    assert cli.main(["zoo", "report", str(path), "--output-dir", str(out)]) == 2
    command = capsys.readouterr().err.partition("start with: ")[2]
    assert shlex.split(command) == ["rl-training", "zoo", "run", str(path)]
    finished_run(path, out)
    assert cli.main(["zoo", "report", str(path), "--output-dir", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("my small: Klein, für alle\n")
    assert "1 of 1" in shown


def test_results_beside_a_manifest_that_are_nested_too_deeply(tmp_path: Path, capsys: Any) -> None:
    path = manifest(tmp_path / "small")
    (path.parent / "results.json").write_text("[" * 100_000)
    assert cli.main(["zoo", "list", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path.parent) in line


def test_the_progress_of_a_run_with_a_damaged_log(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    rows: list[Any] = [
        {"step": 5, "rollout/return_mean": 2.0},
        {"step": 6, "rollout/return_mean": "high"},
        *({"step": bad} for bad in ("x", None, 10**400, float("nan"), [1])),
        [1],
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + "[" * 5000)
    assert latest_row(tmp_path) == (6, 2.0)
    a_pipe(log)
    assert latest_row(tmp_path) == (0, None)


def test_the_doctor_quotes_the_config_it_recommends_flags_for() -> None:
    base, faster = Result(Trial({}), (1.0, 1.0)), Result(Trial({"num_envs": 2}), (2.0, 2.0))
    lines = _recommendation(Advice("cpu", base, {}, 0.0, 0.0, (faster,)), "my $(x).yaml")
    words = ["rl-training", "train", "my $(x).yaml", "--num-envs", "2"]
    assert words in [shlex.split(line) for line in lines]


# -- the terminal ----------------------------------------------------------------------------------


def in_ascii(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run the command line where Python can print nothing but ASCII."""
    src = Path(__file__).parents[1] / "src"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    variables |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "rl_training.cli", *map(str, words)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**variables, "PYTHONPATH": str(src)},
    )


@pytest.mark.usefixtures("quick_bands")
def test_a_report_of_hostile_names_in_ascii(tmp_path: Path) -> None:
    files = good_files(f"{ESCAPE}Ümlaut\nnote: all is well-v0")
    files.metadata["command"] = ["rl-training", "train", f"Pferdestärke {ESCAPE}"]
    files.write(tmp_path / "läufe" / "ein lauf")
    done = in_ascii("report", tmp_path / "läufe", "--output", tmp_path / "größe", "--json")
    assert done.returncode == 0, done.stderr
    for output in (done.stdout, done.stderr):
        assert output.isascii()
        assert b"\x1b" not in output
        assert b"\x07" not in output
    assert rb"\x1b]0;owned\x07" in done.stderr
    assert all(line.startswith(b"note: ppo") for line in done.stderr.splitlines())
    text = (tmp_path / "größe" / "report.html").read_text(encoding="utf-8")
    assert "läufe/ein lauf" in text
    assert "Pferdestärke" in text
    assert "\x1b" not in text
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["groups"]) == 1


def test_the_list_of_a_benchmark_in_ascii(tmp_path: Path) -> None:
    path = manifest(tmp_path / "größe", title="Für alle", source="Müller")
    done = in_ascii("zoo", "list", path)
    assert done.returncode == 0, done.stderr
    assert rb"F\xfcr alle" in done.stdout
    assert rb"M\xfcller" in done.stdout
    refused = in_ascii("zoo", "list", manifest(tmp_path / "größe", title=f"Für{ESCAPE}"))
    assert refused.returncode == 2
    assert b"title" in refused.stderr
    assert b"Traceback" not in refused.stderr
    assert b"\x1b" not in refused.stderr
