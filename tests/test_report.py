"""``rl-training report``: its numbers against independent ones, its page, and how it refuses."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import html.parser
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rliable")
pytest.importorskip("matplotlib")

from conftest import QUICK_KNOBS
from rl_training import cli
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.runs import describe_run, write_json
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.tools.report import stats as report_stats
from rl_training.tools.report.command import WrittenReport, write_report
from rl_training.tools.report.log import Series

Captured = pytest.CaptureFixture[str]
NOON = dt.datetime(2030, 1, 2, 12, 0, tzinfo=dt.UTC)
HOSTILE = """<script>alert('x')</script>"&amp;$y$-v0"""


def write_run(
    folder: Path,
    seed: int,
    *,
    evals: Sequence[tuple[int, float]] = (),
    returns: Sequence[tuple[int, float]] = (),
    seconds_per_step: float = 0.001,
    status: str | None = "finished",
    created: str = "2030-01-01T00:00:00+00:00",
    **fields: Any,
) -> Path:
    """A run folder with the given curves, in the files that a trainer writes."""
    config: TrainConfig[Any] = TrainConfig(seed=seed, output_dir=folder, **fields)
    run = folder / f"{config.algo}__seed{seed}__{len(list(folder.glob('*')))}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    metadata = describe_run(config, device="cpu", torch_threads=1, resume="exact")
    write_json(run / "metadata.json", {**metadata, "created": created})
    rows: list[dict[str, float]] = [
        {"step": s, "rollout/return_mean": v, "time/elapsed": s * seconds_per_step}
        for s, v in returns
    ]
    rows += [{"step": s, "eval/return_mean": v} for s, v in evals]
    rows.sort(key=lambda row: row["step"])
    lines = [json.dumps({"format": 1}), *map(json.dumps, rows)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if status is not None:
        step = rows[-1]["step"] if rows else 0
        summary = {"status": status, "reason": "", "global_step": step, config.total_setting: 1000}
        write_json(run / "summary.json", {"format": 1, **summary, "metrics": {}})
    return run


class PageParser(html.parser.HTMLParser):
    """Tables by their captions, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._rows: list[list[str]] = []
        self._caption = ""
        self._into: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if tag in ("td", "th", "caption", "style", "script"):
            self._into = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.tables[self._caption] = self._rows
        if tag == self._into:
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into in ("td", "th"):
            self._rows[-1][-1] += data
        elif self._into == "caption":
            self._caption += data
        if self._into not in ("style", "script"):
            self.text += data

    def rows(self, caption: str) -> list[dict[str, str]]:
        """A table's rows, by the names of its columns."""
        head, *body = self.tables[caption]
        return [dict(zip(head, row, strict=True)) for row in body]


def read(written: WrittenReport) -> PageParser:
    return PageParser(written.page.read_text(encoding="utf-8"))


def shown(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace(",", ""))


class StopAt(Callback):
    """Sends the signal that a user or a scheduler would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        if event.step >= self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module", autouse=True)
def _quick_bands() -> Iterator[None]:
    """Bands of curves from fewer samples; scores keep theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_stats, "CURVE_REPETITIONS", 100)
        yield


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: Path
    finished: dict[str, list[Path]]
    interrupted: Path
    damaged: Path
    written: WrittenReport


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two algorithms on two seeds each, a run that was interrupted, and a damaged folder."""
    folder = tmp_path_factory.mktemp("trained")

    def config(algo: str, seed: int) -> TrainConfig[Any]:
        base: TrainConfig[Any] = TrainConfig(
            algo=algo,
            seed=seed,
            total_timesteps=1024,
            num_envs=2,
            eval_interval=256,
            eval_episodes=2,
            progress=False,
            tensorboard=False,
            output_dir=folder / "runs" / algo,
        )
        return base.with_overrides(**QUICK_KNOBS[algo])

    finished = {
        algo: [ExperimentManager.setup(config(algo, seed)).train().run_dir for seed in (1, 2)]
        for algo in ("ppo", "dqn")
    }
    part = ExperimentManager.setup(config("ppo", 3), callbacks=[StopAt(300)]).train()
    assert part.interrupted
    damaged = Path(shutil.copytree(finished["dqn"][0], folder / "runs" / "damaged"))
    log = (damaged / "metrics.jsonl").read_text().splitlines()
    (damaged / "metrics.jsonl").write_text("\n".join([*log[:2], '{"step": 3, "rol', *log[2:]]))
    written = write_report([folder / "runs"], folder / "report", created=NOON)
    return Trained(folder, finished, part.run_dir, damaged, written)


def test_trained_runs_and_their_scores(trained: Trained) -> None:
    page = read(trained.written)
    rows = {row["Group"]: row for row in page.rows("CartPole-v1: final eval/return_mean")}
    assert set(rows) == {"ppo", "dqn"}
    for algo, folders in trained.finished.items():
        finals = [
            json.loads((f / "summary.json").read_text())["metrics"]["eval/return_mean"]
            for f in folders
        ]
        row = rows[algo]
        assert row["Seeds"] == "2"
        assert row["Steps"] == "1,024"
        assert shown(row["IQM"]) == pytest.approx(np.mean(finals), abs=0.05)  # two: nothing is cut
        assert shown(row["Mean"]) == pytest.approx(np.mean(finals), abs=0.05)
        assert shown(row["Min"]) == pytest.approx(min(finals), abs=0.05)
        assert shown(row["Max"]) == pytest.approx(max(finals), abs=0.05)
        clocks = [
            json.loads((f / "summary.json").read_text())["metrics"]["time/elapsed"] for f in folders
        ]
        speed = np.mean([1024 / clock for clock in clocks])
        assert shown(row["Steps/s"]) == pytest.approx(speed, abs=0.51)
    assert rows["ppo"]["Not finished"] == "1 interrupted"
    assert rows["dqn"]["Not finished"] == "\N{EN DASH}"


def test_every_run_is_listed_as_it_ended(trained: Trained) -> None:
    page = read(trained.written)
    rows = {row["Run"]: row for row in page.rows("CartPole-v1: every run")}
    assert len(rows) == 5
    assert all(rows[f.name]["Status"] == "finished" for fs in trained.finished.values() for f in fs)
    stopped = rows[trained.interrupted.name]
    step = json.loads((trained.interrupted / "summary.json").read_text())["global_step"]
    assert stopped["Status"] == "interrupted"
    assert stopped["Steps"] == f"{step:,} of 1,024"
    assert "SIGTERM" in stopped["Remarks"]
    (damaged,) = page.rows("Damaged run folders")
    assert damaged["Folder"] == str(trained.damaged)
    assert damaged["Reason"] == "metrics.jsonl, line 3, is not a row of metrics"
    assert "1 run folder is damaged" in page.text
    assert "1 of 3 runs did not finish (interrupted)" in page.text


def test_configs_tell_what_differs_and_what_does_not(trained: Trained) -> None:
    page = read(trained.written)
    differing = {row["Setting"]: row for row in page.rows("Settings that differ between groups")}
    common = {row["Setting"]: row["Value"] for row in page.rows("Settings common to all groups")}
    rows = page.rows("Hyperparameters that only some algorithms have")
    partial = {row["Setting"] for row in rows}
    assert differing["algo"] == {
        "Setting": "algo",
        "dqn (CartPole-v1)": "dqn",
        "ppo (CartPole-v1)": "ppo",
    }
    assert common["total_timesteps"] == "1024"
    assert common["eval_interval"] == "256"
    assert "algo_kwargs.gae_lambda" in partial
    assert not differing.keys() & common.keys()
    assert "seed" not in differing.keys() | common.keys()


def test_origin_and_commands(trained: Trained) -> None:
    page = read(trained.written)
    origin = {row["What"]: row["5 runs"] for row in page.rows("Hardware and versions")}
    metadata = json.loads((trained.interrupted / "metadata.json").read_text())
    assert origin["torch"] == metadata["versions"]["torch"]
    assert origin["git commit"] == (metadata["git_commit"] or "none")
    assert origin["device"] == "cpu"
    assert origin["cpu count"] == str(metadata["hardware"]["cpu_count"])
    assert sum(tag == "pre" for tag, _ in page.tags) == 5


def test_iqm_and_interval_of_five_seeds(tmp_path: Path) -> None:
    finals = [10.0, 300.0, 100.0, 1000.0, 200.0]
    for seed, value in enumerate(finals):
        write_run(tmp_path / "runs", seed, evals=[(500, 1.0), (1000, value)])
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    (row,) = read(written).rows("CartPole-v1: final eval/return_mean")
    assert shown(row["IQM"]) == 200.0  # 100, 200 and 300: a quarter of five is one at each end
    assert shown(row["Mean"]) == 322.0
    assert (shown(row["Min"]), shown(row["Max"])) == (10.0, 1000.0)
    draws = np.random.default_rng(0).choice(finals, (100_000, 5))
    expected = np.percentile(np.sort(draws, axis=1)[:, 1:4].mean(axis=1), [2.5, 97.5])
    found = [shown(word) for word in row["95% interval"].split(" to ")]
    assert found == pytest.approx(expected, rel=0.07)


def test_curves_are_the_iqm_at_every_logged_step() -> None:
    from rliable import metrics  # type: ignore[import-untyped]

    steps = np.arange(1.0, 31.0)
    values = np.random.default_rng(3).normal(size=(6, 30))
    curve = report_stats.aggregate_curve([Series(steps, steps, row) for row in values], "steps")
    assert curve is not None
    assert curve.low is not None
    assert curve.high is not None
    assert curve.logged
    np.testing.assert_array_equal(curve.x, steps)
    by_hand = np.sort(values, axis=0)[1:5].mean(axis=0)
    np.testing.assert_allclose(curve.y, by_hand)
    library = [metrics.aggregate_iqm(values[:, [i]]) for i in range(30)]
    np.testing.assert_allclose(curve.y, library)
    assert (curve.low <= curve.y).all()
    assert (curve.y <= curve.high).all()
    assert (curve.low < curve.high).all()


def test_seeds_of_other_grids_meet_only_where_all_have_data() -> None:
    first = Series(np.array([10.0, 20, 40]), np.zeros(3), np.array([0.0, 10, 30]))
    second = Series(np.array([15.0, 30]), np.zeros(2), np.array([100.0, 130]))
    curve = report_stats.aggregate_curve([first, second], "steps")
    assert curve is not None
    assert not curve.logged
    np.testing.assert_array_equal(curve.x, [15, 20, 30])
    np.testing.assert_allclose(curve.y, [(5 + 100) / 2, (10 + 110) / 2, (20 + 130) / 2])


def test_seeds_without_a_common_range_have_no_curve() -> None:
    early = Series(np.array([1.0, 2]), np.zeros(2), np.zeros(2))
    late = Series(np.array([3.0, 4]), np.zeros(2), np.zeros(2))
    assert report_stats.aggregate_curve([early, late], "steps") is None


def test_a_single_seed_has_a_line_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 4, returns=[(10, 1.0), (20, 2.0)], eval_episodes=0)
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    (row,) = read(written).rows("CartPole-v1: final rollout/return_mean")
    assert (row["IQM"], row["95% interval"]) == ("2.00", "\N{EN DASH}")
    assert "a single seed, so there is no confidence interval" in read(written).text
    (line,) = written.report.panels["CartPole-v1"][0].lines
    assert line.curve is not None
    assert line.curve.low is None


def test_single_seeds_share_a_remark(tmp_path: Path) -> None:
    for gamma in (0.5, 0.6, 0.7, 0.8, 0.9):
        write_run(tmp_path / "runs", 1, evals=[(9, 1.0)], algo_kwargs={"gamma": gamma})
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    (remark,) = written.report.remarks
    assert remark.endswith(" and 2 more: a single seed, so there is no confidence interval.")
    assert remark.count("gamma") == 3


def test_the_command_names_damaged_folders(tmp_path: Path, capsys: Captured) -> None:
    broken = [write_run(tmp_path / "runs", seed) for seed in (1, 2, 3, 4)]
    for run in broken:
        (run / "config.yaml").write_text("")
    assert call(tmp_path / "runs", "--output", tmp_path / "out") == 0
    named = ", ".join(str(run) for run in sorted(broken)[:3])
    error = capsys.readouterr().err
    assert error == f"note: 4 run folders are damaged: {named} and 1 more.\n"


def test_seeds_of_different_lengths_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 1, evals=[(500, 1.0), (1000, 2.0)])
    write_run(tmp_path / "runs", 2, evals=[(500, 1.0), (800, 2.0)])
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    assert "seeds ended between 800 and 1k steps" in read(written).text
    (line,) = written.report.panels["CartPole-v1"][0].lines
    assert line.curve is not None
    assert line.curve.x[-1] == 800


OFFLINE: dict[str, Any] = {"algo": "bc", "dataset": "a/b-v0", "total_updates": 1000}


def axis_labels(written: WrittenReport) -> list[str]:
    """The text under the x axis of every figure of the page."""
    names = r">(environment steps|updates|wall time \(\w+\))</text>"
    return re.findall(names, written.page.read_text(encoding="utf-8"))


def test_runs_that_count_updates_are_shown_over_updates(tmp_path: Path) -> None:
    offline = {**OFFLINE, "env_id": "Pendulum-v1"}
    write_run(tmp_path / "runs", 1, evals=[(500, 1.0), (1000, 2.0)], **offline)
    run = write_run(tmp_path / "runs", 2, evals=[(500, 1.0), (800, 2.0)], **offline)
    metadata = json.loads((run / "metadata.json").read_text())
    write_json(run / "metadata.json", {**metadata, "resumes": [{"step": 500, "command": ["x"]}]})
    write_run(tmp_path / "runs", 3, evals=[(100, 1.0)], status="interrupted", **offline)
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    page = read(written)
    assert [panel.axis for panel in written.report.panels["Pendulum-v1"]] == ["updates", "seconds"]
    assert axis_labels(written)[0] == "updates"
    (row,) = page.rows("Pendulum-v1: final eval/return_mean")
    assert (row["Updates"], "Updates/s" in row) == ("800 to 1,000", True)
    rows = page.rows("Pendulum-v1: every run")
    assert [row["Updates"] for row in rows] == ["1,000", "800", "100 of 1,000"]
    assert [row["At update"] for row in rows] == ["1,000", "800", "100"]
    assert "seeds ended between 800 and 1k updates" in page.text
    assert "resumed at update 500" in page.text
    text = written.page.read_text(encoding="utf-8")
    assert "against updates: bc ends at 1.80; 1 of 3 runs not aggregated." in text
    assert "environment steps" not in text
    assert not any("step" in column.lower() for column in (*row, *rows[0]))


def test_steps_and_updates_have_an_axis_each(tmp_path: Path) -> None:
    for seed in (1, 2):
        evals = [(400, 1.0), (1000, 2.0)]
        write_run(tmp_path / "runs", seed, evals=evals, env_id="CartPole-v1", **OFFLINE)
        write_run(tmp_path / "runs", seed, evals=[(200, 3.0), (900, 4.0)])
    write_run(tmp_path / "runs", 3, evals=[(200, 3.0)], status="failed")
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    panels = written.report.panels["CartPole-v1"]
    drawn = {panel.axis: [(line.label, line.order) for line in panel.lines] for panel in panels}
    offline, online = ("bc", 0), ("ppo", 1)
    assert drawn == {"steps": [online], "updates": [offline], "seconds": [offline, online]}
    assert axis_labels(written) == ["environment steps", "updates", "wall time (s)"]
    page = read(written)
    scores = {row["Group"]: row for row in page.rows("CartPole-v1: final eval/return_mean")}
    assert (scores["bc"]["Unit"], scores["bc"]["Steps or updates"]) == ("updates", "1,000")
    assert (scores["ppo"]["Unit"], scores["ppo"]["Steps or updates"]) == ("steps", "900")
    rows = page.rows("CartPole-v1: every run")
    assert [(row["Unit"], row["At step or update"]) for row in rows] == [
        *[("updates", "1,000")] * 2,
        *[("steps", "900")] * 2,
        ("steps", "200"),
    ]
    text = written.page.read_text(encoding="utf-8")
    assert "environment steps: ppo ends at 4.00; 1 of 3 runs not aggregated." in text
    assert "against updates: bc ends at 2.00." in text


def test_a_repeated_seed_counts_once_and_the_newest(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 1, evals=[(9, 50.0)], created="2030-01-01T00:00:00+00:00")
    write_run(tmp_path / "runs", 1, evals=[(9, 70.0)], created="2030-01-02T00:00:00+00:00")
    page = read(write_report([tmp_path / "runs"], tmp_path / "out"))
    (row,) = page.rows("CartPole-v1: final eval/return_mean")
    assert (row["Seeds"], row["Mean"]) == ("1", "70.00")
    older, newer = page.rows("CartPole-v1: every run")
    assert "a newer run has this seed" in older["Remarks"]
    assert "a newer run" not in newer["Remarks"]


def test_the_clock_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", 1, returns=[(100, 1.0), (200, 1.0)], seconds_per_step=1.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 300, "rollout/return_mean": 2.0, "time/elapsed": 60.0}\n')
        file.write('{"step": 400, "rollout/return_mean": 2.0, "time/elapsed": 100.0}\n')
    summary = json.loads((run / "summary.json").read_text())
    write_json(run / "summary.json", {**summary, "global_step": 400})
    written = write_report([tmp_path / "runs"], tmp_path / "out", metric="rollout/return_mean")
    (only,) = written.report.runs
    assert only.seconds == 300.0
    np.testing.assert_array_equal(only.series["rollout/return_mean"].seconds, [100, 200, 260, 300])
    (row,) = read(written).rows("CartPole-v1: every run")
    assert row["Wall time"] == "5 min 00 s"
    assert row["Steps/s"] == "1"


@pytest.mark.parametrize(
    ("status", "after", "shown_status", "reason"),
    [
        (None, 0, "no end recorded", "still running, or killed"),
        ("interrupted", 50, "no end recorded", "resumed; still running, or killed"),
        ("failed", 0, "failed", ""),
    ],
)
def test_unfinished_runs_have_no_final_score(
    tmp_path: Path, status: str | None, after: int, shown_status: str, reason: str
) -> None:
    run = write_run(tmp_path / "runs", 1, evals=[(100, 7.0)], status=status)
    if after:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 100 + after, "eval/return_mean": 8.0}) + "\n")
    page = read(write_report([tmp_path / "runs"], tmp_path / "out"))
    (row,) = page.rows("CartPole-v1: final eval/return_mean")
    assert (row["Seeds"], row["IQM"]) == ("0", "\N{EN DASH}")
    assert row["Not finished"] == f"1 {shown_status}"
    (listed,) = page.rows("CartPole-v1: every run")
    assert listed["Status"] == shown_status
    assert reason in listed["Remarks"]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.yaml", None, "config.yaml is missing"),
        ("config.yaml", "algo: [", "config.yaml is not valid YAML"),
        ("config.yaml", "algo: ppo", "config.yaml has no usable 'env_id'"),
        ("metadata.json", "{", "metadata.json cannot be read"),
        ("metadata.json", "[]", "metadata.json does not contain a mapping"),
        ("summary.json", "nothing", "summary.json cannot be read"),
        ("summary.json", '{"status": "failed"}', "summary.json has no usable 'global_step'"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", '{"format": 99}\n', "metrics.jsonl has format 99"),
        ("metrics.jsonl", '{"step": "x"}\n{}\n', "metrics.jsonl, line 1"),
        ("metrics.jsonl", "\xff\xfe", "metrics.jsonl"),
    ],
)
def test_damage_is_listed_with_its_reason(
    tmp_path: Path, file: str, content: str | None, reason: str
) -> None:
    write_run(tmp_path / "runs", 1, evals=[(9, 1.0)])
    broken = write_run(tmp_path / "runs", 2, evals=[(9, 1.0)])
    if content is None:
        (broken / file).unlink()
    else:
        (broken / file).write_bytes(content.encode("latin-1"))
    page = read(write_report([tmp_path / "runs"], tmp_path / "out"))
    (damaged,) = page.rows("Damaged run folders")
    assert damaged["Folder"] == str(broken)
    assert reason in damaged["Reason"]
    assert len(page.rows("CartPole-v1: every run")) == 1


def test_nothing_but_damage_still_makes_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", 1)
    (run / "config.yaml").write_text("")
    page = read(write_report([tmp_path / "runs"], tmp_path / "out"))
    assert "No readable runs" in page.text
    assert len(page.rows("Damaged run folders")) == 1


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", 1, evals=[(9, 3.0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "eval/ret')
    (row,) = read(write_report([run], tmp_path / "out")).rows("CartPole-v1: every run")
    assert (row["Last score"], row["At step"]) == ("3.00", "9")
    assert "incomplete" in row["Remarks"]


def test_long_logs_make_small_pages(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for seed in (1, 2):
        noisy = [(s, float(v)) for s, v in enumerate(rng.normal(size=20_000), start=1)]
        write_run(tmp_path / "runs", seed, returns=noisy)
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    for panel in written.report.panels["CartPole-v1"]:
        (line,) = panel.lines
        assert line.curve is not None
        assert len(line.curve.x) <= report_stats.MAX_POINTS
    steps = written.report.panels["CartPole-v1"][0].lines[0].curve
    assert steps is not None
    assert (steps.x[0], steps.x[-1]) == (1, 20_000)
    assert written.page.stat().st_size < 100_000


def test_labels_tell_groups_apart(tmp_path: Path) -> None:
    for rate in (1e-3, 3e-4):
        write_run(tmp_path / "runs", 1, evals=[(9, 1.0)], algo_kwargs={"learning_rate": rate})
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    labels = [result.group.label for result in written.report.results]
    assert labels == ["ppo, learning_rate 0.0003", "ppo, learning_rate 0.001"]


def test_an_environment_that_a_function_made_is_not_the_one_of_that_name(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 1, evals=[(9, 500.0)])
    own = write_run(tmp_path / "runs", 2, evals=[(9, 1.0)])
    metadata = json.loads((own / "metadata.json").read_text())
    write_json(own / "metadata.json", {**metadata, "env_fn": "corridor.Corridor"})
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    found = [result.group.env_id for result in written.report.results]
    assert found == ["CartPole-v1", "CartPole-v1 (env_fn corridor.Corridor)"]


def test_labels_tell_another_task_even_of_another_algorithm(tmp_path: Path) -> None:
    """Side by side in one figure, who plays without velocities must be told."""
    hidden = [{"path": "rl_training.envs.wrappers:HideVelocities"}]
    write_run(tmp_path / "runs", 1, evals=[(9, 1.0)])
    write_run(tmp_path / "runs", 1, evals=[(9, 1.0)], algo="recurrent_ppo", wrappers=hidden)
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    labels = [result.group.label for result in written.report.results]
    assert labels == ["ppo", "recurrent_ppo, wrappers HideVelocities"]


def test_what_is_switched_off_is_told_and_does_not_crowd_out_what_differs(tmp_path: Path) -> None:
    off = {"a": False, "b": 0, "c": 1}
    for rate in (1e-3, 3e-4):
        knobs = {"learning_rate": rate}
        write_run(tmp_path / "runs", 1, evals=[(9, 1.0)], env_kwargs=off, algo_kwargs=knobs)
    write_run(tmp_path / "runs", 1, evals=[(9, 1.0)], algo="dqn")
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    assert [result.group.label for result in written.report.results] == [
        "dqn",
        "ppo, a False, b 0, c 1, learning_rate 0.0003",
        "ppo, a False, b 0, c 1, learning_rate 0.001",
    ]


def test_what_comes_from_configs_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>runs"
    write_run(folder, 1, evals=[(9, 1.0)], env_id=HOSTILE, env_kwargs={"<i>": "<u>'\""})
    written = write_report([folder], tmp_path / "out")
    text = written.page.read_text(encoding="utf-8")
    for raw in ("<script>alert", "<b>runs", "<i>", "<u>"):
        assert raw not in text
    page = PageParser(text)
    assert f"{HOSTILE}: every run" in page.tables
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert any(HOSTILE in attrs.get("aria-label", "") for tag, attrs in page.tags if tag == "svg")
    (figure,) = written.figures
    assert figure.parent == tmp_path / "out"
    assert re.fullmatch(r"curves-[\w.-]+\.png", figure.name)


def test_the_last_video_of_a_run_is_embedded(tmp_path: Path) -> None:
    for seed, size in ((1, 5000), (2, (2 << 20) + 1), (3, 0)):
        run = write_run(tmp_path / "runs", seed, evals=[(1, 1.0)])
        if size:
            (run / "videos").mkdir()
            (run / "videos" / "step_1.mp4").write_bytes(b"first")
            (run / "videos" / "step_2.mp4").write_bytes(bytes(size))
            (run / "videos" / "step_3.mp4").symlink_to("/etc/passwd")
    written = write_report([tmp_path / "runs"], tmp_path / "report")
    page = read(written)
    videos = [attributes for tag, attributes in page.tags if tag == "video"]
    assert [len(base64.b64decode(v["src"].partition(",")[2])) for v in videos] == [5000]
    assert "Too large for this page" in page.text
    assert "media-src data:" in written.page.read_text(encoding="utf-8")


def test_the_page_refers_to_nothing_outside_it(trained: Trained) -> None:
    text = trained.written.page.read_text(encoding="utf-8")
    page = PageParser(text)
    loading = {"src", "srcset", "href", "xlink:href", "data", "poster", "action", "background"}
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        for name in loading & attrs.keys():
            assert attrs[name].startswith("#"), (tag, attrs)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    used = re.findall(r'(?:url\(|href=")#([^")]+)', text)
    assert used
    assert set(used) <= ids


def test_the_page_can_be_used_without_seeing_it(trained: Trained) -> None:
    page = read(trained.written)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for tag, attrs in page.tags:
        if tag == "th":
            assert attrs["scope"] in ("col", "row")
        if tag == "svg":
            assert attrs.get("aria-hidden") or (attrs["role"] == "img" and attrs["aria-label"])
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in ids
    assert ("html", {"lang": "en"}) in page.tags
    figures = [attrs["aria-label"] for tag, attrs in page.tags if attrs.get("role") == "img"]
    assert len(figures) == 4
    assert figures[0].startswith("eval/return_mean on CartPole-v1 against environment steps: dqn")


def test_pngs_show_something(trained: Trained) -> None:
    from PIL import Image

    (path,) = trained.written.figures
    pixels = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100
    for colour in ((0x00, 0x68, 0xA8), (0xBF, 0x4A, 0x00)):  # both groups' lines
        assert (pixels == colour).all(axis=-1).sum() > 200


def test_same_runs_same_page_and_no_trace_in_the_process(tmp_path: Path) -> None:
    import matplotlib as mpl

    values = np.random.default_rng(1).normal(size=(6, 2))
    for seed, (early, late) in enumerate(values.tolist()):
        write_run(tmp_path / "runs", seed, evals=[(500, early), (1000, late)])
    first = write_report([tmp_path / "runs"], tmp_path / "first", created=NOON)
    np.random.seed(5)  # noqa: NPY002 - a state that no report leaves behind
    state: Any = np.random.get_state()  # noqa: NPY002
    settings = dict(mpl.rcParams)
    again = write_report([tmp_path / "runs"], tmp_path / "again", created=NOON)
    after: Any = np.random.get_state()  # noqa: NPY002
    np.testing.assert_array_equal(state[1], after[1])
    assert state[2:] == after[2:]
    assert dict(mpl.rcParams) == settings
    assert again.page.read_bytes() == first.page.read_bytes()
    for one, two in zip(again.figures, first.figures, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_runs_named_twice_are_read_once(trained: Trained) -> None:
    from rl_training.tools.report.data import find_run_folders

    folders = find_run_folders([trained.folder / "runs", trained.interrupted])
    assert len(folders) == 6


def call(*words: str | Path) -> int:
    try:
        return cli.main(["report", *map(str, words)])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_command_and_its_json(trained: Trained, tmp_path: Path, capsys: Captured) -> None:
    runs = trained.finished["ppo"]
    assert call(*runs, "--output", tmp_path / "o", "--metric", "losses/loss", "--json") == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert Path(result["page"]).is_file()
    assert [Path(path).name for path in result["figures"]] == ["curves-CartPole-v1.png"]
    (group,) = result["groups"]
    assert group["seeds"] == [1, 2]
    assert group["metric"] == "losses/loss"
    finals = [
        json.loads((f / "summary.json").read_text())["metrics"]["losses/loss"]
        for f in trained.finished["ppo"]
    ]
    assert group["score"]["mean"] == pytest.approx(np.mean(finals))
    page = PageParser(Path(result["page"]).read_text(encoding="utf-8"))
    assert "CartPole-v1: final losses/loss" in page.tables


def test_help_names_everything(capsys: Captured) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    for word in ("RUNS...", "--output", "--metric NAME", "--json", "one HTML page"):
        assert word in text


def test_mistakes_are_told_in_a_line(trained: Trained, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = trained.finished["ppo"][0]
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        ((tmp_path / "nowhere",), f"{tmp_path / 'nowhere'} does not exist"),
        ((run, tmp_path / "nowhere"), f"{tmp_path / 'nowhere'} does not exist"),
        ((tmp_path / "empty",), f"no runs found in {tmp_path / 'empty'}"),
        ((tmp_path / "file",), "is not a folder"),
        ((), "name at least one run folder"),
        ((run, "--metric", "eval/return_men"), "Did you mean 'eval/return_mean'?"),
        ((run, "--output", tmp_path / "file"), "cannot write the report to"),
        ((run, "--output", tmp_path / "file" / "below"), "cannot write the report to"),
    ]
    for words, message in cases:
        assert call(*words) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


@pytest.mark.parametrize("module", ["rliable", "matplotlib"])
def test_a_missing_extra_is_named(
    module: str, trained: Trained, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    assert call(trained.finished["ppo"][0]) == 2
    assert "pip install '.[report]'" in capsys.readouterr().err


def test_what_it_needs_is_loaded_only_when_a_report_is_written(
    trained: Trained, tmp_path: Path
) -> None:
    code = f"""
import sys
import rl_training
from rl_training import cli
cli.main(["--help"])
heavy = ("rl_training.tools.report.command", "matplotlib", "rliable", "scipy", "torch")
assert not any(name in sys.modules for name in heavy)
import rl_training.tools.report.command
assert not any(name in sys.modules for name in heavy[1:])
assert cli.main(["report", {str(trained.interrupted)!r}, "--output", {str(tmp_path)!r}]) == 0
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules  # it would choose a backend for the process
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_labels_name_wrappers_by_their_classes_and_stay_short() -> None:
    from rl_training.tools.report.groups import _brief

    hidden = [{"path": "rl_training.envs.wrappers:HideVelocities", "kwargs": {}}]
    assert _brief(hidden) == "HideVelocities"
    assert _brief([]) == "none"
    assert _brief([64, 64]) == "[64, 64]"
    assert len(_brief("x" * 100)) == 40
