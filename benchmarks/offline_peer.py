"""d3rlpy's side of `benchmarks/offline.py`, which runs this file in d3rlpy's own environment.

    python benchmarks/offline_peer.py REQUEST.json

Needs torch, d3rlpy 2.8.1 and h5py, and no environment: the policy is exported as plain arrays and
evaluated by the caller. Updates are d3rlpy's public calls, ``sample_transition_batch`` and
``update``, without the logging and progress bar of its ``fit``.

The dataset is an `MDPDataset` of ``obs[:-1]`` with actions scaled to [-1, 1]. d3rlpy has no place
for the successor of the last step of a truncated episode and never samples that transition: one per
truncated episode is dropped, and counted in the result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import d3rlpy
import h5py
import numpy as np
import torch
from d3rlpy.algos import BCConfig, CQLConfig, IQLConfig, TD3PlusBCConfig
from d3rlpy.dataset import MDPDataset
from d3rlpy.models.encoders import VectorEncoderFactory
from d3rlpy.preprocessing import StandardObservationScaler

CONFIGS = {"bc": BCConfig, "td3_bc": TD3PlusBCConfig, "iql": IQLConfig, "cql": CQLConfig}
ENCODERS = {
    "bc": ("encoder_factory",),
    "td3_bc": ("actor_encoder_factory", "critic_encoder_factory"),
    "iql": ("actor_encoder_factory", "critic_encoder_factory", "value_encoder_factory"),
    "cql": ("actor_encoder_factory", "critic_encoder_factory"),
}
BLOCK = 10_000
"""Updates between checkpoints. Every block has a seed of its own, so that a run that was
interrupted draws the same batches as one that was not."""
COMPARED = 256
"""Observations whose actions are saved, to compare the exported policy with."""


def scaled(actions: Any, low: Any, high: Any) -> Any:
    """Return actions in [-1, 1]."""
    return ((actions - low) / (high - low) * 2 - 1).astype(np.float32)


def read_dataset(request: dict[str, Any]) -> tuple[MDPDataset, dict[str, int]]:
    """Return the dataset of a Minari HDF5 file, and its numbers of transitions."""
    low, high = (np.asarray(request[name], np.float32) for name in ("low", "high"))
    parts: dict[str, list[Any]] = {
        name: [] for name in ("observations", "actions", "rewards", "terminals", "timeouts")
    }
    truncated = 0
    with h5py.File(request["data"], "r") as file:
        for index in range(len(file)):
            episode = file[f"episode_{index}"]
            steps = len(episode["rewards"])
            terminals = np.asarray(episode["terminations"], np.float32)
            timeouts = np.zeros(steps, np.float32)
            timeouts[-1] = 1 - terminals[-1]
            truncated += int(timeouts[-1])
            parts["observations"].append(np.asarray(episode["observations"][:-1], np.float32))
            parts["actions"].append(scaled(episode["actions"][:], low, high))
            parts["rewards"].append(np.asarray(episode["rewards"], np.float32))
            parts["terminals"].append(terminals)
            parts["timeouts"].append(timeouts)
    arrays = {name: np.concatenate(some) for name, some in parts.items()}
    dataset = MDPDataset(**arrays, action_space=d3rlpy.ActionSpace.CONTINUOUS)
    recorded = len(arrays["rewards"])
    if dataset.transition_count != recorded - truncated:
        raise RuntimeError(
            f"d3rlpy samples {dataset.transition_count:,} transitions of {recorded:,}, with"
            f" {truncated:,} truncated episodes: one of each was expected to be missing"
        )
    return dataset, {"sampled": dataset.transition_count, "dropped": truncated}


def standardization(dataset: MDPDataset) -> StandardObservationScaler:
    """Return the scaler that d3rlpy would fit, by NumPy: d3rlpy's loop takes minutes."""
    obs = np.concatenate(
        [episode.observations[: episode.transition_count] for episode in dataset.episodes]
    )
    return StandardObservationScaler(
        mean=obs.mean(0, dtype=np.float64), std=obs.std(0, dtype=np.float64)
    )


def make_algorithm(request: dict[str, Any], dataset: MDPDataset) -> Any:
    """Return a d3rlpy algorithm with networks."""
    name = request["algo"]
    widths = VectorEncoderFactory(hidden_units=request["hidden_sizes"], activation="relu")
    config = CONFIGS[name](
        **request["settings"],
        **dict.fromkeys(ENCODERS[name], widths),
        observation_scaler=standardization(dataset),
        compile_graph=request["compile"],
    )
    device = "cuda:0" if request["device"] == "cuda" else "cpu:0"
    algorithm = config.create(device=device)
    algorithm.build_with_dataset(dataset)
    return algorithm


def run_updates(algorithm: Any, dataset: MDPDataset, count: int) -> None:
    for _ in range(count):
        algorithm.update(dataset.sample_transition_batch(algorithm.batch_size))


def train(request: dict[str, Any], algorithm: Any, dataset: MDPDataset) -> None:
    """Make all updates; continue after the last checkpoint in the folder."""
    folder = Path(request["folder"])
    model, progress = folder / "model.pt", folder / "progress.json"
    done = 0
    if progress.exists():
        done = int(json.loads(progress.read_text())["updates"])
        algorithm.load_model(str(model))
        algorithm.set_grad_step(done)
    while done < request["updates"]:
        d3rlpy.seed(1000 * request["seed"] + 1 + done // BLOCK)
        count = min(BLOCK, request["updates"] - done)
        run_updates(algorithm, dataset, count)
        done += count
        progress.unlink(missing_ok=True)
        algorithm.save_model(str(model))
        progress.write_text(json.dumps({"updates": done}))


def policy_arrays(algorithm: Any, dataset: MDPDataset) -> dict[str, Any]:
    """Return the deterministic policy as weights, with actions for some observations."""
    state = {
        name: value.cpu().numpy() for name, value in algorithm.impl.policy.state_dict().items()
    }
    hidden = sorted({name.rpartition(".")[0] for name in state if name.startswith("_encoder.")})
    layers = [*hidden, "_mu" if "_mu.weight" in state else "_fc"]
    arrays: dict[str, Any] = {"layers": len(layers)}
    for i, layer in enumerate(layers):
        arrays[f"weight{i}"], arrays[f"bias{i}"] = state[f"{layer}.weight"], state[f"{layer}.bias"]
    scaler = algorithm.config.observation_scaler
    obs = dataset.sample_transition_batch(COMPARED).observations
    return {
        **arrays,
        "shift": scaler.mean,
        "scale": 1 / (scaler.std + scaler.eps),
        "obs": obs,
        "actions": algorithm.predict(obs),
    }


def timed_rounds(request: dict[str, Any], algorithm: Any, dataset: MDPDataset) -> None:
    """Make warm-up updates, then a round of updates for every line of standard input."""
    count = request["updates"]
    run_updates(algorithm, dataset, request["warmup"])
    print("@ready", flush=True)
    for _ in sys.stdin:
        synchronize(request)
        started = time.perf_counter()
        run_updates(algorithm, dataset, count)
        synchronize(request)
        print(f"@{count / (time.perf_counter() - started)}", flush=True)


def synchronize(request: dict[str, Any]) -> None:
    if request["device"] == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if d3rlpy.__version__ != request["version"]:
        sys.exit(f"d3rlpy is {d3rlpy.__version__}, not {request['version']}")
    torch.set_num_threads(request["threads"])
    d3rlpy.seed(1000 * request["seed"])
    dataset, counts = read_dataset(request)
    algorithm = make_algorithm(request, dataset)
    if "warmup" in request:
        timed_rounds(request, algorithm, dataset)
        return
    folder = Path(request["folder"])
    is_new = not (folder / "progress.json").exists()
    started = time.perf_counter()
    train(request, algorithm, dataset)
    seconds = time.perf_counter() - started if is_new else None
    np.savez(folder / "policy.npz", **policy_arrays(algorithm, dataset))
    result = {"seconds": seconds, "transitions": counts, "torch": torch.__version__}
    (folder / "trained.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
