"""A queue of zoo runs that can be stopped and resumed at any time, also on another machine.

    python scripts/results_queue.py list                           what is unfinished, in order
    python scripts/results_queue.py run --folder DIR --processes 12 --minutes 28
    python scripts/results_queue.py pack --folder DIR --out OUT    what finished, in small files
    python scripts/results_queue.py merge PACK...                  into zoo/*/results.json

``run`` trains the unfinished (benchmark, preset, seed) in order, several at a time. Called again,
it resumes the runs that have a checkpoint in DIR and skips those that finished there or already
have a result. The package need not be installed: ``PYTHONPATH=src`` is enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime as dt
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_training._internal.coerce import build_dataclass
from rl_training._internal.flags import parse_flags
from rl_training._internal.yaml_io import load_yaml_file
from rl_training.config import TrainConfig, config_from_file, presets_dir
from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.runs import read_json, write_json
from rl_training.tools.zoo.jobs import Job, final_return, latest_row, plan
from rl_training.tools.zoo.manifest import Benchmark, benchmark_names, load_benchmark
from rl_training.tools.zoo.results import (
    RESULTS,
    FinishedRun,
    PresetResult,
    Results,
    differing_settings,
    kept_results,
    merge_runs,
    read_run,
    result_settings,
    write_results,
)

FAMILIES = ("mujoco", "atari", "box2d", "classic")
"""Order of benchmarks in the queue; others follow by name."""
FIRST_SEEDS = 3
"""All presets of a benchmark are run with this many seeds before further seeds."""
PACKED = ("metadata.json", "config.yaml", "summary.json", "metrics.jsonl")
POLICY = "policy.pt"
STARTS = "queue.json"
"""File beside a run folder with time, commit and hardware of each start of the run."""
LOG = "queue.log"
MAX_PART = 14 * 2**20
"""Largest packed file in bytes, a little below the limit of 15 MiB."""
MAX_PARTS = 7
"""Largest number of packed files, without the log."""
MAX_TOTAL = 56 * 2**20
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 180.0
"""Seconds that a run may take to save after the time limit, before it is killed."""
_KNOWN_SHARE = 0.1
"""Fraction of a run after which its speed is used to estimate the time of others."""
_MPS = "nvidia-cuda-mps-control"
_CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # many runs compile at once
    "MUJOCO_GL": "disable",  # nothing is drawn
}


# -- flags -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Selection of runs."""

    family: tuple[str, ...] = ()
    """Benchmarks by name, or paths of manifests; default: all packaged ones."""
    presets: tuple[str, ...] = ()
    """Presets of these benchmarks; default: all."""
    seeds: tuple[int, ...] = ()
    """Seeds among those of the manifest; default: all."""
    scale: float = 1.0
    """Fraction of the steps; 0.001 checks that everything works."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArgs(Choice):
    """List the runs without a result, in the order of the queue."""

    folder: Path | None = None
    """Folder of runs, to show the progress of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArgs(Choice):
    """Train the unfinished runs, in order."""

    folder: Path
    """Folder of the runs."""
    processes: int = 1
    """Number of runs at a time, each with one CPU thread."""
    minutes: float | None = None
    """Time limit, after which every run saves and stops; default: none."""
    must_finish: bool = False
    """Start only runs that would finish within --minutes, at the speed of earlier runs."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; default: that of the preset."""
    acceleration: Literal["eager", "compile", "cudagraph"] | None = None
    """Acceleration of updates; default: that of the preset."""
    mps: bool = False
    """Start CUDA's Multi-Process Service, so that runs use the GPU at the same time."""
    commit: str | None = None
    """Commit of the code; default: that of the current folder."""
    log_seconds: float = 60.0
    """Seconds between lines of progress in queue.log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackArgs(Choice):
    """Pack metrics, summary, settings and final policy of the finished runs."""

    folder: Path
    """Folder of the runs."""
    out: Path
    """Folder for the packed files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeArgs:
    """Merge packed runs into the results beside the manifests."""

    packs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Packed files, or folders that contain them."""
    family: tuple[str, ...] = ()
    """Benchmarks by name, or paths of manifests; default: all packaged ones."""
    extract: Path | None = None
    """Also extract the run folders, policies included, into this folder."""


# -- the runs of the queue -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of the queue."""

    benchmark: Benchmark
    job: Job

    @property
    def name(self) -> str:
        """Name for display."""
        return f"{self.benchmark.name}/{self.job.name}"

    @property
    def config(self) -> TrainConfig[Any]:
        """The config: the preset with this seed and number of steps."""
        preset = config_from_file(self.job.preset_file)
        return preset.with_overrides(seed=self.job.seed, total_timesteps=self.job.steps)


@dataclasses.dataclass(frozen=True)
class Found:
    """The state of a run on disk."""

    status: Literal["missing", "unfinished", "finished"]
    run_dir: Path | None = None


def families(names: Sequence[str]) -> list[Benchmark]:
    """Return the named benchmarks, or all packaged ones in the order of the queue."""
    packaged = sorted(benchmark_names(), key=lambda name: (_rank(name), name))
    return [load_benchmark(name) for name in names or packaged]


def _rank(name: str) -> int:
    return FAMILIES.index(name) if name in FAMILIES else len(FAMILIES)


def all_work(choice: Choice, folder: Path) -> list[Work]:
    """Return all selected runs, in order."""
    benchmarks = families(choice.family)
    _check_names(choice, benchmarks)
    ordered: list[Work] = []
    for benchmark in benchmarks:
        jobs = plan(benchmark, folder, scale=choice.scale)
        chosen = [
            Work(benchmark, job)
            for job in jobs
            if (not choice.presets or job.entry.preset in choice.presets)
            and (not choice.seeds or job.seed in choice.seeds)
        ]
        ordered += sorted(chosen, key=_is_later_seed)  # a stable sort keeps the manifest's order
    return ordered


def _is_later_seed(work: Work) -> bool:
    return work.job.entry.seeds.index(work.job.seed) >= FIRST_SEEDS


def _check_names(choice: Choice, benchmarks: Sequence[Benchmark]) -> None:
    if not choice.scale > 0:
        raise UserError(f"--scale must be above 0; got {choice.scale}")
    entries = [entry for benchmark in benchmarks for entry in benchmark.entries]
    known = {entry.preset for entry in entries}
    for name in choice.presets:
        if name not in known:
            raise UserError(
                f"no benchmark chosen has a preset {name!r}.{did_you_mean(name, known)}"
            )
    seeds = {seed for entry in entries for seed in entry.seeds}
    unknown = [seed for seed in choice.seeds if seed not in seeds]
    if unknown:
        raise UserError(f"--seeds: no manifest lists {unknown}; they list {sorted(seeds)}")


def without_result(works: Iterable[Work], scale: float) -> list[Work]:
    """Return the runs without a result for the current settings of their preset."""
    if scale != 1.0:
        return list(works)
    kept: dict[Path, Results | None] = {}
    left = []
    for work in works:
        path = work.benchmark.path
        if path not in kept:
            kept[path] = kept_results(work.benchmark)
        results = kept[path]
        own = results.of(work.job.entry.preset) if results else None
        seeds = {run.seed for run in own.runs} if own and _is_current(own, work) else set()
        if work.job.seed not in seeds:
            left.append(work)
    return left


def _is_current(own: PresetResult, work: Work) -> bool:
    return not differing_settings(own.settings, result_settings(work.config))


def look(work: Work) -> Found:
    """Read the state of a run from disk; a run that cannot be resumed counts as missing."""
    found = [_look(work, path.parent) for path in sorted(work.job.folder.glob("*/metadata.json"))]
    by_status = {one.status: one for one in found}
    return by_status.get("finished") or by_status.get("unfinished") or Found("missing")


def _look(work: Work, run_dir: Path) -> Found:
    config = config_from_file(run_dir / "config.yaml")
    differ = differing_settings(result_settings(config), result_settings(work.config))
    if differ:
        raise UserError(
            f"{run_dir} was run with other settings ({', '.join(differ)}): move it away, or choose"
            " another --folder"
        )
    if read_json(run_dir / "summary.json").get("status") == "finished":
        return Found("finished", run_dir)
    has_checkpoint = (run_dir / "checkpoints" / "last.pt").is_file()
    has_replay = (run_dir / "replay").is_dir() or not uses_replay(config)
    return Found("unfinished", run_dir) if has_checkpoint and has_replay else Found("missing")


def uses_replay(config: TrainConfig[Any]) -> bool:
    """Return whether a run needs its replay to be resumed."""
    from rl_training.algorithms.off_policy import OffPolicyConfig

    return isinstance(config.algo_kwargs, OffPolicyConfig)


# -- list ------------------------------------------------------------------------------------------


def list_command(args: list[str]) -> int:
    """``list``: print one line per run without a result."""
    options: ListArgs = parse_flags(ListArgs, args, "results_queue.py list")
    works = all_work(options, options.folder or Path())
    left = without_result(works, options.scale)
    for work in left:
        state = ""
        if options.folder is not None:
            found = look(work)
            step = latest_row(found.run_dir)[0] if found.run_dir else 0
            state = f": {found.status}, {step:,} of {work.job.steps:,} steps"
        sys.stdout.write(f"{work.name}{state}\n")
    sys.stdout.write(f"{len(left)} of {len(works)} runs have no result\n")
    return 0


# -- run -------------------------------------------------------------------------------------------


class QueueLog:
    """The log of the queue: one line per event, in a file and on standard output."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG

    def write(self, text: str) -> None:
        """Add a line."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {text}\n")
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


@dataclasses.dataclass
class Running:
    """A process that trains."""

    work: Work
    process: subprocess.Popen[bytes]
    first_step: int
    began: float

    def progress(self) -> tuple[int, float | None]:
        """Return the step and the latest training return."""
        runs = sorted(self.work.job.folder.glob("*/metrics.jsonl"))
        return latest_row(runs[-1].parent) if runs else (0, None)

    def speed(self, step: int) -> float:
        """Return the steps per second since the process was started."""
        return max(0, step - self.first_step) / max(1e-9, time.monotonic() - self.began)

    def line(self) -> str:
        """Return the progress as text."""
        step, latest = self.progress()
        total, speed = self.work.job.steps, self.speed(step)
        share, shown = min(1.0, step / total), "none yet" if latest is None else f"{latest:,.1f}"
        left = f", {(total - step) / speed / 60:.1f} min left" if speed > 0 else ""
        return (
            f"{self.work.name}: {step:,} of {total:,} steps ({share:.0%}), {speed:,.0f} steps/s,"
            f" return {shown}{left}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run by the queue."""

    at: str
    commit: str | None
    accelerator: str | None
    processes: int
    mps: bool


class Stop:
    """Counts SIGINT and SIGTERM."""

    count = 0

    def __call__(self, *_: Any) -> None:
        """Handle a signal."""
        self.count += 1


@contextlib.contextmanager
def stop_request() -> Iterator[Stop]:
    """Count signals instead of ending the process."""
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(args: list[str]) -> int:
    """``run``: train the unfinished runs, several at a time."""
    options: RunArgs = parse_flags(RunArgs, args, "results_queue.py run")
    if options.processes < 1:
        raise UserError(f"--processes must be at least 1; got {options.processes}")
    if options.minutes is not None and not options.minutes > 0:
        raise UserError(f"--minutes must be above 0; got {options.minutes}")
    if options.must_finish and options.minutes is None:
        raise UserError("--must-finish needs --minutes")
    works = without_result(all_work(options, options.folder), options.scale)
    waiting = [work for work in works if look(work).status != "finished"]
    log = QueueLog(options.folder)
    log.write(f"{len(waiting)} runs to do, {options.processes} at a time")
    with multi_process_service(options.folder, options.mps, log) as environment:
        queue = Queue(options, waiting, log, environment)
        queue.run()
    log.write(f"{queue.finished} finished, {queue.failed} failed, {queue.stopped} stopped")
    return 1 if queue.failed else 0


class Queue:
    """Starts runs, reports their progress, and stops them at the time limit."""

    def __init__(
        self, options: RunArgs, waiting: list[Work], log: QueueLog, environment: Mapping[str, str]
    ) -> None:
        self._options = options
        self._waiting = waiting
        self._log = log
        self._environment = {**_CHILD_ENVIRONMENT, **os.environ, **environment}
        self._running: list[Running] = []
        self._speeds: list[float] = []
        self._deadline = float("inf")
        self._asked = 0
        self._accelerator = accelerator_name() if options.device == "cuda" else None
        self._commit = options.commit or current_commit()
        self.finished = self.failed = self.stopped = 0

    def run(self) -> None:
        """Run until no runs are left, the time limit is reached, or a signal arrives."""
        began = time.monotonic()
        if self._options.minutes is not None:
            self._deadline = began + 60 * self._options.minutes
        next_lines = began + self._options.log_seconds
        with stop_request() as stop:
            while self._running or (self._waiting and not self._is_over(stop)):
                if not self._is_over(stop):
                    self._fill()
                wanted = self._urgency(stop)
                if wanted > self._asked:
                    self._asked = wanted
                    self._stop_all(hard=wanted > 1)
                self._collect_ended()
                if time.monotonic() >= next_lines:
                    next_lines = time.monotonic() + self._options.log_seconds
                    for one in self._running:
                        self._log.write(one.line())
                if self._running:
                    time.sleep(_POLL_SECONDS)

    def _is_over(self, stop: Stop) -> bool:
        return self._urgency(stop) > 0

    def _urgency(self, stop: Stop) -> int:
        """Return 0 to continue, 1 to save and stop, 2 to stop at once."""
        late = time.monotonic() - self._deadline
        return max(min(stop.count, 2), 2 if late > _GRACE_SECONDS else 1 if late >= 0 else 0)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._options.processes:
            work = self._waiting.pop(0)
            if self._fits(work):
                self._start(work)
            else:
                self._log.write(f"{work.name}: not started, it would not finish in the time left")

    def _fits(self, work: Work) -> bool:
        """Return whether a run is expected to finish before the time limit."""
        speeds = self._speeds + [
            one.speed(step)
            for one in self._running
            if (step := one.progress()[0]) - one.first_step > _KNOWN_SHARE * one.work.job.steps
        ]
        if not self._options.must_finish or not speeds:
            return True
        steps = work.job.steps - self._first_step(look(work))
        return steps / statistics.median(speeds) <= self._deadline - time.monotonic()

    @staticmethod
    def _first_step(found: Found) -> int:
        return latest_row(found.run_dir)[0] if found.run_dir else 0

    def _start(self, work: Work) -> None:
        found = look(work)
        work.job.folder.mkdir(parents=True, exist_ok=True)
        self._note_start(work)
        with (work.job.folder / "log.txt").open("ab") as file:
            process = subprocess.Popen(  # noqa: S603 - our own command
                train_command(work, found, self._options),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
        first = self._first_step(found)
        self._running.append(Running(work, process, first, time.monotonic()))
        self._log.write(f"{work.name}: started at step {first:,}")

    def _note_start(self, work: Work) -> None:
        start = Start(
            at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            commit=self._commit,
            accelerator=self._accelerator,
            processes=self._options.processes,
            mps="CUDA_MPS_PIPE_DIRECTORY" in self._environment,
        )
        path = work.job.folder / STARTS
        before = read_json(path).get("starts", [])
        write_json(path, {"format": 1, "starts": [*before, dataclasses.asdict(start)]})

    def _stop_all(self, *, hard: bool) -> None:
        self._log.write("stopping every run at once" if hard else "asking every run to save")
        for one in self._running:
            with contextlib.suppress(ProcessLookupError):
                if hard:
                    one.process.kill()
                else:
                    one.process.terminate()

    def _collect_ended(self) -> None:
        for one in [one for one in self._running if one.process.poll() is not None]:
            self._running.remove(one)
            step, found = one.progress()[0], look(one.work)
            if found.status == "finished" and found.run_dir is not None:
                self.finished += 1
                self._speeds.append(one.speed(step))
                metrics = read_json(found.run_dir / "summary.json").get("metrics", {})
                self._log.write(f"{one.work.name}: finished, return {final_return(metrics)}")
            elif self._asked:
                self.stopped += 1
                self._log.write(f"{one.work.name}: stopped at step {step:,}")
            else:
                self.failed += 1
                self._log.write(f"{one.work.name}: failed: {_last_line(one.work.job.folder)}")


def train_command(work: Work, found: Found, options: RunArgs) -> list[str]:
    """Return the command that starts or resumes a run."""
    program = [sys.executable, "-m", "rl_training.cli"]
    if found.run_dir is not None:
        return [*program, "resume", "--checkpoint", str(found.run_dir)]
    job = work.job
    words = [*program, "train", "--config", str(job.preset_file), "--seed", str(job.seed)]
    words += ["--total-timesteps", str(job.steps), "--output-dir", str(job.folder)]
    words += ["--torch-threads", "1", "--no-progress", "--no-tensorboard"]
    if options.device is not None:
        words += ["--device", options.device]
    if options.acceleration is not None:
        words += ["--acceleration", options.acceleration]
    return words


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM, at which a run saves, when the queue's process ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _last_line(folder: Path) -> str:
    path = folder / "log.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no output'} (see {path})"


def current_commit() -> str | None:
    """Return the commit checked out in the current folder; None outside a repository."""
    return _output(["git", "rev-parse", "HEAD"])


def accelerator_name() -> str | None:
    """Return the name of the first NVIDIA GPU; None if there is none."""
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return names.splitlines()[0] if names else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


@contextlib.contextmanager
def multi_process_service(folder: Path, wanted: bool, log: QueueLog) -> Iterator[dict[str, str]]:
    """Run CUDA's Multi-Process Service; yield environment variables for runs, empty without it."""
    control = shutil.which(_MPS) if wanted else None
    if control is None:
        if wanted:
            log.write(f"{_MPS} is not installed: the runs take turns on the GPU")
        yield {}
        return
    place = str((folder / "mps").resolve())
    Path(place).mkdir(parents=True, exist_ok=True)
    variables = {"CUDA_MPS_PIPE_DIRECTORY": place, "CUDA_MPS_LOG_DIRECTORY": place}
    environment = {**os.environ, **variables}
    subprocess.run([control, "-d"], env=environment, check=False)  # noqa: S603 - our own command
    if not _gpu_answers(environment):
        _quit_mps(control, environment)
        log.write("CUDA MPS does not work here: the runs take turns on the GPU")
        yield {}
        return
    log.write("CUDA MPS is running")
    try:
        yield variables
    finally:
        _quit_mps(control, environment)


def _quit_mps(control: str, environment: Mapping[str, str]) -> None:
    subprocess.run([control], input=b"quit\n", env=environment, check=False)  # noqa: S603


def _gpu_answers(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these environment variables can compute on the GPU."""
    code = "import torch; torch.ones(8, device='cuda').sum().item()"
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-c", code],
            env=environment,
            timeout=120,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


# -- pack ------------------------------------------------------------------------------------------


def pack_command(args: list[str]) -> int:
    """``pack``: pack finished runs into a few small files."""
    options: PackArgs = parse_flags(PackArgs, args, "results_queue.py pack")
    options.out.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, bytes]] = []
    for work in all_work(options, options.folder):
        try:
            found = look(work)
        except (UserError, ConfigError) as error:
            sys.stderr.write(f"left out: {work.name}: {error}\n")
            continue
        if found.status == "finished" and found.run_dir is not None:
            files.append(packed_run(work, found.run_dir, options.folder))
    parts, left_out = split(files)
    for number, part in enumerate(parts, start=1):
        path = options.out / f"results-{number}.tar.gz"
        path.write_bytes(part)
        sys.stdout.write(f"{path}: {len(part) / 2**20:.1f} MiB\n")
    log = options.folder / LOG
    if log.is_file():
        shutil.copyfile(log, options.out / LOG)
    for name in left_out:
        sys.stderr.write(f"left out, no room: {name}\n")
    sys.stdout.write(f"{len(files) - len(left_out)} runs packed\n")
    return 1 if left_out else 0


def packed_run(work: Work, run_dir: Path, folder: Path) -> dict[str, bytes]:
    """Return the files of a run to pack, by their names in the archive."""
    place = run_dir.relative_to(folder).as_posix()
    files = {f"{place}/{name}": (run_dir / name).read_bytes() for name in PACKED}
    files[f"{place}/{POLICY}"] = policy_file(run_dir)
    starts = work.job.folder / STARTS
    if starts.is_file():
        name = starts.relative_to(folder).as_posix()
        files[name] = starts.read_bytes()
    return files


def policy_file(run_dir: Path) -> bytes:
    """Return the last checkpoint without training state: it can be evaluated, not resumed.

    Optimizer moments and target networks are zeros, of the shapes that loading expects.
    """
    from rl_training.checkpointing import load_checkpoint, save_checkpoint

    state = load_checkpoint(run_dir / "checkpoints" / "last.pt")
    state.pop("training", None)
    state["algorithm"] = {
        key: value if key == "model" else _zeros(value) for key, value in state["algorithm"].items()
    }
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / POLICY
        save_checkpoint(path, state)
        return path.read_bytes()


def _zeros(value: Any) -> Any:
    """Return the structure with floating-point numbers set to zero; generators are unchanged."""
    import torch

    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _zeros(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_zeros(item) for item in value]
    return value


def split(
    runs: Sequence[Mapping[str, bytes]], max_part: int = MAX_PART, max_parts: int = MAX_PARTS
) -> tuple[list[bytes], list[str]]:
    """Return compressed archives below a size, and the names of runs that did not fit."""
    groups: list[list[Mapping[str, bytes]]] = []
    sizes: list[int] = []
    left_out = []
    for run in runs:
        # Size of a file in an archive: its compressed bytes and a header.
        size = sum(len(zlib.compress(content, 6)) + 1024 for content in run.values())
        if groups and sizes[-1] + size <= max_part and sum(sizes) + size <= MAX_TOTAL:
            groups[-1].append(run)
            sizes[-1] += size
        elif size <= max_part and len(groups) < max_parts and sum(sizes) + size <= MAX_TOTAL:
            groups.append([run])
            sizes.append(size)
        else:
            left_out.append(str(Path(next(iter(run))).parent))
    return [_archive(group) for group in groups], left_out


def _archive(runs: Sequence[Mapping[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name, content in (item for run in runs for item in run.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


# -- merge -----------------------------------------------------------------------------------------


def merge_command(args: list[str]) -> int:
    """``merge``: add packed runs to the results beside the manifests."""
    options: MergeArgs = parse_flags(MergeArgs, args, "results_queue.py merge")
    benchmarks = families(options.family)
    with contextlib.ExitStack() as stack:
        place = options.extract
        if place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for path in pack_files(options.packs):
            extract(path, place)
        for benchmark in benchmarks:
            merge_benchmark(benchmark, place)
    return 0


def pack_files(given: Sequence[Path]) -> list[Path]:
    """Return packed files, given their paths or folders."""
    found: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*.tar.gz")) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path} contains no packed runs (*.tar.gz)")
        found += inside
    return found


def extract(path: Path, place: Path) -> None:
    """Unpack an archive into ``place``; paths outside of it are refused."""
    try:
        with tarfile.open(path) as archive:
            archive.extractall(place, filter="data")
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be unpacked: {error}") from None


def merge_benchmark(benchmark: Benchmark, place: Path) -> None:
    """Add the finished runs of a benchmark to its results, and print what changed."""
    runs = [run for job in plan(benchmark, place) if (run := _finished(benchmark, job)) is not None]
    if not runs:
        return
    merge = merge_runs(benchmark, kept_results(benchmark), runs)
    for name in merge.replaced:
        sys.stdout.write(f"replaced: {benchmark.name}/{name}: earlier results, other settings\n")
    for run in merge.ignored:
        seed = run.result.seed
        sys.stdout.write(f"ignored: {benchmark.name}/{run.preset} seed {seed} has a result\n")
    for run in merge.added:
        one = run.result
        sys.stdout.write(f"added: {benchmark.name}/{run.preset} seed {one.seed}: {one.mean:,.1f}\n")
    write_results(benchmark.path.parent / RESULTS, merge.results)
    for name in dict.fromkeys(run.preset for run in merge.added):
        own = merge.results.of(name)
        if own is not None:
            update_preset(benchmark, own)


def _finished(benchmark: Benchmark, job: Job) -> FinishedRun | None:
    """Return a finished run of the current preset, with commit and GPU of the queue's records."""
    found = look(Work(benchmark, job))
    if found.status != "finished" or found.run_dir is None:
        return None
    starts = [
        build_dataclass(Start, one, f"{job.folder / STARTS}: starts")
        for one in read_json(job.folder / STARTS).get("starts", [])
    ]
    commits = list(dict.fromkeys(one.commit for one in starts if one.commit))
    accelerators = list(dict.fromkeys(one.accelerator for one in starts if one.accelerator))
    return read_run(
        benchmark,
        job.entry,
        found.run_dir,
        commit=", ".join(commits) or None,
        accelerator=", ".join(accelerators) or None,
    )


def update_preset(benchmark: Benchmark, own: PresetResult) -> None:
    """Write a result into its preset file in ``configs/``, if the zoo runs it unchanged."""
    content = load_yaml_file(benchmark.path.parent / f"{own.preset}.yaml")
    if set(content) - {"format"} != {"preset"}:
        return
    path = presets_dir() / f"{content['preset']}.yaml"
    if not path.is_file():
        return
    settings, block = path.read_text(encoding="utf-8"), result_block(own, benchmark.name)
    before = re.split(r"^(?:verified|partial):\n", settings, maxsplit=1, flags=re.MULTILINE)[0]
    path.write_text(before + block, encoding="utf-8")
    sys.stdout.write(f"updated: {path.relative_to(presets_dir())}\n")


def result_block(own: PresetResult, benchmark: str) -> str:
    """Return the YAML of a preset's result; ``partial:`` if seeds are missing."""
    episodes = own.runs[0].episodes
    reached = f"{own.summary()}, final policy, deterministic, {episodes} episodes a seed"
    return (
        f"{'verified' if own.is_whole else 'partial'}:\n"
        f"  steps: {own.runs[0].steps}\n"
        f"  seeds: {[run.seed for run in own.runs]}\n"
        f"  return: {json.dumps(reached)}\n"
        f"  command: {json.dumps(own.command(benchmark))}\n"
    )


COMMANDS = {
    "list": list_command,
    "run": run_command,
    "pack": pack_command,
    "merge": merge_command,
}


def main(args: list[str]) -> int:
    """Run the command line."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return 0
    if args[0] not in COMMANDS:
        hint = did_you_mean(args[0], COMMANDS)
        sys.stderr.write(f"error: unknown command {args[0]!r}.{hint}\n")
        return 2
    try:
        return COMMANDS[args[0]](args[1:])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
