"""Ours beside other libraries: same settings, same machine, alternating rounds.

    python benchmarks/peers.py [--algorithms ppo dqn qrdqn sac td3 recurrent_ppo] [--rounds 5]
    python benchmarks/peers.py returns --algorithms ppo --seeds 1 2 3 [--steps 100000]
    python benchmarks/peers.py install

``speed`` (the default) prints steps per second of collecting and learning together: each
measurement is a process of its own, begins after a warm-up (random steps, first updates,
compilation) and lasts ``--seconds``. Without ``--rounds`` it makes as many rounds as end within
5 minutes. ``returns`` trains for equal numbers of steps and plays 20 episodes with the final
policy. Nothing is evaluated, logged or saved while time is measured, on any side.

Each library has a virtual environment of its own in ``--environments``, made when it is first
needed (minutes, not counted). A library that cannot be installed, or fails, is named in a line and
left out. `ours` and `single files` (`examples/`) use the Python that runs this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "peer_scripts"
DEFAULT_ENVIRONMENTS = ROOT / ".peers"
EPISODES = 20
LIMIT_SECONDS = 300.0
PATIENCE_SECONDS = 300.0
"""How long a measurement may take longer than asked for: start, warm-up, compilation."""


class Task(NamedTuple):
    """What an algorithm is measured on; settings have our names."""

    env_id: str
    num_envs: int
    settings: dict[str, Any]
    for_returns: dict[str, Any]
    """Settings that are different where returns are measured."""
    warmup: int
    """Steps before the clock starts; they include updates, so that everything is compiled."""
    steps: int
    """Steps of a run whose return is measured."""


_PPO = {
    "learning_rate": 1e-3,
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_coef": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
_CONTINUOUS = {
    "learning_rate": 3e-4,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
    "gamma": 0.99,
    "tau": 0.005,
    "hidden_sizes": [256, 256],
}
_DQN = {
    "learning_rate": 1e-3,
    "buffer_size": 10_000,
    "learning_starts": 1000,
    "batch_size": 128,
    "train_freq": 10,
    "gradient_steps": 1,
    "target_update_interval_steps": 500,
    "gamma": 0.99,
    "max_grad_norm": 10.0,
    # Constant, because random actions cost nothing: a schedule would make steps unequal.
    "exploration_fraction": 0.5,
    "exploration_initial_eps": 0.05,
    "exploration_final_eps": 0.05,
    "hidden_sizes": [120, 84],
}
_TD3 = {
    **_CONTINUOUS,
    "policy_delay": 2,
    "exploration_noise": 0.1,
    "target_policy_noise": 0.2,
    "target_noise_clip": 0.5,
}
TASKS = {
    "ppo": Task("CartPole-v1", 8, {**_PPO, "hidden_sizes": [64, 64]}, {}, 4096, 100_000),
    "dqn": Task("CartPole-v1", 1, _DQN, {"exploration_initial_eps": 1.0}, 3000, 50_000),
    "qrdqn": Task(
        "CartPole-v1",
        1,
        {**_DQN, "num_quantiles": 50},
        {"exploration_initial_eps": 1.0},
        3000,
        50_000,
    ),
    "sac": Task("HalfCheetah-v5", 1, _CONTINUOUS, {}, 1150, 30_000),
    "td3": Task("HalfCheetah-v5", 1, _TD3, {}, 1150, 30_000),
    "recurrent_ppo": Task(
        "CartPole-v1",
        8,
        {**_PPO, "hidden_sizes": [64], "lstm_size": 64, "sequence_length": 128},
        {},
        2048,
        100_000,
    ),
}


class Library(NamedTuple):
    """A library, how it is installed and which algorithms it is measured with."""

    title: str
    script: str
    algorithms: tuple[str, ...]
    environment: str = ""
    """Name of its virtual environment; empty: the Python that runs this script."""
    requirements: tuple[str, ...] = ()


_GYM = "gymnasium[mujoco]"
_SB3 = ("sb3", ("stable-baselines3==2.9.2", "sb3-contrib==2.9.2", _GYM))
_FEED_FORWARD = ("ppo", "dqn", "sac", "td3")
LIBRARIES = {
    "ours": Library("ours", "with_ours.py", tuple(TASKS)),
    "ours_compile": Library(
        "ours, acceleration: compile", "with_ours.py", (*_FEED_FORWARD, "qrdqn")
    ),
    "sb3": Library("Stable-Baselines3", "with_sb3.py", _FEED_FORWARD, *_SB3),
    "sb3_contrib": Library("sb3-contrib", "with_sb3.py", ("qrdqn", "recurrent_ppo"), *_SB3),
    "single_file": Library(
        "single files (examples/)", "with_single_file.py", (*_FEED_FORWARD, "recurrent_ppo")
    ),
    "tianshou": Library(
        "Tianshou", "with_tianshou.py", _FEED_FORWARD, "tianshou", ("tianshou==2.0.1", _GYM)
    ),
    "sbx": Library("SBX", "with_sb3.py", _FEED_FORWARD, "sbx", ("sbx-rl==0.28.0", _GYM)),
    "skrl": Library("skrl", "with_skrl.py", _FEED_FORWARD, "skrl", ("skrl==2.1.1", _GYM)),
}
BASELINES = ("sb3", "sb3_contrib")
"""Ratios are to the first of these that was measured."""
PINNED = ("torch==", "gymnasium==", "mujoco==", "mujoco-core==", "numpy==")
"""What all environments have in the same version, which `constraints.txt` states."""


class SkippedError(Exception):
    """A library cannot be measured; the message is one line."""


# -- virtual environments --------------------------------------------------------------------------


def one_line(output: str) -> str:
    """Return the last line of an error that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def python_of(library: Library, folder: Path, install: bool) -> str:
    """Return the Python of a library; make its environment if it is not complete."""
    if not library.environment:
        return sys.executable
    place = folder / library.environment
    python, record = place / "bin" / "python", place / "complete.txt"
    wanted = "\n".join(library.requirements)
    if record.is_file() and record.read_text() == wanted:
        return str(python)
    if not install:
        raise SkippedError(f"no complete environment in {place}")
    print(f"{library.title}: installing into {place}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    pins = place / "constraints.txt"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _command([sys.executable, "-m", "venv", str(place)])
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in constraints if line.startswith(PINNED)) + "\n")
    # torch first, so that nothing installed after it pulls another build of it.
    _command([*pip, "-c", str(pins), "torch"])
    _command([*pip, "-c", str(pins), *library.requirements])
    record.write_text(wanted)
    return str(python)


def _command(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SkippedError(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode:
        raise SkippedError(f"cannot be installed: {one_line(done.stderr)}")


def usable(names: Iterable[str], folder: Path, install: bool) -> dict[str, str]:
    """Return the Python of each library; print a line for each that is left out."""
    found = {}
    for name in names:
        try:
            found[name] = python_of(LIBRARIES[name], folder, install)
        except SkippedError as error:
            print(f"{LIBRARIES[name].title}: skipped: {error}", flush=True)
    return found


# -- measuring -------------------------------------------------------------------------------------


def child_environment(own: bool, threads: int) -> dict[str, str]:
    """Return the variables of a measurement's process, with the threads of torch and of JAX."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if own:
        variables["PYTHONPATH"] = str(ROOT / "src")
    variables |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    if threads:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")
        variables |= dict.fromkeys(names, str(threads))
        if threads == 1:  # NPROC is the size of XLA's thread pool
            variables["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return variables


def request_of(algo: str, name: str, threads: int, **more: Any) -> dict[str, Any]:
    """Return what the script of a library is asked for."""
    task = TASKS[algo]
    changes = task.for_returns if "steps" in more else {"warmup": task.warmup}
    warmup = changes.get("warmup", 0)
    settings = {**task.settings, **({} if warmup else changes)}
    return {
        "library": name,
        "algo": algo,
        "env_id": task.env_id,
        "num_envs": task.num_envs,
        "settings": settings,
        "threads": threads,
        "warmup": warmup,
        **more,
    }


def measure(python: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the script of a library in a process of its own; return its answer."""
    library = LIBRARIES[request["library"]]
    command = [python, str(SCRIPTS / library.script), json.dumps(request)]
    timeout = request["seconds"] + PATIENCE_SECONDS if "seconds" in request else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                timeout=timeout,
                env=child_environment(not library.environment, request["threads"]),
            )
        except OSError as error:
            raise SkippedError(f"cannot run {python}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise SkippedError(f"no answer within {timeout:.0f} s") from None
    if done.returncode:
        raise SkippedError(f"failed: {one_line(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class Table:
    """Measurements by algorithm and library."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._versions: set[str] = set()

    def add(self, algo: str, name: str, answer: dict[str, Any]) -> None:
        self.cells.setdefault(algo, {}).setdefault(name, []).append(answer)
        if name not in self._versions:
            self._versions.add(name)
            versions = ", ".join(f"{k} {v}" for k, v in answer["versions"].items())
            print(f"    ({LIBRARIES[name].title}: {versions})", flush=True)

    def column(self, algo: str, key: str) -> dict[str, list[float]]:
        """Return a figure of each library, all measurements."""
        rows = self.cells.get(algo, {})
        return {name: [answer[key] for answer in row] for name, row in rows.items()}


class Row(NamedTuple):
    """Speed of a library."""

    median: float
    lowest: float
    highest: float
    ratio: float | None
    """To the first of `BASELINES` that was measured."""
    count: int
    per_cpu_second: float
    """Steps per second of CPU time, median: other work on the machine distorts it less."""


def speed_rows(
    rates: Mapping[str, list[float]], cores: Mapping[str, list[float]]
) -> dict[str, Row]:
    """Return a row per library, the fastest first."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = next((medians[name] for name in BASELINES if name in medians), None)
    rows = {}
    for name in sorted(medians, key=lambda name: -medians[name]):
        values = rates[name]
        of_cpu = [rate / used for rate, used in zip(values, cores[name], strict=True)]
        ratio = None if base is None else medians[name] / base
        rows[name] = Row(
            medians[name], min(values), max(values), ratio, len(values), statistics.median(of_cpu)
        )
    return rows


def verdict(rows: Mapping[str, Row], ours: str = "ours") -> str:
    """Say where ours is: first, within noise of the first (ranges overlap), or behind it."""
    if ours not in rows:
        return ""
    others = {name: row for name, row in rows.items() if not name.startswith("ours")}
    if not others:
        return ""
    best = max(others, key=lambda name: others[name].median)
    title, mine = LIBRARIES[best].title, rows[ours]
    if mine.median >= others[best].median:
        return f"ours is first, {mine.median / others[best].median:.2f}x {title}"
    behind = f"{mine.median / others[best].median:.2f}x"
    if mine.highest >= others[best].lowest and min(mine.count, others[best].count) > 1:
        return f"ours is within noise of {title} ({behind})"
    return f"ours is behind {title} ({behind})"


def describe(algo: str, threads: int, returns: bool = False) -> str:
    """Return the settings of an algorithm in words."""
    task = TASKS[algo]
    settings = {**task.settings, **(task.for_returns if returns else {})}
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    of_threads = f"{threads} thread(s)" if threads else "threads as each library has it"
    return f"{algo} on {task.env_id}, {task.num_envs} environment(s), {of_threads}: {listed}"


def print_speed(table: Table, threads: int) -> None:
    for algo in table.cells:
        rows = speed_rows(table.column(algo, "steps_per_second"), table.column(algo, "cores"))
        print(f"\n{describe(algo, threads)}")
        print(
            f"{'':30s} {'steps/s':>9s} {'lowest':>9s} {'highest':>9s} {'rounds':>6s}"
            f" {'ratio':>7s} {'per CPU s':>10s}"
        )
        for name, row in rows.items():
            ratio = "" if row.ratio is None else f"{row.ratio:6.2f}x"
            print(
                f"{LIBRARIES[name].title:30s} {row.median:9,.0f} {row.lowest:9,.0f}"
                f" {row.highest:9,.0f} {row.count:6d} {ratio:>7s}"
                f" {row.per_cpu_second:10,.0f}"
            )
        print(verdict(rows), flush=True)


def speed(args: argparse.Namespace, pythons: dict[str, str], table: Table) -> None:
    """Measure round after round, every library of every algorithm once per round."""
    begin, failed = time.monotonic(), set[tuple[str, str]]()
    longest_round = 0.0
    for number in range(args.rounds) if args.rounds else itertools.count():
        started = time.monotonic()
        if not args.rounds and number and started - begin + longest_round > LIMIT_SECONDS:
            break
        for algo in args.algorithms:
            names = [n for n in pythons if algo in LIBRARIES[n].algorithms]
            shift = number % max(1, len(names))  # no library always follows the same one
            for name in names[shift:] + names[:shift]:
                if (algo, name) in failed:
                    continue
                if not args.rounds and time.monotonic() - begin > LIMIT_SECONDS - 15:
                    print(
                        f"{algo}, {LIBRARIES[name].title}: not measured: 5 minutes are over;"
                        " use --rounds or fewer --algorithms",
                        flush=True,
                    )
                    continue
                request = request_of(algo, name, args.threads, seconds=args.seconds)
                if not attempt(pythons[name], request, table, f"round {number + 1}, "):
                    failed.add((algo, name))
        longest_round = max(longest_round, time.monotonic() - started)


def attempt(python: str, request: dict[str, Any], table: Table, where: str = "") -> bool:
    """Measure and print one figure, or why there is none."""
    algo, name = request["algo"], request["library"]
    title = f"{where}{algo}, {LIBRARIES[name].title}"
    try:
        answer = measure(python, request)
    except SkippedError as error:
        print(f"{title}: skipped: {error}", flush=True)
        return False
    if "returns" in answer:
        mean = statistics.fmean(answer["returns"])
        print(f"{title}: return {mean:.1f} after {answer['seconds']:.0f} s", flush=True)
    else:
        print(
            f"{title}: {answer['steps_per_second']:,.0f} steps/s, {answer['cores']:.2f} cores used",
            flush=True,
        )
    table.add(algo, name, answer)
    return True


# -- returns ---------------------------------------------------------------------------------------


def mean_and_range(means: Sequence[float]) -> str:
    return f"{statistics.fmean(means):9.1f} {min(means):9.1f} {max(means):9.1f}"


def returns(args: argparse.Namespace, pythons: dict[str, str], table: Table) -> None:
    """Train every library with every seed; runs that are in the file are not repeated."""
    done: dict[str, Any] = {}
    if args.json and args.json.is_file():
        done = json.loads(args.json.read_text())["runs"]
    for seed in args.seeds:
        for algo in args.algorithms:
            steps = args.steps or TASKS[algo].steps
            for name, python in pythons.items():
                if algo not in LIBRARIES[name].algorithms:
                    continue
                request = request_of(
                    algo, name, args.threads, seed=seed, steps=steps, episodes=EPISODES
                )
                key = json.dumps(request, sort_keys=True)
                if key in done:
                    table.add(algo, name, done[key])
                elif attempt(python, request, table, f"seed {seed}, "):
                    done[key] = table.cells[algo][name][-1]
                    if args.json:
                        args.json.write_text(json.dumps({"runs": done}, indent=1) + "\n")


def print_returns(table: Table, threads: int) -> None:
    for algo, row in table.cells.items():
        print(f"\n{describe(algo, threads, returns=True)}")
        print(f"{'':30s} {'return':>9s} {'lowest':>9s} {'highest':>9s} {'seeds':>6s} {'s':>7s}")
        for name, answers in row.items():
            means = [statistics.fmean(answer["returns"]) for answer in answers]
            seconds = statistics.median(answer["seconds"] for answer in answers)
            print(
                f"{LIBRARIES[name].title:30s} {mean_and_range(means)} {len(means):6d}"
                f" {seconds:7.0f}",
                flush=True,
            )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        epilog="Expected time: speed 5 minutes, with --rounds about 4 minutes per round of all"
        " algorithms; returns about an hour per seed, mostly sac and td3.",
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("speed", "returns", "install"), default="speed")
    add("--algorithms", nargs="+", choices=TASKS, default=list(TASKS))
    usual = [name for name in LIBRARIES if name != "ours_compile"]
    add(
        "--libraries",
        nargs="+",
        choices=LIBRARIES,
        default=usual,
        help="default: all but ours_compile",
    )
    add("--rounds", type=int, default=0, help="default: as many as end within 5 minutes")
    add("--seconds", type=float, default=3.0, help="measured time of a speed (default 3)")
    add(
        "--threads",
        type=int,
        default=1,
        help="threads of torch and JAX (default 1); 0: as each library has it",
    )
    add("--seeds", type=int, nargs="+", default=[1], help="seeds of returns (default 1)")
    add(
        "--steps",
        type=int,
        default=0,
        help="steps of returns (default 30000 to 100000, by algorithm)",
    )
    add(
        "--environments",
        type=Path,
        default=DEFAULT_ENVIRONMENTS,
        help="folder of the libraries' virtual environments (default: .peers here)",
    )
    add("--no-install", action="store_true", help="leave out libraries that are not installed")
    add("--json", type=Path, help="write every measurement here; returns continue from it")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    wanted = [n for n in args.libraries if set(LIBRARIES[n].algorithms) & set(args.algorithms)]
    pythons = usable(wanted, args.environments.absolute(), not args.no_install)
    if args.what == "install":
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    for algo in args.algorithms:
        print(describe(algo, args.threads, args.what == "returns"), flush=True)
    table = Table()
    if args.what == "returns":
        returns(args, pythons, table)
        print_returns(table, args.threads)
        return
    try:
        speed(args, pythons, table)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print_speed(table, args.threads)
    if args.json:
        args.json.write_text(json.dumps({"speed": table.cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
