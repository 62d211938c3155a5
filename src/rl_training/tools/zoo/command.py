"""``rl-training zoo list | run | report``: benchmarks of many presets and seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.terminal import one_line, say, show, show_result
from rl_training.tools.zoo.jobs import Job, check_outputs, plan
from rl_training.tools.zoo.manifest import Benchmark, Entry, benchmark_names, load_benchmark
from rl_training.tools.zoo.names import chosen_entries, find_benchmark, train_name
from rl_training.tools.zoo.processes import LocalRuns
from rl_training.tools.zoo.results import (
    PresetResult,
    Results,
    gather,
    kept_results,
    write_results,
)
from rl_training.tools.zoo.run import Outcome, Runs, run_jobs
from rl_training.tools.zoo.view import LiveLines, number, running_line
from rl_training.trust import require_trust, trust_from_flag

_HELP = """\
rl-training zoo: benchmarks of many presets and seeds.

  rl-training zoo list [BENCHMARK]    benchmarks with their expected and measured returns
  rl-training zoo run BENCHMARK       run it, or continue where it stopped
  rl-training zoo report BENCHMARK    compare measured with expected returns

BENCHMARK is a benchmark ({names}), a benchmark.yaml or its folder, or
one preset of a packaged benchmark ('rl-training presets' lists them).
"""
_NAMED = tyro.conf.arg(metavar="BENCHMARK")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Run a benchmark's presets with several seeds; if called again, run only what is missing."""

    benchmark: Annotated[str, tyro.conf.Positional, _NAMED]
    """A benchmark, a benchmark.yaml or its folder, or one preset of a packaged benchmark."""
    seeds: int | None = None
    """Number of seeds to run for every preset; unset: as many as the benchmark lists, usually 5."""
    scale: float = 1.0
    """Factor on the number of steps, for example 0.05 for a quick test."""
    processes: int | None = None
    """Number of parallel runs; unset: 1, with --engine ray as many as there are CPUs for."""
    engine: Literal["local", "ray"] = "local"
    """Where runs are executed: on this machine, or as tasks of a Ray cluster (RAY_ADDRESS; unset:
    one is started here)."""
    cpus_per_run: float | None = None
    """(--engine ray) CPUs that a run requests, and its number of torch threads; unset: 1."""
    retries: int | None = None
    """(--engine ray) How often a run whose process or machine was lost is resumed; unset: 2."""
    only: tuple[str, ...] = ()
    """Run only these presets, e.g. ppo/cartpole; unset: all."""
    output_dir: Path = Path("runs/zoo")
    """Output folder, with one folder per benchmark."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules that presets may import; without a value: any; unset: only Gymnasium and
    rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Compare the returns of a benchmark's runs with the expected ones."""

    benchmark: Annotated[str, tyro.conf.Positional, _NAMED]
    """A benchmark, a benchmark.yaml or its folder, or one preset of a packaged benchmark."""
    scale: float = 1.0
    """The --scale that it was run with."""
    output_dir: Path = Path("runs/zoo")
    """Output folder, with one folder per benchmark."""
    output: Path | None = None
    """File to write the results of every seed to, as JSON; unset: none."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArgs:
    """List benchmarks and their presets."""

    benchmark: Annotated[str | None, tyro.conf.Positional, _NAMED] = None
    """Benchmark to list; unset: all packaged ones."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """``rl-training zoo``."""
    if not args or args[0] in ("-h", "--help"):
        show_result(_HELP.format(names=", ".join(benchmark_names())))
        return 0
    commands = {"list": _list, "run": _run, "report": _report}
    if args[0] not in commands:
        raise UserError(f"unknown command 'zoo {args[0]}'.{did_you_mean(args[0], commands)}")
    return commands[args[0]](args[1:])


def _list(args: list[str]) -> int:
    text = HelpText("[BENCHMARK] [--json]")
    options: ListArgs = parse_flags(ListArgs, args, "rl-training zoo list", text)
    names = benchmark_names() if options.benchmark is None else [options.benchmark]
    listed = []
    for name in names:
        benchmark = load_benchmark(name)
        rows = [["preset", "steps", "seeds", "expected", "measured", "source of expected"]]
        kept = _kept(benchmark)
        rows += [_listed(benchmark, entry, kept) for entry in benchmark.entries]
        show_result(f"{_heading(benchmark)}\n{_table(rows)}\n\n")
        listed.append(_plain_benchmark(benchmark, kept))
    if options.json:
        show_result(json.dumps({"benchmarks": listed}) + "\n")
    return 0


def _plain_benchmark(benchmark: Benchmark, kept: Results | None) -> dict[str, Any]:
    presets = []
    for entry in benchmark.entries:
        measured = kept.of(entry.preset) if kept else None
        presets.append(
            {
                "preset": train_name(benchmark, entry),
                "steps": entry.steps,
                "seeds": list(entry.seeds),
                "expected": entry.expected,
                "source": entry.source.strip(),
                "measured": measured.mean if measured else None,
            }
        )
    return {"benchmark": benchmark.name, "title": benchmark.title.strip(), "presets": presets}


def _kept(benchmark: Benchmark) -> Results | None:
    try:
        return kept_results(benchmark)
    except RecursionError:
        folder = benchmark.path.parent
        raise ConfigError(f"the results in {folder} are nested too deeply: remove them") from None


def _heading(benchmark: Benchmark) -> str:
    return f"{one_line(benchmark.name)}: {benchmark.title.strip()}"


def _listed(benchmark: Benchmark, entry: Entry, kept: Results | None) -> list[str]:
    measured = kept.of(entry.preset) if kept else None
    figures = [entry.expected, measured.mean if measured else None]
    seeds = str(len(entry.seeds))
    if measured and not measured.is_whole:
        seeds = f"{len(measured.runs)} of {seeds}"
    name = one_line(train_name(benchmark, entry))
    return [name, f"{entry.steps:,}", seeds, *map(number, figures), entry.source.strip()]


def _run(args: list[str]) -> int:
    text = HelpText(
        "BENCHMARK [flags]",
        examples=(
            "rl-training zoo run classic --seeds 2 --scale 0.05  # short runs, as a test",
            "rl-training zoo run ppo/cartpole --processes 2  # one preset, five seeds",
            "RAY_ADDRESS=HOST:6379 rl-training zoo run classic --engine ray  # on a Ray cluster",
        ),
    )
    options: RunArgs = parse_flags(RunArgs, args, "rl-training zoo run", text)
    _require_valid(options)
    benchmark, chosen = find_benchmark(options.benchmark)
    for entry in benchmark.entries:
        settings = benchmark.config(entry).to_dict()
        require_trust(
            settings, trust_from_flag(options.trust_modules), benchmark.preset_file(entry)
        )
    jobs = plan(
        benchmark,
        options.output_dir,
        seeds=options.seeds,
        scale=options.scale,
        only=chosen_entries(benchmark, options.only) or chosen,
    )
    check_outputs(jobs, options.output_dir)
    runs = _runs(options)
    with contextlib.closing(runs), contextlib.closing(_View(len(jobs))) as view:
        ended, stopped = run_jobs(jobs, runs, view)
    failed = [outcome for outcome in ended if outcome.error is not None]
    done = [outcome for outcome in ended if outcome.job_status.status == "finished"]
    results = gather(benchmark, jobs, options.scale)
    show(f"{_heading(benchmark)}\n{_comparison(benchmark, results)}")
    for outcome in failed:
        say(f"failed: {outcome.job.name}: {outcome.error}")
    missing = len(jobs) - len(done)
    if missing:
        again = "repeat the command to run what is missing"
        say(f"{len(done)} of {len(jobs)} runs are finished; {again}")
    folder = jobs[0].folder.parent.parent
    show(f"page:  rl-training report {shlex.quote(str(folder))}\n")
    if options.json:
        counts = {"runs": len(jobs), "finished": len(done)}
        errors = [{"run": one.job.name, "error": str(one.error)} for one in failed]
        found = {"folder": str(folder), **counts, "failed": errors}
        show(json.dumps({**found, **_plain_results(benchmark, results)}) + "\n")
    return 1 if failed and not stopped else 0


def _require_valid(options: RunArgs) -> None:
    for name, value in (("seeds", options.seeds), ("processes", options.processes)):
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1; got {value}")
    if not options.scale > 0:
        raise UserError(f"--scale must be above 0; got {options.scale}")
    for name, given in (("cpus-per-run", options.cpus_per_run), ("retries", options.retries)):
        if given is not None and options.engine != "ray":
            raise UserError(f"--{name} needs --engine ray")
    if options.cpus_per_run is not None and not options.cpus_per_run > 0:
        raise UserError(f"--cpus-per-run must be above 0; got {options.cpus_per_run:g}")
    if options.retries is not None and options.retries < 0:
        raise UserError(f"--retries must not be negative; got {options.retries}")


def _runs(options: RunArgs) -> Runs:
    """Return what executes the runs."""
    if options.engine == "local":
        return LocalRuns(options.processes or 1, options.trust_modules)
    from rl_training.tools.zoo.ray_runs import RayRuns

    cpus = 1.0 if options.cpus_per_run is None else options.cpus_per_run
    retries = 2 if options.retries is None else options.retries
    return RayRuns(options.processes, cpus, retries, options.trust_modules)


def _report(args: list[str]) -> int:
    text = HelpText("BENCHMARK [flags]", examples=("rl-training zoo report classic",))
    options: ReportArgs = parse_flags(ReportArgs, args, "rl-training zoo report", text)
    benchmark, chosen = find_benchmark(options.benchmark)
    jobs = plan(benchmark, options.output_dir, scale=options.scale, only=chosen)
    results = gather(benchmark, jobs, options.scale)
    if not any(row.runs for row in results.presets):
        raise UserError(
            f"no finished run of {benchmark.name} under {jobs[0].folder.parent.parent}; start with:"
            f" rl-training zoo run {shlex.quote(options.benchmark)}"
        )
    show_result(f"{_heading(benchmark)}\n{_comparison(benchmark, results)}")
    if options.output is not None:
        write_results(options.output, results)
    if options.json:
        show_result(json.dumps(_plain_results(benchmark, results)) + "\n")
    return 0


def _plain_results(benchmark: Benchmark, results: Results) -> dict[str, Any]:
    return {
        "benchmark": benchmark.name,
        "scale": results.scale,
        "presets": [_plain_result(benchmark, row, results.scale) for row in results.presets],
    }


def _plain_result(benchmark: Benchmark, row: PresetResult, scale: float) -> dict[str, Any]:
    return {
        "preset": _shown_name(benchmark, row.preset),
        "steps": row.steps,
        "expected": row.expected,
        "mean": row.mean if row.runs else None,
        "returns": {str(run.seed): run.mean for run in row.runs},
        "verdict": row.verdict(scale),
    }


def _shown_name(benchmark: Benchmark, preset: str) -> str:
    entry = next(entry for entry in benchmark.entries if entry.preset == preset)
    return one_line(train_name(benchmark, entry))


def _comparison(benchmark: Benchmark, results: Results) -> str:
    """Return a table of measured and expected returns."""
    table = [["preset", "steps", "seeds", "mean", "lowest", "highest", "expected", ""]]
    for row in results.presets:
        spread = [row.mean, min(row.means), max(row.means)] if row.runs else [None] * 3
        table.append(
            [
                _shown_name(benchmark, row.preset),
                f"{row.steps:,}",
                f"{len(row.runs)} of {len(row.seeds)}",
                *map(number, spread),
                number(row.expected),
                row.verdict(results.scale),
            ]
        )
    return f"{_table(table)}\n"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numeric = {"steps", "mean", "lowest", "highest", "expected", "measured"}
    right = [name in numeric for name in rows[0]]
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join(f"  {line}" for line in lines)


class _View:
    """Shows running and ended jobs."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told: set[Job] = set()
        self._lines = LiveLines()
        self.close = self._lines.close

    def __call__(self, running: list[tuple[Job, int, float | None]], ended: list[Outcome]) -> None:
        for outcome in ended:
            if outcome.job not in self._told:
                self._told.add(outcome.job)
                self._lines.say(f"[{len(self._told)}/{self._total}] {_ending(outcome)}")
        self._lines.update([running_line(*one) for one in running])


def _ending(outcome: Outcome) -> str:
    now = outcome.job_status
    if outcome.error is not None:
        return f"{outcome.job.name}: failed at step {now.step:,}: {outcome.error}"
    if now.status != "finished":
        return f"{outcome.job.name}: stopped at step {now.step:,}"
    return f"{outcome.job.name}: {now.step:,} steps, return {number(now.latest_return)}"
