"""Eager, compiled and graphed updates agree; so do batches gathered on either side."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager, build_algorithm
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep

OBS = ObsSpec({"": ArraySpec((5,), "float32")})
ACTIONS = {
    "dqn": ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,)),
    "sac": ActionSpec("box", (2,), "float32", low=(-1.0, 0.0), high=(1.0, 5.0)),
}
DISTRIBUTIONS = ("qrdqn", "c51", "iqn")
for _name in (*DISTRIBUTIONS, "sac_discrete"):
    ACTIONS[_name] = ACTIONS["dqn"]
for _name in ("td3", "bc", "td3_bc", "iql", "cql", "rebrac", "awac"):
    ACTIONS[_name] = ACTIONS["sac"]
CPU = torch.device("cpu")
COMPILER = shutil.which("g++") or shutil.which("clang++")
MODES = [
    pytest.param("compile", "cpu", marks=pytest.mark.skipif(not COMPILER, reason="no compiler")),
    *(
        pytest.param(
            mode,
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        )
        for mode in ("eager", "compile", "cudagraph")
    ),
]
TOLERANCE = 2e-5
"""Largest difference of a parameter after eight updates with a learning rate of 1e-3."""


def filled_replay(algo: str, device: torch.device | None = None, steps: int = 90) -> ReplayBuffer:
    replay = ReplayBuffer(
        128, 2, OBS, ACTIONS[algo], gamma=0.9, n_step=2, device=device, next_actions=True
    )
    feed(replay, algo, steps, np.random.default_rng(0))
    return replay


def feed(replay: ReplayBuffer, algo: str, steps: int, rng: np.random.Generator) -> None:
    obs = rng.normal(size=(2, 5)).astype(np.float32)
    for _ in range(steps):
        following, final = rng.normal(size=(2, 2, 5)).astype(np.float32)
        terminated, truncated = rng.random((2, 2)) < 0.2
        ended = terminated | truncated
        step = VectorStep(
            following,
            np.where(ended[:, None], final, following),
            rng.normal(size=2).astype(np.float32),
            terminated,
            truncated,
            np.ones(2, bool),
            (),
        )
        spec = ACTIONS[algo]
        is_box = spec.kind == "box"
        action = rng.uniform(-1, 1, (2, *spec.shape)) if is_box else rng.integers(3, size=2)
        replay.add(obs, action, {}, step)
        obs = following


def learnt(algo: str, mode: str, device: str, **knobs: Any) -> tuple[Any, torch.Tensor]:
    config: TrainConfig[Any] = TrainConfig(
        algo=algo,
        num_envs=2,
        acceleration=mode,  # type: ignore[arg-type]
        algo_kwargs={"learning_rate": 1e-3, "batch_size": 32, "hidden_sizes": (32, 32), **knobs},
    )
    algorithm = build_algorithm(config, OBS, ACTIONS[algo], torch.device(device))
    replay = filled_replay(algo)
    metrics = []
    for i in range(4):
        algorithm.learn(replay, Progress(1000 * i, 10_000), updates=2)
        metrics.append(list(algorithm.pop_metrics().values()))
    return algorithm, torch.tensor(metrics)


@pytest.mark.parametrize(("mode", "device"), MODES)
@pytest.mark.parametrize(
    "algo",
    [
        pytest.param(algo, marks=[pytest.mark.full] if algo in DISTRIBUTIONS else [])
        for algo in ACTIONS
    ],
)
def test_modes_agree_after_eight_updates(algo: str, mode: str, device: str) -> None:
    knobs: dict[str, Any] = {}
    if algo == "cql":
        knobs = {"num_action_samples": 2, "conservative_threshold": 1.0}
    elif algo in DISTRIBUTIONS:
        knobs = {"noisy": True, "dueling": True, "double": True}
    eager, expected = learnt(algo, "eager", "cpu", **knobs)
    fast, found = learnt(algo, mode, device, **knobs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    pairs = zip(eager.module.parameters(), fast.module.parameters(), strict=True)
    for slow, quick in pairs:
        torch.testing.assert_close(quick.cpu(), slow, rtol=0, atol=TOLERANCE)
    for name, saved in eager.state_dict().items():
        if name.startswith("target") and isinstance(saved, dict):
            for key, tensor in saved.items():
                other = fast.state_dict()[name][key].cpu()
                torch.testing.assert_close(other, tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("mode", "device"), MODES)
def test_an_annealed_rate_reaches_accelerated_steps(mode: str, device: str) -> None:
    eager, _ = learnt("dqn", "eager", "cpu", anneal_lr=True)
    fast, _ = learnt("dqn", mode, device, anneal_lr=True)
    constant, _ = learnt("dqn", "eager", "cpu")
    slow, quick, plain = (
        torch.cat([p.detach().cpu().flatten() for p in one.module.parameters()])
        for one in (eager, fast, constant)
    )
    assert (slow - plain).abs().max() > 10 * TOLERANCE
    torch.testing.assert_close(quick, slow, rtol=0, atol=TOLERANCE)


FRAMES = ObsSpec({"": ArraySpec((4, 40, 40), "uint8")})
IMAGE_TOLERANCE = 2e-4
"""Of parameters after four updates on images, with a learning rate of 1e-3."""


def learnt_from_images(algo: str, mode: str, device: str) -> Any:
    """Four updates on images, from the same weights and data whatever the mode."""
    knobs: dict[str, Any] = {"learning_rate": 1e-3, "feature_size": 16}
    if algo == "dqn":
        knobs |= {"batch_size": 16, "max_grad_norm": 0.5}
    else:
        knobs |= {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "anneal_lr": False}
    if algo == "pqn":
        knobs["optimizer"] = "adam"  # the first four steps of RAdam are small
    config: TrainConfig[Any] = TrainConfig(
        algo=algo,
        num_envs=2,
        acceleration=mode,  # type: ignore[arg-type]
        algo_kwargs=knobs,
    )
    place = torch.device(device)
    algorithm = build_algorithm(config, FRAMES, ACTIONS["dqn"], place)
    rng = np.random.default_rng(5)
    storage: Any
    if algo == "dqn":
        storage = ReplayBuffer(64, 2, FRAMES, ACTIONS["dqn"], gamma=0.9, frame_stack=4)
    else:
        storage = RolloutBuffer(
            16, 2, (4, 40, 40), (), obs_dtype=torch.uint8, action_dtype=torch.int64, device=place
        )
    obs = rng.integers(0, 256, (2, 4, 40, 40), dtype=np.uint8)
    for _ in range(16):
        newest = rng.integers(0, 256, (2, 1, 40, 40), dtype=np.uint8)
        following = np.concatenate((obs[:, 1:], newest), 1)
        terminated = rng.random(2) < 0.2
        reward = rng.normal(size=2).astype(np.float32)
        none, all_valid = np.zeros(2, bool), np.ones(2, bool)
        step = VectorStep(following, following, reward, terminated, none, all_valid, ())
        storage.add(obs, rng.integers(3, size=2), {}, step)
        obs = following
    if algo == "dqn":
        algorithm.learn(storage, Progress(0, 1000), updates=4)
    else:
        algorithm.learn(storage, Progress(0, 1000))
    return algorithm


@pytest.mark.parametrize(("mode", "device"), MODES)
@pytest.mark.parametrize("algo", ["dqn", "ppo", pytest.param("pqn", marks=pytest.mark.full)])
def test_modes_agree_on_images(
    algo: str, mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    slow = learnt_from_images(algo, "eager", "cpu")
    quick = learnt_from_images(algo, mode, device)
    start = build_algorithm(untouched(algo), FRAMES, ACTIONS["dqn"], CPU).module
    moved = 0.0
    pairs = zip(
        start.parameters(), slow.module.parameters(), quick.module.parameters(), strict=True
    )
    for first, one, other in pairs:
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=IMAGE_TOLERANCE)
        moved = max(moved, float((one - first).detach().abs().max()))
    assert moved > 10 * IMAGE_TOLERANCE, "the updates did something to agree on"


def untouched(algo: str) -> TrainConfig[Any]:
    return TrainConfig(algo=algo, num_envs=2, algo_kwargs={"feature_size": 16})


DEVICES = [
    pytest.param("cpu"),  # a copy all the same: what is not brought up to date shows
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_a_copied_replay_gives_the_same_batches(algo: str, device: str) -> None:
    """While rows are added between batches, the ring goes round and its pool of finals grows."""
    place = torch.device(device)
    plain, copied = filled_replay(algo, steps=3), filled_replay(algo, place, steps=3)
    rngs = [np.random.default_rng(1), np.random.default_rng(1)]
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    for added in (0, 1, 1, 5, 40, 40, 64, 65, 200, 1):
        batches = []
        for replay, rng, generator in zip((plain, copied), rngs, generators, strict=True):
            feed(replay, algo, added, rng)
            batches.append(replay.sample(64, generator))
        for name, tensor in batches[0].items():
            assert np.array_equal(
                np.asarray(tensor), np.asarray(torch.as_tensor(batches[1][name]).cpu())
            ), (name, added)


def test_a_copied_replay_follows_a_loaded_state() -> None:
    source, target = filled_replay("sac"), filled_replay("sac", CPU, steps=7)
    target.sample(8, torch.Generator())
    target.load_ring_state(source.ring_state())
    for index in range(source.num_chunks):
        target.load_chunk(index, source.chunk_state(index))
    a, b = (one.sample(64, torch.Generator().manual_seed(0)) for one in (source, target))
    for name, tensor in a.items():
        assert np.array_equal(np.asarray(tensor), np.asarray(b[name])), name


def test_what_needs_a_device_is_refused_without_one(make_config: Any) -> None:
    with pytest.raises(ConfigError, match="cudagraph needs device: cuda, but the device is cpu"):
        ExperimentManager.setup(make_config(algo="sac", acceleration="cudagraph"))
    with pytest.raises(ConfigError, match=r"replay_device.*on the CPU"):
        ExperimentManager.setup(make_config(algo="sac", replay_device="accelerator"))
