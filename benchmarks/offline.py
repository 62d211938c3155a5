"""BC, TD3+BC, IQL and CQL against d3rlpy 2.8.1: scores on the same data, and updates per second.

    python benchmarks/offline.py scores --dataset ID... --updates 20000 --out FILE.json
    python benchmarks/offline.py report FILE.json... [--expert-return Pendulum-v1=-150]
    python benchmarks/offline.py speed --dataset ID [--device cuda --acceleration cudagraph]

d3rlpy needs an environment of its own, whose Python is given by --peer-python:

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 d3rlpy==2.8.1 h5py

It may also be a script that sets PYTHONPATH for d3rlpy alone and runs another Python.

``scores`` trains both sides on every dataset with several seeds, each run in its own process, and
evaluates the last policy: deterministic, 20 episodes, with the same function and the same seeds on
both sides. The policy of d3rlpy is rebuilt from its weights (`PeerPolicy`) and compared with
d3rlpy's own actions. Ours is also trained by BC on the tenth of the episodes with the highest
returns. Runs that are in the file are skipped, so that the same command continues after an
interruption; with --work it also continues the runs that were interrupted. ``report`` prints
scores in percent of the way from the return of uniform actions (0) to that of the expert (100).
``speed`` measures rounds of updates, batches included, that alternate between contenders after a
warm-up; medians count. Leave the machine idle meanwhile.

Equal on both sides: the HDF5 file, network widths, ReLU, Adam, batch size, learning rates, discount
factor, target networks, number of updates, standardised observations, actions in [-1, 1] and the
constants of each algorithm (`ALGOS`, written into the file). Different in kind:

- d3rlpy never samples the last transition of a truncated episode (see `offline_peer.py`);
- d3rlpy adds 0.001 to the standard deviation of observations; ours clips to 10 deviations;
- IQL: the policy's standard deviation does not depend on the observation. d3rlpy passes its
  parameter through a sigmoid onto log-deviations from -5 to 2, ours is clipped to that range; both
  start at -1.5;
- TD errors: ours is half the squared error in TD3+BC and IQL, which Adam's step hardly depends on;
- CQL: ours steps the temperature with the policy, at the policy's rate (d3rlpy: an optimizer of its
  own at the same rate, before the policy), and its loss is linear in the temperature's logarithm,
  d3rlpy's in the temperature;
- TD3+BC: the policy is updated in every second update, d3rlpy's in the first of two.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PEER_VERSION = "2.8.1"
PEER_SCRIPT = Path(__file__).with_name("offline_peer.py")
HIDDEN_SIZES = (256, 256)
EPISODES = 20
FIRST_EVALUATION_SEED = 20_000_000
"""Seeds of the evaluation's environments, far from those of any run or dataset."""
POLICY_TOLERANCE = 1e-5
LEAST_MEAN_DIFFERENCE = -2.0
"""Bar: mean over datasets of ours - d3rlpy, in points."""
LEAST_SPEED = {"cpu": 1.3, "cuda": 4.0}
"""Bar: updates per second in units of d3rlpy's."""
CHECKPOINT_INTERVAL = 10_000
"""Updates of ours between checkpoints, from which a run that was interrupted continues."""
ROUND = 500
"""Updates of a round of ours, and of its warm-up: one iteration of an offline run."""


class Algorithm(NamedTuple):
    """An algorithm with its settings by the names of each side."""

    name: str
    ours: dict[str, Any]
    peer: dict[str, Any] | None
    """None: only ours is trained."""


_BATCH = {"batch_size": 256}
_VALUES = {**_BATCH, "gamma": 0.99, "tau": 0.005}
_PEER_RATES = {"actor_learning_rate": 3e-4, "critic_learning_rate": 3e-4}

ALGOS = {
    "bc": Algorithm(
        "bc",
        {**_BATCH, "learning_rate": 1e-3},
        {**_BATCH, "learning_rate": 1e-3, "policy_type": "deterministic"},
    ),
    "bc_10": Algorithm("bc", {**_BATCH, "learning_rate": 1e-3, "top_fraction": 0.1}, None),
    "td3_bc": Algorithm(
        "td3_bc",
        {
            **_VALUES,
            "learning_rate": 3e-4,
            "alpha": 2.5,
            "policy_delay": 2,
            "target_policy_noise": 0.2,
            "target_noise_clip": 0.5,
        },
        {
            **_VALUES,
            **_PEER_RATES,
            "alpha": 2.5,
            "update_actor_interval": 2,
            "target_smoothing_sigma": 0.2,
            "target_smoothing_clip": 0.5,
        },
    ),
    "iql": Algorithm(
        "iql",
        {
            **_VALUES,
            "learning_rate": 3e-4,
            "expectile": 0.7,
            "inverse_temperature": 3.0,
            "max_weight": 100.0,
            "log_std_init": -1.5,
        },
        {**_VALUES, **_PEER_RATES, "expectile": 0.7, "weight_temp": 3.0, "max_weight": 100.0},
    ),
    "cql": Algorithm(
        "cql",
        {
            **_VALUES,
            "learning_rate": 3e-4,
            "actor_learning_rate": 1e-4,
            "conservative_weight": 5.0,
            "num_action_samples": 10,
            "soft_backup": False,
            "ent_coef_init": 1.0,
        },
        {
            **_VALUES,
            "critic_learning_rate": 3e-4,
            "actor_learning_rate": 1e-4,
            "temp_learning_rate": 1e-4,
            "alpha_learning_rate": 0.0,
            "initial_alpha": 1.0,
            "initial_temperature": 1.0,
            "conservative_weight": 5.0,
            "n_action_samples": 10,
            "soft_q_backup": False,
        },
    ),
}
COMPARED = tuple(name for name, algorithm in ALGOS.items() if algorithm.peer is not None)
TITLES = {"bc": "BC", "bc_10": "10%-BC", "td3_bc": "TD3+BC", "iql": "IQL", "cql": "CQL"}


def settings_table() -> dict[str, Any]:
    """Return the settings of both sides, as they are written into the file."""
    return {
        "hidden_sizes": list(HIDDEN_SIZES),
        "peer": f"d3rlpy {PEER_VERSION}",
        **{
            name: {"ours": algorithm.ours, "peer": algorithm.peer}
            for name, algorithm in ALGOS.items()
        },
    }


class Cell(NamedTuple):
    """One training run."""

    dataset: str
    algo: str
    side: str
    seed: int
    updates: int


# -- evaluation ------------------------------------------------------------------------------------

Act = Callable[[Any], Any]
"""From observations, one row per environment, to actions in the range of the environment."""


def evaluate(act: Act, env_id: str) -> list[float]:
    """Return the returns of `EPISODES` episodes, each of an environment with its own seed."""
    import gymnasium as gym

    envs = [gym.make(env_id) for _ in range(EPISODES)]
    obs = np.stack([env.reset(seed=FIRST_EVALUATION_SEED + i)[0] for i, env in enumerate(envs)])
    returns, playing = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while playing.any():
        actions = act(obs)
        for i in np.flatnonzero(playing):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += float(reward)
            playing[i] = not (terminated or truncated)
    for env in envs:
        env.close()
    return [float(one) for one in returns]


def random_return(env_id: str) -> float:
    """Return the mean return of uniform actions."""
    import gymnasium as gym

    env = gym.make(env_id)
    space: Any = env.action_space
    env.close()
    generator = np.random.default_rng(FIRST_EVALUATION_SEED)
    shape = (EPISODES, *space.shape)
    returns = evaluate(
        lambda _: generator.uniform(space.low, space.high, shape).astype(space.dtype), env_id
    )
    return statistics.fmean(returns)


class PeerPolicy:
    """The deterministic policy that d3rlpy trained, rebuilt from its weights."""

    def __init__(self, file: Path, low: Any, high: Any) -> None:
        with np.load(file) as arrays:
            self._arrays = {name: arrays[name] for name in arrays.files}
        self._low, self._high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        off = float(
            np.abs(self.scaled_actions(self._arrays["obs"]) - self._arrays["actions"]).max()
        )
        if not off <= POLICY_TOLERANCE:
            raise RuntimeError(f"{file}: actions differ from those of d3rlpy by up to {off}")

    def scaled_actions(self, obs: Any) -> Any:
        """Return actions in [-1, 1]."""
        arrays = self._arrays
        x = ((obs - arrays["shift"]) * arrays["scale"]).astype(np.float32)
        last = int(arrays["layers"]) - 1
        for i in range(last + 1):
            x = x @ arrays[f"weight{i}"].T + arrays[f"bias{i}"]
            x = np.tanh(x) if i == last else np.maximum(x, 0)
        return x

    def __call__(self, obs: Any) -> Any:
        """Return actions in the range of the environment."""
        half = (self._high - self._low) / 2
        return self._low + (self.scaled_actions(obs) + 1) * half


# -- child processes -------------------------------------------------------------------------------


def run_child(request: dict[str, Any]) -> None:
    """Do what the parent process asks for in a request."""
    kind: str = request["kind"]
    {"train": train_child, "evaluate": evaluate_child, "speed": speed_child}[kind](request)


def our_model(request: dict[str, Any], updates: int, **settings: Any) -> Any:
    """Return an algorithm of ours before training."""
    from rl_training.api import managed_class

    return managed_class(request["algo"])(
        dataset=request["dataset"],
        env_id="",  # no environment is needed to learn: the policy is evaluated here
        eval_episodes=0,
        normalize_obs=True,
        seed=request["seed"],
        total_updates=updates,
        device=request["device"],
        acceleration=request["acceleration"],
        torch_threads=request["threads"],
        progress=False,
        tensorboard=False,
        hidden_sizes=HIDDEN_SIZES,
        activation="relu",
        **request["settings"],
        **settings,
    )


def train_child(request: dict[str, Any]) -> None:
    """Train ours, or finish its training, and evaluate it."""
    folder = Path(request["folder"])
    run = folder / "run"
    is_new = not run.exists()
    started = time.perf_counter()
    model = trained(request, run)
    seconds = time.perf_counter() - started if is_new else None

    def act(obs: Any) -> Any:
        return model.predict(obs, deterministic=True)[0]

    returns = evaluate(act, request["env_id"])
    write_json(folder / "cell.json", {"returns": returns, "seconds": seconds})


def trained(request: dict[str, Any], run: Path) -> Any:
    """Return a trained model of ours, from a run folder where there is one."""
    from rl_training.api import managed_class

    if not (run / "checkpoints" / "last.pt").exists():
        shutil.rmtree(run, ignore_errors=True)
        model = our_model(request, request["updates"], checkpoint_interval=CHECKPOINT_INTERVAL)
        model.learn(run_dir=run)
        return model
    model = managed_class(request["algo"]).load(run, trust=True)
    summary = run / "summary.json"
    if not (summary.exists() and read_json(summary).get("status") == "finished"):
        model.learn()
    return model


def evaluate_child(request: dict[str, Any]) -> None:
    """Evaluate the policy that d3rlpy trained."""
    folder = Path(request["folder"])
    policy = PeerPolicy(folder / "policy.npz", request["low"], request["high"])
    returns = evaluate(policy, request["env_id"])
    write_json(folder / "cell.json", {"returns": returns, **read_json(folder / "trained.json")})


def speed_child(request: dict[str, Any]) -> None:
    """Train ours: a round of updates for every line of standard input, after a warm-up."""
    import torch

    from rl_training.runtime.callbacks import Callback, IterationEnd

    class Rounds(Callback):
        started: float | None = None

        def on_iteration(self, trainer: Any, event: IterationEnd) -> bool:
            if request["device"] == "cuda":
                torch.cuda.synchronize()
            rate = "ready"
            if self.started is not None:
                count = event.step - event.previous_step
                rate = str(count / (time.perf_counter() - self.started))
            print(f"@{rate}", flush=True)
            more = bool(sys.stdin.readline())
            self.started = time.perf_counter()
            return more

    run = Path(request["folder"]) / "run"
    most = 1_000_000 * ROUND  # the end of standard input ends the run
    our_model(request, most).learn(run_dir=run, callbacks=[Rounds()])


# -- requests --------------------------------------------------------------------------------------


class Data(NamedTuple):
    """What the runs need to know of a dataset."""

    name: str
    env_id: str
    file: str
    low: list[float]
    high: list[float]

    @classmethod
    def of(cls, name: str) -> Data:
        """Read the metadata of a dataset."""
        from rl_training.datasets.reading import open_dataset

        dataset = open_dataset(name)
        space: Any = dataset.action_space
        if dataset.env_id is None or not hasattr(space, "low"):
            sys.exit(f"{name} names no environment, or its actions are not of a Box")
        file = str(dataset.path.resolve() / "data" / "main_data.hdf5")
        return cls(name, dataset.env_id, file, space.low.tolist(), space.high.tolist())


def data_facts(data: Data) -> dict[str, Any]:
    """Return what the report needs to know of a dataset, its mean return and that of chance."""
    from rl_training.datasets.reading import open_dataset

    dataset = open_dataset(data.name)
    parts = set(dataset.cut_episodes)
    returns = [one.ret for one in dataset.episodes() if one.index not in parts]
    return {
        "env_id": data.env_id,
        "episodes": dataset.total_episodes,
        "transitions": dataset.total_steps,
        "digest": dataset.digest(),
        "mean_return": statistics.fmean(returns),
        "random_return": random_return(data.env_id),
    }


def our_request(data: Data, algo: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "algo": ALGOS[algo].name,
        "settings": ALGOS[algo].ours,
        "dataset": data.name,
        "env_id": data.env_id,
        "device": args.device,
        "acceleration": args.acceleration,
        "threads": args.threads,
        "seed": 1,
    }


def peer_request(data: Data, algo: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "version": PEER_VERSION,
        "algo": ALGOS[algo].name,
        "settings": ALGOS[algo].peer,
        "hidden_sizes": HIDDEN_SIZES,
        "data": data.file,
        "low": data.low,
        "high": data.high,
        "device": args.device,
        "threads": args.threads,
        "compile": False,
        "seed": 1,
    }


def our_command(request: Path) -> list[str]:
    return [sys.executable, __file__, "child", str(request)]


def peer_command(args: argparse.Namespace, request: Path) -> list[str]:
    return [args.peer_python, str(PEER_SCRIPT), str(request)]


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as a whole or not at all."""
    whole = path.with_name(f".{path.name}.tmp")
    whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


# -- scores ----------------------------------------------------------------------------------------


class Results:
    """The results file: every run that is finished."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.content: dict[str, Any] = {"settings": settings_table(), "datasets": {}, "cells": []}
        if path.exists():
            found = read_json(path)
            if found["settings"] != json.loads(json.dumps(self.content["settings"])):
                sys.exit(f"{path} was made with other settings: choose another file")
            self.content = found

    def finished(self) -> set[Cell]:
        return {cell_of(one) for one in self.content["cells"]}

    def add_dataset(self, data: Data) -> None:
        """Add the facts of a dataset; refuse another one under the same name."""
        facts = data_facts(data)
        known = self.content["datasets"].setdefault(data.name, facts)
        if known["digest"] != facts["digest"]:
            sys.exit(f"{self._path} contains results of another dataset named {data.name}")
        write_json(self._path, self.content)

    def add(self, cell: Cell, measured: Mapping[str, Any]) -> None:
        with self._lock:
            self.content["cells"].append({**cell._asdict(), **measured})
            write_json(self._path, self.content)


def cell_of(entry: Mapping[str, Any]) -> Cell:
    return Cell(*(entry[name] for name in Cell._fields))


def wanted_cells(args: argparse.Namespace) -> list[Cell]:
    """Return the runs of a comparison, seed by seed."""
    algos = [*args.algos, *(["bc_10"] if "bc" in args.algos else [])]
    return [
        Cell(dataset, algo, side, seed, args.updates)
        for seed in range(1, args.seeds + 1)
        for dataset in args.dataset
        for algo in algos
        for side in (("ours",) if ALGOS[algo].peer is None else ("ours", "peer"))
    ]


class Children:
    """Child processes, which are killed when the parent ends."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()

    def run(self, command: Sequence[str], output: Path) -> None:
        """Run a command; raise with the end of its output where it failed."""
        with output.open("ab") as stream:
            child = subprocess.Popen(command, stdout=stream, stderr=stream)
        self._running.add(child)
        code = child.wait()
        self._running.discard(child)
        if code:
            tail = output.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"exit code {code}: {' '.join(command)}\n{tail}")

    def kill(self) -> None:
        for child in tuple(self._running):
            child.kill()


def train_cell(cell: Cell, data: Data, args: argparse.Namespace, children: Children) -> Any:
    """Train and evaluate one run; return what was measured."""
    name = "-".join(map(str, cell)).replace("/", "_")
    folder = Path(args.work).resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    request, output = folder / "request.json", folder / "output.txt"
    own = {"seed": cell.seed, "updates": cell.updates, "folder": str(folder)}
    if cell.side == "ours":
        write_json(request, {**our_request(data, cell.algo, args), **own, "kind": "train"})
        children.run(our_command(request), output)
    else:
        asked = {**peer_request(data, cell.algo, args), **own, "compile": args.peer_compile}
        write_json(request, asked)
        if not (folder / "trained.json").exists():
            children.run(peer_command(args, request), output)
        write_json(request, {**asked, "env_id": data.env_id, "kind": "evaluate"})
        children.run(our_command(request), output)
    measured = read_json(folder / "cell.json")
    shutil.rmtree(folder)
    how = {"device": args.device, "threads": args.threads}
    how |= (
        {"acceleration": args.acceleration}
        if cell.side == "ours"
        else {"compile": args.peer_compile}
    )
    return {**measured, **how}


def run_scores(args: argparse.Namespace) -> int:
    results = Results(args.out)
    data = {name: Data.of(name) for name in args.dataset}
    for one in data.values():
        results.add_dataset(one)
    done = results.finished()
    left = [cell for cell in wanted_cells(args) if cell not in done]
    print(f"{len(left)} runs to make, {len(done)} in {args.out}", flush=True)
    children, failed = Children(), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        if args.work is None:
            args.work = stack.enter_context(tempfile.TemporaryDirectory())
        pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.callback(children.kill)
        waiting = {
            pool.submit(train_cell, cell, data[cell.dataset], args, children): cell for cell in left
        }
        for future in concurrent.futures.as_completed(waiting):
            cell = waiting[future]
            try:
                measured = future.result()
            except RuntimeError as error:
                failed += 1
                print(f"{cell} FAILED: {error}", file=sys.stderr, flush=True)
                continue
            results.add(cell, measured)
            seconds = measured["seconds"]
            took = "continued" if seconds is None else f"{seconds:,.0f} s"
            mean = statistics.fmean(measured["returns"])
            where = f"{cell.dataset} {TITLES[cell.algo]} {cell.side} seed {cell.seed}"
            print(f"{where}: {mean:,.1f} ({took})", flush=True)
    return 1 if failed else 0


# -- report ----------------------------------------------------------------------------------------

_QUANTILES = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    15: 2.131,
    20: 2.086,
    30: 2.042,
    60: 2.000,
}
"""97.5% quantiles of Student's t, by degrees of freedom."""


class Difference(NamedTuple):
    """Mean of ours - d3rlpy, and half the width of its 95% interval."""

    mean: float
    half: float

    @property
    def holds(self) -> bool:
        """Whether ours is not below d3rlpy by more than the interval; False if that is unknown."""
        return self.mean + self.half >= 0


def difference(ours: Sequence[float], peer: Sequence[float]) -> Difference:
    """Return the difference of two means with Welch's interval; one seed alone gives no interval.

    half = t(degrees) sqrt(v_ours + v_peer), v the variance of a mean; the degrees of freedom are
    those of Welch and Satterthwaite, rounded down to the next of the table.
    """
    mean = statistics.fmean(ours) - statistics.fmean(peer)
    if min(len(ours), len(peer)) < 2:
        return Difference(mean, math.nan)
    squares = [(statistics.variance(one) / len(one), len(one) - 1) for one in (ours, peer)]
    total = sum(square for square, _ in squares)
    if total == 0:
        return Difference(mean, 0.0)
    degrees = total**2 / sum(square**2 / freedom for square, freedom in squares)
    quantile = _QUANTILES[max(n for n in _QUANTILES if n <= max(degrees, 1) * (1 + 1e-9))]
    return Difference(mean, quantile * math.sqrt(total))


class Scale(NamedTuple):
    """Returns that are the scores 0 and 100."""

    random: float
    expert: float

    def score(self, value: float) -> float:
        return 100 * (value - self.random) / (self.expert - self.random)


def scales(
    datasets: Mapping[str, Mapping[str, Any]], experts: Mapping[str, float]
) -> dict[str, Scale]:
    """Return the scale of each environment: of a given expert's return, or an expert dataset's."""
    found: dict[str, Scale] = {}
    for facts in datasets.values():
        env_id = facts["env_id"]
        recorded = [
            one["mean_return"]
            for name, one in datasets.items()
            if one["env_id"] == env_id and "expert" in name
        ]
        if env_id not in experts and len(recorded) != 1:
            sys.exit(f"give the expert's return: --expert-return {env_id}=RETURN")
        expert = experts[env_id] if env_id in experts else recorded[0]
        found[env_id] = Scale(facts["random_return"], expert)
    return found


class Scores:
    """Scores of all runs in some files, by dataset, algorithm and side."""

    def __init__(self, contents: Sequence[Mapping[str, Any]], experts: Mapping[str, float]) -> None:
        self.datasets: dict[str, Any] = {}
        for content in contents:
            self.datasets |= content["datasets"]
        self.scales = scales(self.datasets, experts)
        self.updates: dict[str, int] = {}
        self._scores: dict[tuple[str, str, str], dict[int, float]] = {}
        for entry in (entry for content in contents for entry in content["cells"]):
            cell = cell_of(entry)
            if self.updates.setdefault(cell.dataset, cell.updates) != cell.updates:
                sys.exit(f"{cell.dataset}: runs have different numbers of updates")
            score = self.scale_of(cell.dataset).score(statistics.fmean(entry["returns"]))
            self._scores.setdefault(cell[:3], {})[cell.seed] = score

    def scale_of(self, dataset: str) -> Scale:
        return self.scales[self.datasets[dataset]["env_id"]]

    def of(self, dataset: str, algo: str, side: str) -> list[float]:
        return list(self._scores.get((dataset, algo, side), {}).values())

    def differences(self, algo: str) -> dict[str, Difference]:
        """Return the differences of an algorithm, by dataset, where both sides have runs."""
        pairs = {
            dataset: (self.of(dataset, algo, "ours"), self.of(dataset, algo, "peer"))
            for dataset in self.datasets
        }
        return {
            dataset: difference(ours, peer)
            for dataset, (ours, peer) in pairs.items()
            if ours and peer
        }


def spread(scores: Sequence[float]) -> str:
    """Return mean and standard deviation in words."""
    if not scores:
        return "-"
    deviation = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f}{deviation}"


def verdict(holds: bool) -> str:
    return "reached" if holds else "MISSED"


def in_words(cell: Difference) -> str:
    """Return a difference with its interval, and whether it holds."""
    if math.isnan(cell.half):
        return f"{cell.mean:+.1f} | one seed"
    return f"{cell.mean:+.1f} ± {cell.half:.1f} | {verdict(cell.holds)}"


def print_report(scores: Scores) -> bool:
    """Print Markdown tables; return whether every bar is reached."""
    print("| dataset | random | expert | data | score of the data | BC | 10%-BC |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dataset, facts in scores.datasets.items():
        scale = scores.scale_of(dataset)
        own = (spread(scores.of(dataset, algo, "ours")) for algo in ("bc", "bc_10"))
        print(
            f"| {dataset} | {scale.random:,.1f} | {scale.expert:,.1f} |"
            f" {facts['mean_return']:,.1f} | {scale.score(facts['mean_return']):.1f} |"
            f" {' | '.join(own)} |"
        )
    print("\n| dataset | algorithm | updates | seeds | ours | d3rlpy | difference | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found = {algo: scores.differences(algo) for algo in COMPARED}
    for dataset in scores.datasets:
        for algo in (algo for algo in COMPARED if dataset in found[algo]):
            cell = found[algo][dataset]
            sides = [scores.of(dataset, algo, side) for side in ("ours", "peer")]
            seeds = " and ".join(sorted({str(len(side)) for side in sides}))
            print(
                f"| {dataset} | {TITLES[algo]} | {scores.updates[dataset]:,} | {seeds} |"
                f" {' | '.join(map(spread, sides))} | {in_words(cell)} |"
            )
    print(f"\n| algorithm | mean difference over datasets | at least {LEAST_MEAN_DIFFERENCE:g} |")
    print("| --- | --- | --- |")
    reached = [cell.holds for cells in found.values() for cell in cells.values()]
    for algo, cells in found.items():
        if missing := [dataset for dataset in scores.datasets if dataset not in cells]:
            reached.append(False)
            print(f"| {TITLES[algo]} | no runs of {', '.join(missing)} | unknown |")
            continue
        mean = statistics.fmean(cell.mean for cell in cells.values())
        reached.append(mean >= LEAST_MEAN_DIFFERENCE)
        print(f"| {TITLES[algo]} | {mean:+.1f} | {verdict(reached[-1])} |")
    print(
        f"\nMean and standard deviation over seeds of the mean return of {EPISODES} episodes, as"
        " scores; differences with Welch's 95% interval."
    )
    return all(reached)


def run_report(args: argparse.Namespace) -> int:
    experts = {env: float(value) for env, _, value in (e.rpartition("=") for e in args.expert)}
    contents = [read_json(path) for path in args.files]
    return 0 if print_report(Scores(contents, experts)) else 1


# -- speed -----------------------------------------------------------------------------------------


class Contender:
    """A process that makes a round of updates whenever it is asked to."""

    def __init__(self, command: Sequence[str], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stream:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True
            )

    def wait(self) -> str:
        """Return what the process reports next."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return line[1:].strip()
        tail = self._errors.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended:\n{tail}")  # type: ignore[arg-type]

    def measure(self) -> float:
        """Return updates per second of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self.wait())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what differs between the requests of each contender."""
    if args.device == "cuda":
        ours = {f"ours, {args.acceleration}": {"threads": None}}
        return {
            **ours,
            "d3rlpy": {},
            "d3rlpy, compile_graph": {"compile": True},
        }
    return {
        "ours": {"threads": None},
        f"ours, {args.threads} threads": {},
        f"d3rlpy, {args.threads} threads": {},
        "d3rlpy, 1 thread": {"threads": 1},
    }


@contextlib.contextmanager
def started(
    data: Data, algo: str, args: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Contender]]:
    """Start every contender, one after the other, until each has warmed up."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Contender] = {}
        for i, (name, own) in enumerate(contenders(args).items()):
            place = folder / str(i)
            place.mkdir()
            request = place / "request.json"
            if name.startswith("ours"):
                asked = {**our_request(data, algo, args), "folder": str(place), "kind": "speed"}
                command = our_command(request)
            else:
                asked = {**peer_request(data, algo, args), "warmup": min(ROUND, args.peer_updates)}
                asked["updates"] = args.peer_updates
                command = peer_command(args, request)
            write_json(request, {**asked, **own})
            contender = Contender(command, place / "errors.txt")
            stack.callback(contender.close)
            contender.wait()
            running[name] = contender
        yield running


def measure_speed(data: Data, algo: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return updates per second of every contender, round by round."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started(data, algo, args, Path(folder)) as running,
    ):
        rates: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(args.rounds):
            for name, contender in running.items():
                rates[name].append(contender.measure())
    return rates


def print_speed(algo: str, rates: Mapping[str, Sequence[float]], least: float) -> bool:
    """Print the rates of an algorithm; return whether ours reaches the bar against each peer."""
    medians = {name: statistics.median(found) for name, found in rates.items()}
    peers = [name for name in medians if name.startswith("d3rlpy")]
    reached = True
    for name, found in rates.items():
        line = f"{TITLES[algo]:7s} {name:24s} {medians[name]:8,.0f} updates/s"
        line += f" ({min(found):,.0f} to {max(found):,.0f})"
        if name not in peers:
            ratios = {peer: medians[name] / medians[peer] for peer in peers}
            line += "".join(
                f", {ratio:.2f}x {peer} ({verdict(ratio >= least)})"
                for peer, ratio in ratios.items()
            )
            if name == next(iter(rates)):
                reached = min(ratios.values()) >= least
        print(line, flush=True)
    return reached


def run_speed(args: argparse.Namespace) -> int:
    data, least = Data.of(args.dataset), LEAST_SPEED[args.device]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.2f}, {args.device}; {data.name}; median of {args.rounds} rounds of"
        f" {ROUND} updates ({args.peer_updates} of d3rlpy), and the range; at least {least:g}x"
    )
    measured: dict[str, Any] = {}
    reached = True
    for algo in args.algos:
        measured[algo] = measure_speed(data, algo, args)
        reached = print_speed(algo, measured[algo], least) and reached
        if args.out is not None:
            about = {"dataset": data.name, "device": args.device, "cores": os.cpu_count()}
            write_json(args.out, {"settings": settings_table(), **about, "rates": measured})
    return 0 if reached else 1


# -- command line ----------------------------------------------------------------------------------


def add_shared(parser: argparse.ArgumentParser, threads: int) -> None:
    parser.add_argument("--algos", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--peer-python", required=True, help="Python of d3rlpy's environment")
    parser.add_argument("--device", choices=list(LEAST_SPEED), default="cpu")
    parser.add_argument(
        "--acceleration", choices=("eager", "compile", "cudagraph"), default="eager", help="of ours"
    )
    parser.add_argument(
        "--threads", type=int, default=threads, help="torch threads of each process"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True)
    scores = commands.add_parser("scores", help="train and evaluate both sides")
    add_shared(scores, threads=1)
    scores.add_argument("--dataset", nargs="+", required=True, help="Minari ids or folders")
    scores.add_argument("--updates", type=int, required=True)
    scores.add_argument("--seeds", type=int, default=5, help="seeds 1 to this number")
    scores.add_argument("--jobs", type=int, default=1, help="runs at a time")
    scores.add_argument("--peer-compile", action="store_true", help="d3rlpy with compile_graph")
    scores.add_argument("--work", help="folder of unfinished runs; unset: a temporary one")
    scores.add_argument("--out", type=Path, required=True, help="results, added to if it exists")
    scores.set_defaults(run=run_scores)
    report = commands.add_parser("report", help="print tables of results")
    report.add_argument("files", type=Path, nargs="+")
    report.add_argument(
        "--expert-return",
        dest="expert",
        nargs="+",
        default=[],
        metavar="ENV=RETURN",
        help="unset: the mean return of the environment's dataset with 'expert' in its name",
    )
    report.set_defaults(run=run_report)
    speed = commands.add_parser("speed", help="measure updates per second of both sides")
    add_shared(speed, threads=2)
    speed.add_argument("--dataset", required=True, help="a Minari id or a folder")
    speed.add_argument("--rounds", type=int, default=5)
    speed.add_argument("--peer-updates", type=int, default=ROUND, help="updates of d3rlpy's rounds")
    speed.add_argument("--out", type=Path)
    speed.set_defaults(run=run_speed)
    child = commands.add_parser("child")
    child.add_argument("request", type=Path)
    child.set_defaults(run=lambda args: run_child(read_json(args.request)))
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    return int(args.run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
