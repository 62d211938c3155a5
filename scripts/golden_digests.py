"""Compare two commits bit for bit by short seeded runs of every algorithm.

    python scripts/golden_digests.py OLD NEW [--cases NAMES...] [--show 10]
    python scripts/golden_digests.py --list

OLD and NEW are commits, or `.` for the working tree. Every case is one short training run on the
CPU, once with each tree. At every checkpoint, tensors and buffers, optimizer moments and the rest
of the training state (environments, random streams, replay, counters) are compared by name; so are
all rows of metrics.jsonl, without times. Exits with 1 if anything differs. Settings in the
checkpoint's config are not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import hashlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from two_commits import make_tree, require_imported_from, tree_environment

_SECONDS_PER_CASE = 120.0
_READY = "ready"
"""Line that a child process prints when it has imported its tree."""

# -- what is compared, and how strictly ------------------------------------------------------------

RENAMES: tuple[tuple[str, str, str], ...] = (
    ("*", r"^training\.collector\.", "training.source."),
    ("*", r"^training\.actor(?=\.|$)", "training.source.actor"),
    ("drqn", r"^algorithm\.(model|target)\.encoder\.", r"algorithm.\1.trunk."),
)
"""Algorithm, pattern, replacement: names in old checkpoints and what replaced them.

They are applied to the names of both trees, in order.
"""

ALLOWED_NEW: tuple[str, ...] = ()
"""Patterns (of `fnmatch`) of names that may exist only in NEW."""

IGNORED = ("training.counters.log_offset",)
"""The length of metrics.jsonl in bytes, which depends on the digits of times."""

STORED_METRICS = ("training.metrics.", "algorithm.auxiliary_metrics.")
"""Names of metrics in a checkpoint, which are compared as metrics, not as state."""

REORDERED_ALGOS = frozenset({"ppo", "ppg", "recurrent_ppo"})
REORDERED_METRICS = ("losses/", "auxiliary/")
"""Means over minibatches that may be summed in another order, and their algorithms."""
RELATIVE, ABSOLUTE = 1e-6, 1e-8
"""Tolerances of those means; the absolute one because positive and negative terms may cancel."""

METRIC_NAMES = {"losses/entropy_loss": "losses/entropy"}
"""Names of metrics in older trees, and the current names."""
GROUPS = ("learnt", "optimizer", "state", "metrics")


@dataclasses.dataclass(frozen=True)
class Result:
    """The digests and metrics of one run of a case."""

    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digests or short values by name, such as ``step 512: algorithm.model.weight``."""
    metrics: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Metric rows by position, such as ``row 3`` or ``step 512``."""
    seconds: float = 0.0
    error: str | None = None
    """Why there is no result."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One name whose values differ between the trees."""

    group: str
    name: str
    detail: str
    allowed: bool = False
    """A new name that `ALLOWED_NEW` lists."""

    def __str__(self) -> str:
        return f"{'new, allowed' if self.allowed else self.group:12s} {self.name}: {self.detail}"


def group_of(name: str) -> str:
    """Return the group of a name in a checkpoint."""
    if not name.startswith("algorithm."):
        return "state"
    return "optimizer" if "optimizer" in name else "learnt"


def compare(algo: str, old: Result, new: Result) -> list[Difference]:
    """Return all differences between two results of a case."""
    failed = [
        Difference("error", side, result.error)
        for side, result in (("OLD", old), ("NEW", new))
        if result.error is not None
    ]
    if failed:
        return failed
    found = _compare_names("", old.digests, new.digests, lambda _, a, b: a == b)
    close = functools.partial(_same_metric, algo in REORDERED_ALGOS)
    for where in {**old.metrics, **new.metrics}:
        rows = old.metrics.get(where), new.metrics.get(where)
        if rows[0] is None or rows[1] is None:
            detail = "only in NEW" if rows[0] is None else "only in OLD"
            found.append(Difference("metrics", where, detail))
        else:
            found += _compare_names(f"{where}: ", rows[0], rows[1], close)
    return found


def _compare_names(
    prefix: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    same: Callable[[str, Any, Any], bool],
) -> list[Difference]:
    found = []
    for name in {**old, **new}:
        plain = name.rpartition(": ")[2]
        group = "metrics" if prefix else group_of(plain)
        if name not in new:
            found.append(Difference(group, prefix + name, "only in OLD"))
        elif name not in old:
            allowed = any(fnmatch.fnmatchcase(plain, pattern) for pattern in ALLOWED_NEW)
            found.append(Difference(group, prefix + name, "only in NEW", allowed))
        elif not same(name, old[name], new[name]):
            detail = f"{_short(old[name])} != {_short(new[name])}"
            found.append(Difference(group, prefix + name, detail))
    return found


def _same_metric(tolerant: bool, name: str, old: Any, new: Any) -> bool:
    if repr(old) == repr(new):
        return True
    numbers = isinstance(old, float) and isinstance(new, float)
    if tolerant and numbers and name.startswith(REORDERED_METRICS):
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return False


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- the runs --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A short training run."""

    algo: str
    settings: dict[str, Any]
    """Fields of `TrainConfig`, in addition to `SHARED`."""
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The algorithm's own settings."""
    spaces: tuple[str, str] | None = None
    """Names of an observation and an action space (see `_spaces`): samples are the observations."""


SHARED: dict[str, Any] = {
    "seed": 3,
    "num_envs": 2,
    "device": "cpu",
    "torch_threads": 1,
    "eval_episodes": 2,
    "keep_checkpoints": 100,
    "progress": False,
    "tensorboard": False,
}


def _on_policy(
    algo: str, settings: dict[str, Any], spaces: tuple[str, str] | None = None, **knobs: Any
) -> Case:
    """Return a case of five rollouts of 64 steps, with evaluations and checkpoints."""
    shared = {"total_timesteps": 640, "eval_interval": 256, "checkpoint_interval": 256}
    shared_knobs = {"num_steps": 64, "update_epochs": 2, "learning_rate": 1e-3}
    return Case(algo, {**shared, **settings}, {**shared_knobs, **knobs}, spaces)


def _off_policy(
    algo: str, settings: dict[str, Any], spaces: tuple[str, str] | None = None, **knobs: Any
) -> Case:
    """Return a case of 1,300 steps; metrics are logged first after 1,000.

    The replay is smaller than the run, so that old transitions are overwritten.
    """
    shared = {"total_timesteps": 1300, "eval_interval": 500, "checkpoint_interval": 500}
    shared_knobs = {
        "learning_starts": 100,
        "batch_size": 16,
        "buffer_size": 700,
        "hidden_sizes": [32, 32],
    }
    return Case(algo, {**shared, **settings}, {**shared_knobs, **knobs}, spaces)


_CHAIN = {"env_id": "conformance_envs:conform/Chain-v0"}
_MASKED = {"env_id": "probe_envs:probe/MaskedActions-v0"}
_RECALL = {"env_id": "probe_envs:probe/Recall-v0"}
_SHORT_PENDULUM = {"env_id": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 50}}
_NATIVE = {"vectorization": "native", "num_envs": 4}
_ATARI: dict[str, Any] = {
    "env_id": "ALE/Breakout-v5",
    "preprocessing": "atari",
    "total_timesteps": 192,
    "eval_interval": 64,
    "checkpoint_interval": 64,
    # Games of 40 steps, so that they end and are seeded again within the run.
    "atari": {"max_frames": 160, "seed_interval": 30, "sticky_actions": 0.25},
}
_ATARI_PPO: dict[str, Any] = {"num_steps": 16, "num_minibatches": 2, "feature_size": 16}
_SPARSE: dict[str, Any] = {"train_freq": 4, "gradient_steps": 1}

CASES: dict[str, Case] = {
    "ppo_defaults": Case("ppo", {"total_timesteps": 2048, "eval_interval": 1024}),
    "ppo_native": _on_policy(
        "ppo",
        {**_NATIVE, "eval_deterministic": False, "normalize_obs": True, "normalize_reward": True},
        clip_vloss=True,
    ),
    "ppo_async": _on_policy(
        "ppo", {"vectorization": "async", "normalize_reward": True}, anneal_clip=True
    ),
    "ppo_box": _on_policy(
        "ppo",
        {**_SHORT_PENDULUM, "normalize_obs": True, "normalize_reward": True},
        clip_vloss=True,
        anneal_clip=True,
        log_std_init=-0.5,
    ),
    "ppo_unbounded_box": _on_policy(
        "ppo",
        {"eval_deterministic": False},
        spaces=("vector", "unbounded_box"),
        anneal_lr=False,
        norm_adv=False,
        activation="relu",
        hidden_sizes=[16],
    ),
    "ppo_multi_discrete": _on_policy("ppo", {}, spaces=("dict", "multi_discrete")),
    "ppo_multi_binary": _on_policy(
        "ppo", {"vectorization": "async"}, spaces=("vector", "multi_binary")
    ),
    "ppo_dict_with_image": _on_policy(
        "ppo", {"total_timesteps": 256}, spaces=("image", "discrete"), feature_size=16
    ),
    "ppo_masked": _on_policy("ppo", _MASKED, update_epochs=3),
    "ppo_truncating": _on_policy("ppo", {**_CHAIN, "num_envs": 3}, num_minibatches=3),
    "ppo_target_kl": _on_policy(
        "ppo", {"num_envs": 4}, target_kl=0.003, learning_rate=1e-2, update_epochs=6
    ),
    "ppo_wrapped": _on_policy(
        "ppo",
        {
            "wrappers": [{"path": "conformance_envs:ScaleReward", "kwargs": {"factor": 0.1}}],
            "log_interval": 200,
            "eval_episodes": 0,
            "max_recorded_steps": 10,
        },
        gamma=0.9,
        gae_lambda=0.8,
        max_grad_norm=0.1,
    ),
    "ppo_atari": _on_policy("ppo", _ATARI, **_ATARI_PPO),
    "ppo_atari_native": _on_policy("ppo", {**_ATARI, "vectorization": "native"}, **_ATARI_PPO),
    "ppo_atari_overlap": _on_policy(
        "ppo", {**_ATARI, **_NATIVE, "overlap": True, "normalize_reward": True}, **_ATARI_PPO
    ),
    "ppg": _on_policy("ppg", {}, policy_phases=2, aux_epochs=2, num_aux_minibatches=4),
    "ppg_native": _on_policy(
        "ppg",
        {**_NATIVE, "total_timesteps": 1280, "normalize_obs": True, "normalize_reward": True},
        policy_phases=2,
        aux_epochs=3,
        num_aux_minibatches=8,
        beta_clone=0.5,
        target_kl=5e-5,
    ),
    "ppg_masked": _on_policy(
        "ppg", _MASKED, policy_phases=2, aux_epochs=2, num_aux_minibatches=4, anneal_clip=True
    ),
    "ppg_dict": _on_policy(
        "ppg",
        {"vectorization": "async", "eval_deterministic": False},
        spaces=("dict", "discrete"),
        policy_phases=2,
        aux_epochs=2,
        num_aux_minibatches=4,
        clip_vloss=True,
        value_sizes=[16],
    ),
    "recurrent_ppo": _on_policy("recurrent_ppo", _RECALL, lstm_size=16),
    "recurrent_ppo_native": _on_policy(
        "recurrent_ppo",
        {**_NATIVE, "eval_deterministic": False, "normalize_reward": True},
        lstm_size=16,
        sequence_length=16,
        clip_vloss=True,
    ),
    "recurrent_ppo_box": _on_policy(
        "recurrent_ppo",
        {**_SHORT_PENDULUM, "normalize_obs": True},
        lstm_size=16,
        shared_lstm=True,
        update_epochs=4,
        target_kl=5e-6,
    ),
    "recurrent_ppo_truncating": _on_policy(
        "recurrent_ppo",
        {**_CHAIN, "vectorization": "async"},
        lstm_size=16,
        sequence_length=64,
        num_minibatches=2,
    ),
    "recurrent_ppo_multi_discrete": _on_policy(
        "recurrent_ppo", {}, spaces=("dict", "multi_discrete"), lstm_size=16, hidden_sizes=[8]
    ),
    "recurrent_ppo_atari": _on_policy(
        "recurrent_ppo", _ATARI, lstm_size=16, sequence_length=8, **_ATARI_PPO
    ),
    "dqn_defaults": Case(
        "dqn",
        {"total_timesteps": 2200, "num_envs": 1, "eval_interval": 1000},
        {"learning_starts": 500, "train_freq": 10},
    ),
    "dqn_prioritized": _off_policy(
        "dqn",
        {"num_envs": 3, "eval_deterministic": False},
        prioritized=True,
        dueling=True,
        double=True,
        n_step=3,
        train_freq=4,
        gradient_steps=2,
        anneal_lr=True,
    ),
    "dqn_native": _off_policy(
        "dqn",
        _NATIVE,
        train_freq=2,
        gradient_steps=0.3,
        n_step=2,
        tau=0.1,
        target_update_interval=20,
    ),
    "dqn_async_dict": _off_policy(
        "dqn", {"vectorization": "async"}, spaces=("dict", "discrete"), n_step=2, **_SPARSE
    ),
    "dqn_dict_with_image": _off_policy(
        "dqn", {"total_timesteps": 400}, spaces=("image", "discrete"), feature_size=16, **_SPARSE
    ),
    "dqn_masked": _off_policy("dqn", _MASKED, double=True, **_SPARSE),
    "dqn_truncating": _off_policy(
        "dqn", {**_CHAIN, "num_envs": 3}, prioritized=True, n_step=3, **_SPARSE
    ),
    "dqn_atari": _off_policy(
        "dqn",
        {
            **_ATARI,
            "num_envs": 1,
            "total_timesteps": 1100,
            "eval_interval": 1000,
            "atari": {**_ATARI["atari"], "seed_interval": 300},
        },
        learning_starts=24,
        batch_size=8,
        buffer_size=300,
        target_update_interval=32,
        feature_size=16,
        hidden_sizes=None,
        n_step=2,
        **_SPARSE,
    ),
    "dqn_atari_native": _off_policy(
        "dqn",
        {**_ATARI, "vectorization": "native"},
        learning_starts=24,
        batch_size=8,
        buffer_size=100,
        feature_size=16,
        prioritized=True,
        **_SPARSE,
    ),
    "drqn": _off_policy("drqn", _RECALL, lstm_size=16, batch_size=8, hidden_sizes=None, **_SPARSE),
    "drqn_native": _off_policy(
        "drqn",
        _NATIVE,
        lstm_size=16,
        batch_size=4,
        sequence_length=8,
        burn_in=2,
        double=True,
        train_freq=8,
    ),
    "drqn_truncating": _off_policy(
        "drqn",
        {**_CHAIN, "num_envs": 3, "vectorization": "async"},
        lstm_size=16,
        batch_size=8,
        burn_in=0,
        anneal_lr=True,
        train_freq=8,
    ),
    "sac_defaults": Case(
        "sac",
        {"env_id": "Pendulum-v1", "num_envs": 1, "total_timesteps": 1050, "eval_interval": 1000},
        {"learning_starts": 900},
    ),
    "sac_learnt_temperature": _off_policy(
        "sac", _SHORT_PENDULUM, n_step=3, num_critics=3, train_freq=3, gradient_steps=-1
    ),
    "sac_fixed_temperature": _off_policy(
        "sac",
        {**_SHORT_PENDULUM, "num_envs": 3, "vectorization": "async", "eval_deterministic": False},
        ent_coef=0.1,
        target_update_interval=3,
        train_freq=6,
        gradient_steps=2,
    ),
    "sac_dict": _off_policy("sac", {}, spaces=("dict", "bounded_box"), **_SPARSE),
    "sac_dict_with_image": _off_policy(
        "sac",
        {"total_timesteps": 300},
        spaces=("image", "bounded_box"),
        feature_size=16,
        **_SPARSE,
    ),
    "td3_defaults": Case(
        "td3",
        {"env_id": "Pendulum-v1", "num_envs": 1, "total_timesteps": 1050, "eval_interval": 1000},
        {"learning_starts": 900},
    ),
    "td3_several_envs": _off_policy(
        "td3",
        {**_SHORT_PENDULUM, "num_envs": 3},
        n_step=2,
        policy_delay=3,
        train_freq=4,
        gradient_steps=1.5,
    ),
    "td3_dict": _off_policy("td3", {}, spaces=("dict", "bounded_box"), **_SPARSE),
}


def _spaces(obs: str, action: str) -> tuple[Any, Any]:
    """Return the Gymnasium spaces that `Case.spaces` names."""
    import numpy as np
    from gymnasium import spaces

    vector = spaces.Box(-1.0, 1.0, (3,), np.float32)
    small = spaces.Box(0, 9, (3,), np.uint8)
    observations = {
        "vector": vector,
        "dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2, 2), np.float64), "b": small}),
        "image": spaces.Dict({"frame": spaces.Box(0, 255, (36, 36, 3), np.uint8), "a": vector}),
    }
    actions = {
        "discrete": spaces.Discrete(3),
        "multi_discrete": spaces.MultiDiscrete([3, 2, 4]),
        "multi_binary": spaces.MultiBinary(4),
        "bounded_box": spaces.Box(np.array([-2, 0], "f4"), np.array([2, 10], "f4")),
        "unbounded_box": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    }
    return observations[obs], actions[action]


def run_case(case: Case, folder: Path) -> Result:
    """Train in ``folder`` with the package that this process imports."""
    from rl_training.config import config_from_mapping
    from rl_training.experiment.manager import ExperimentManager

    started = time.monotonic()
    settings = {**SHARED, **case.settings, "output_dir": folder / "runs"}
    config = config_from_mapping({**settings, "algo": case.algo, "algo_kwargs": case.knobs})
    env_fn = None
    if case.spaces is not None:
        from conformance_envs import Dataless

        env_fn = functools.partial(Dataless, *_spaces(*case.spaces))
    trained = ExperimentManager.setup(config, env_fn=env_fn).train()
    result = read_run(case.algo, trained.run_dir)
    return dataclasses.replace(result, seconds=time.monotonic() - started)


def read_run(algo: str, run_dir: Path) -> Result:
    """Return the digests of a run's checkpoints, and its metrics."""
    from rl_training.checkpointing import load_checkpoint

    digests: dict[str, str] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for path in sorted((run_dir / "checkpoints").glob("step_*.pt")):
        where = f"step {int(path.stem.removeprefix('step_'))}"
        stored, values = digest_state(algo, load_checkpoint(path))
        if where == "step 0":  # not reset yet, so that a native vector's generator is not seeded
            stored = {k: v for k, v in stored.items() if not k.startswith("training.source.env.")}
        digests |= {f"{where}: {name}": digest for name, digest in stored.items()}
        metrics[where] = values
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        row = json.loads(line)
        metrics[f"row {number}"] = {
            METRIC_NAMES.get(k, k): v for k, v in row.items() if not k.startswith("time/")
        }
    return Result(digests, metrics)


def digest_state(algo: str, state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return digests of a checkpoint's state by name, and the metrics in it.

    The rows of a replay are in files named by the digests of their content. The checkpoint holds
    these names, so comparing them compares the rows.
    """
    digests: dict[str, str] = {}
    metrics: dict[str, Any] = {}
    for part in ("algorithm", "training"):
        for name, value in _leaves(state[part], part):
            found = next((p for p in STORED_METRICS if name.startswith(p)), None)
            if found is not None:
                logged = name.removeprefix(found)
                metrics[METRIC_NAMES.get(logged, logged)] = value
            elif name not in IGNORED:
                renamed = _renamed(algo, name)
                if renamed in digests:
                    raise ValueError(f"two values are called {renamed} once names are replaced")
                digests[renamed] = _digest(value)
    return digests, metrics


def _renamed(algo: str, name: str) -> str:
    for only, pattern, replacement in RENAMES:
        if only in ("*", algo):
            name = re.sub(pattern, replacement, name)
    return name


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield tensors, plain values and lists of plain values, with dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list) and not _is_plain(value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _digest(value: Any) -> str:
    """Return a SHA-256 over type, shape and bytes; short plain values are returned as text."""
    import torch

    if isinstance(value, torch.Tensor):
        array = value.detach().contiguous().numpy()
        form = f"{array.dtype}{array.shape}"
        return f"{form} {hashlib.sha256(form.encode() + array.tobytes()).hexdigest()}"
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{type(value).__name__} {hashlib.sha256(text.encode()).hexdigest()}"


# -- a process that runs the cases with one tree ---------------------------------------------------


def run_as_child(tree: Path, folder: Path, names: Sequence[str]) -> None:
    """Run cases in forks of this process; print a case's name when its result is in ``folder``.

    Forks, because importing torch takes longer than most cases.
    """
    require_imported_from(tree)
    import rl_training.experiment.manager
    import rl_training.trainer  # noqa: F401 - imported here, once

    print(_READY, flush=True)
    context = multiprocessing.get_context("fork")
    for name in names:
        process = context.Process(target=_store_case, args=(name, folder))
        process.start()
        process.join(_SECONDS_PER_CASE)
        if process.is_alive():
            process.kill()
            process.join()
            _store(folder, name, Result(error=f"took more than {_SECONDS_PER_CASE:.0f} s"))
        elif process.exitcode:
            _store(folder, name, Result(error=f"the process ended with {process.exitcode}"))
        print(name, flush=True)


def _store_case(name: str, folder: Path) -> None:
    os.dup2(2, 1)  # output of a run must not be read as the name of a case
    try:
        result = run_case(CASES[name], folder / name)
    except Exception as error:  # noqa: BLE001 - reported as the result of this case
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        result = Result(error=f"{type(error).__name__} in {place}: {error}")
    _store(folder, name, result)


def _store(folder: Path, name: str, result: Result) -> None:
    text = json.dumps(dataclasses.asdict(result))
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


class TreeRuns:
    """A child process that runs cases with one tree; results can be read one by one."""

    def __init__(self, commit: str, folder: Path, names: Sequence[str]) -> None:
        self._commit = commit
        tree = make_tree(commit, folder / "tree")
        self._results = folder / "results"
        self._results.mkdir()
        self._log_path = folder / "log.txt"
        command = [sys.executable, __file__, "--child", str(tree), str(self._results), *names]
        with self._log_path.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this script
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=tree_environment(
                    tree,
                    folder / "state",
                    OMP_NUM_THREADS="1",
                    CUDA_VISIBLE_DEVICES="",
                    PYTHONHASHSEED="0",
                ),
            )

    def wait_until_ready(self) -> None:
        """Wait until the tree is imported; exit if that fails."""
        if self._next_line() != _READY:
            sys.exit(f"{self._commit} cannot be imported:\n{self.log().strip()[-2000:]}")

    def next_result(self, name: str) -> Result:
        """Wait for the next case, which must be ``name``."""
        if self._next_line() != name:
            return Result(error="the process that runs the cases ended")
        text = (self._results / f"{name}.json").read_text(encoding="utf-8")
        return Result(**json.loads(text))

    def _next_line(self) -> str:
        stream = self._process.stdout
        return stream.readline().strip() if stream is not None else ""

    def log(self) -> str:
        """Return what the runs wrote to standard error."""
        return self._log_path.read_text(encoding="utf-8")

    def close(self) -> None:
        """End the process if it is still running."""
        self._process.kill()
        self._process.communicate()


def run_both(
    commits: tuple[str, str], names: Sequence[str]
) -> Iterator[tuple[str, Result, Result, str]]:
    """Yield each case's name, both results and, if a run failed, the standard error.

    The two trees run at the same time.
    """
    runs: list[TreeRuns] = []
    with tempfile.TemporaryDirectory(prefix="golden_digests_") as folder:
        try:
            for side, commit in zip(("old", "new"), commits, strict=True):
                runs.append(TreeRuns(commit, Path(folder) / side, names))
            for run in runs:
                run.wait_until_ready()
            for name in names:
                old, new = (run.next_result(name) for run in runs)
                failed = [r for r, result in zip(runs, (old, new), strict=True) if result.error]
                yield name, old, new, failed[0].log() if failed else ""
        finally:
            for run in runs:
                run.close()


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("old", nargs="?", help="a commit, or . for the working tree")
    parser.add_argument("new", nargs="?", help="a commit, or . for the working tree")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="cases to run; default: all")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--show", type=int, default=10, help="differences to print per case")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        tree, folder, *names = options.child
        run_as_child(Path(tree), Path(folder), names)
        return 0
    if options.list:
        print("\n".join(CASES))
        return 0
    if options.old is None or options.new is None:
        parser.error("two commits are needed (. is the working tree)")
    names = options.cases or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; --list prints the names of all")
    return _compare_commits((options.old, options.new), names, options.show)


def _compare_commits(commits: tuple[str, str], names: Sequence[str], show: int) -> int:
    started = time.monotonic()
    compared: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    log = ""
    for name, old, new, errors in run_both(commits, names):
        log = log or errors
        found = compare(CASES[name].algo, old, new)
        counted = [difference for difference in found if not difference.allowed]
        compared.update(group_of(key.rpartition(": ")[2]) for key in old.digests)
        compared["metrics"] += sum(len(row) for row in old.metrics.values())
        differing.update(difference.group for difference in counted)
        differing["cases"] += bool(counted)
        word = "DIFFERS" if counted else "equal"
        size = len(old.digests) + sum(len(row) for row in old.metrics.values())
        print(f"{name:30s} {word:8s} {size:5d} values {old.seconds:6.1f} s {new.seconds:6.1f} s")
        for difference in found[:show]:
            print(f"    {difference}")
        if len(found) > show:
            print(f"    and {len(found) - show} more (--show)")
        sys.stdout.flush()
    if log:
        print(f"\nstandard error up to the first failed run:\n{log[-3000:]}", file=sys.stderr)
    parts = [f"{compared[group]:,} {group} ({differing[group]} differ)" for group in GROUPS]
    print(
        f"\n{commits[0]} and {commits[1]}: {len(names)} cases, {differing['cases']} differ,"
        f" {differing['error']} failed runs; compared {', '.join(parts)};"
        f" {time.monotonic() - started:.0f} s"
    )
    return 1 if differing["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
