"""Damaged, malformed and hostile files, made from good ones by fixed seeds."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from conftest import QUICK_KNOBS, any_env, write_random_episodes
from rl_training.checkpointing import load_checkpoint, save_checkpoint
from rl_training.config import TrainConfig
from rl_training.errors import (
    EnvironmentFailure,
    NonFiniteError,
    StorageError,
    UserError,
    WorkerError,
)
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.trainer import Trainer
from rl_training.runtime.workflows import evaluate_checkpoint, load_policy
from rl_training.tools.report.data import read_runs
from rl_training.tools.zoo.manifest import load_benchmark

EXPLAINED = (UserError, EnvironmentFailure, NonFiniteError, StorageError, WorkerError)
CANARY = "canary_of_the_fuzzer"


class Base:
    """Good files: a short run of every algorithm, and a benchmark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = [self._run(algo) for algo in sorted(ALGORITHMS)]
        self.states = [load_checkpoint(run / "checkpoints" / "last.pt") for run in self.runs]
        (folder / f"{CANARY}.py").write_text(
            f"from pathlib import Path\nPath({str(folder / 'executed')!r}).touch()\n"
        )
        sys.path.append(str(folder))

    def _run(self, algo: str) -> Path:
        data: dict[str, Any] = {"total_timesteps": 192}
        if ALGORITHMS[algo].offline:
            data = {"total_updates": 192, "dataset": str(self._dataset(any_env(algo)))}
        config: TrainConfig[Any] = TrainConfig(
            algo=algo,
            env_id=any_env(algo),
            **data,
            num_envs=2,
            output_dir=self.folder / "runs",
            eval_episodes=1,
            progress=False,
            tensorboard=False,
            algo_kwargs=QUICK_KNOBS[algo],
        )
        return ExperimentManager.setup(config).train().run_dir

    def _dataset(self, env_id: str) -> Path:
        folder = self.folder / "recorded" / env_id
        return folder if folder.exists() else write_random_episodes(env_id, folder)

    @property
    def was_executed(self) -> bool:
        """Whether anything that a file names ran."""
        return (self.folder / "executed").exists()


def odd_value(rng: random.Random) -> Any:
    """Something that does not belong where it is put."""
    return rng.choice(
        [
            None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, -(2**40), 0.5, -1.5, 1e308,
            float("nan"), float("inf"), "", "x", "../../x", "\x1b[2J", [], {}, [[]], [1, 2, 3],
            {"a": 1}, {"model": {}}, torch.zeros(0), torch.zeros(3), torch.ones(2, 2).bool(),
            torch.full((4,), float("nan")), torch.zeros(1, dtype=torch.int64), torch.arange(7),
        ]
    )  # fmt: skip


def _places(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += _places(value, (*here, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree[:50]):
            found += _places(value, (*here, i))
    return found


def mutated_tree(tree: Any, rng: random.Random) -> Any:
    """A copy with one to three places replaced, removed, doubled or nudged."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(tree)
        if not places:
            return tree
        *path, last = rng.choice(places)
        parent = tree
        for key in path:
            parent = parent[key]
        kind = rng.random()
        value = parent[last]
        if kind < 0.15:
            del parent[last]
        elif kind < 0.3 and isinstance(value, torch.Tensor) and value.numel():
            parent[last] = _changed_tensor(value, rng)
        elif kind < 0.4 and isinstance(value, (int, float)) and not isinstance(value, bool):
            parent[last] = value * rng.choice([-1, 2, 1000, 10**6]) + rng.choice([-1, 0, 1])
        elif kind < 0.5 and isinstance(value, list) and value:
            parent[last] = value * 2 if rng.random() < 0.5 else value[:-1]
        else:
            parent[last] = odd_value(rng)
    return tree


def _changed_tensor(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: value.flatten()[:-1].clone(),
        lambda: value.unsqueeze(0).clone(),
        lambda: value.double() if value.is_floating_point() else value.float(),
        lambda: value.to(torch.int16),
        lambda: torch.cat([value.flatten(), value.flatten()]),
        lambda: torch.full_like(value, -1 if value.dtype.is_signed else 1),
    ]
    return rng.choice(changes)()


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flipped, cut, doubled or shuffled."""
    data = bytearray(content)
    kind = rng.random()
    if kind < 0.5:
        for _ in range(rng.choice([1, 1, 3, 20])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind < 0.7:
        del data[rng.randrange(len(data)) :]
    elif kind < 0.85:
        start = rng.randrange(len(data))
        data[start:start] = data[start : start + rng.randrange(1, 400)]
    else:
        start = rng.randrange(len(data))
        data[start : start + rng.randrange(1, 400)] = rng.randbytes(rng.randrange(1, 400))
    return bytes(data)


class _Payload:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def hostile_file(base: Base, rng: random.Random) -> bytes:
    """A file that would run code where it is unpickled, or exhaust the machine."""
    payload = {"format": 1, "digest": "", "state": _Payload(str(base.folder / "executed"))}
    kind = rng.randrange(5)
    if kind == 0:
        return pickle.dumps(payload, protocol=rng.randrange(6))
    buffer = io.BytesIO()
    if kind == 1:
        torch.save(payload, buffer, _use_new_zipfile_serialization=rng.random() < 0.5)
    elif kind == 2:
        torch.save({"format": 1, "state": torch.zeros(1).expand(2**30)}, buffer)
    elif kind == 3:
        nested: Any = []
        for _ in range(rng.choice([40, 90, 3000 if rng.random() < 0.2 else 60])):
            nested = [nested, nested]
        sys.setrecursionlimit(100_000)
        torch.save({"format": 1, "digest": "", "state": {"a": nested}}, buffer)
    else:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("archive/data.pkl", b"\x80\x02}." + b"\0" * 5_000_000)
            bomb.writestr("archive/data/0", b"\0" * 20_000_000)
    return buffer.getvalue()


def hostile_names(state: Any, rng: random.Random) -> Any:
    """A state whose config names code."""
    state = copy.deepcopy(state)
    config = state["config"]
    kind = rng.randrange(3)
    if kind == 0:
        config["env_id"] = f"{CANARY}:CartPole-v1"
    elif kind == 1:
        config["wrappers"] = [{"path": f"{CANARY}:Wrapper", "kwargs": {}}]
    else:
        config["algo_kwargs"]["encoder"] = f"{CANARY}:Encoder"
    return state


class _StopSoon(Callback):
    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        trainer.request_stop("far enough")


def resume_a_little(run: Path) -> None:
    """Resume and train for up to an iteration, or a hundred steps of it."""
    trainer = ExperimentManager.resume(run, callbacks=[_StopSoon()])
    asked = 0

    def soon() -> bool:
        nonlocal asked
        asked += 1
        if asked > 150:
            trainer.stopping.signals.received = "SIGTERM"
        return trainer.stopping.signals.received is not None

    trainer.pauses = trainer.stops_work = soon  # type: ignore[method-assign]
    trainer.train()


def use_checkpoint(run: Path, rng: random.Random) -> None:
    """Whatever a user does with a checkpoint."""
    use = rng.randrange(4)
    if use == 0:
        policy = load_policy(run)
        leaf = policy.obs_spec.leaves.get("")
        if leaf is not None and leaf.size < 10_000:
            policy.predict(torch.zeros(leaf.given_shape).numpy())
    elif use == 1:
        evaluate_checkpoint(run, 1)
    else:
        resume_a_little(run)


def fuzz_one(base: Base, seed: int, scratch: Path) -> tuple[str, str]:
    """One file, used: 'accepted', 'refused', or the exception that a user would see."""
    rng = random.Random(seed)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    kind = rng.choices(["state", "bytes", "names", "hostile", "log", "json", "manifest"],
                       [45, 15, 5, 5, 10, 10, 10])[0]  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _KINDS[kind](base, rng, scratch)
    except EXPLAINED as error:
        text = str(error)
        return ("refused", "") if text.strip() else (f"{kind}: empty message", repr(error))
    except MemoryError as error:
        return f"{kind}: MemoryError", str(error)
    except Exception:
        import traceback

        return f"{kind}: traceback", traceback.format_exc()
    return "accepted", ""


def _copied_run(base: Base, rng: random.Random, scratch: Path) -> tuple[int, Path]:
    which = rng.randrange(len(base.runs))
    run = scratch / "run"
    shutil.copytree(base.runs[which], run)
    return which, run


def _state(base: Base, rng: random.Random, scratch: Path) -> None:
    which, run = _copied_run(base, rng, scratch)
    _save(run, mutated_tree(base.states[which], rng))
    use_checkpoint(run, rng)


def _names(base: Base, rng: random.Random, scratch: Path) -> None:
    which, run = _copied_run(base, rng, scratch)
    _save(run, hostile_names(base.states[which], rng))
    use_checkpoint(run, rng)


def _save(run: Path, state: Any) -> None:
    """As another user would: the digest is not among this user's own."""
    kept = os.environ.get("XDG_STATE_HOME", "")
    os.environ["XDG_STATE_HOME"] = "/proc/nowhere"
    try:
        save_checkpoint(run / "checkpoints" / "last.pt", state)
    finally:
        os.environ["XDG_STATE_HOME"] = kept


def _bytes(base: Base, rng: random.Random, scratch: Path) -> None:
    _, run = _copied_run(base, rng, scratch)
    files = [run / "checkpoints" / "last.pt", *run.glob("replay/*")]
    path = rng.choice(files)
    path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    use_checkpoint(run, rng)


def _hostile(base: Base, rng: random.Random, scratch: Path) -> None:
    _, run = _copied_run(base, rng, scratch)
    (run / "checkpoints" / "last.pt").write_bytes(hostile_file(base, rng))
    use_checkpoint(run, rng)


def _log(base: Base, rng: random.Random, scratch: Path) -> None:
    _, run = _copied_run(base, rng, scratch)
    path = run / "metrics.jsonl"
    path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    read_runs([run], ("eval/return_mean",))
    resume_a_little(run)


def _json(base: Base, rng: random.Random, scratch: Path) -> None:
    _, run = _copied_run(base, rng, scratch)
    path = run / rng.choice(["metadata.json", "summary.json"])
    if rng.random() < 0.5:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    else:
        tree = mutated_tree(json.loads(path.read_text()), rng)
        path.write_text(json.dumps(tree, default=lambda _: "tensor"))
    read_runs([run], ("eval/return_mean",))
    resume_a_little(run)


_MANIFEST = {
    "format": 1,
    "title": "fuzzed",
    "runs": [{"preset": "one", "steps": 64, "seeds": [1, 2], "expected": 1.0, "source": "none"}],
}
_PRESET = {"preset": "ppo/cartpole", "num_envs": 2, "algo_kwargs": {"num_steps": 8}}


def _manifest(base: Base, rng: random.Random, scratch: Path) -> None:
    del base
    for name, tree in (("benchmark.yaml", _MANIFEST), ("one.yaml", _PRESET)):
        content = yaml.safe_dump(tree).encode()
        if rng.random() < 0.6:
            changed = mutated_tree(tree, rng)
            content = json.dumps(changed, default=lambda _: "tensor").encode()
        elif rng.random() < 0.5:
            content = mutated_bytes(content, rng)
        (scratch / name).write_bytes(content)
    load_benchmark(scratch)


_KINDS: dict[str, Callable[[Base, random.Random, Path], None]] = {
    "state": _state,
    "names": _names,
    "bytes": _bytes,
    "hostile": _hostile,
    "log": _log,
    "json": _json,
    "manifest": _manifest,
}
