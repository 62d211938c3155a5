"""The accelerator path, where there is one: same interface, same checkpoints, close numbers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from atari_runs import QUICK_ATARI
from conftest import MakeConfig, probe
from rl_training.checkpointing import load_checkpoint
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.actors import _Chooser
from rl_training.runtime.workflows import load_policy, resume_training
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, VectorStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
@pytest.mark.parametrize("acceleration", ["eager", "compile", "cudagraph"])
@pytest.mark.parametrize("vectorization", ["sync", "native"])
@pytest.mark.parametrize("algo", ["ppo", "a2c", "ppg"])
def test_trains_resumes_and_loads_on_the_cpu(
    algo: str, acceleration: str, vectorization: str, make_config: MakeConfig
) -> None:
    config = make_config(
        algo=algo,
        device="cuda",
        acceleration=acceleration,
        vectorization=vectorization,
        normalize_obs=True,
        normalize_reward=True,
    )
    result = ExperimentManager.setup(config).train()
    assert result.metrics["global_step"] >= 512
    longer = resume_training(result.run_dir, total_timesteps=1024)
    assert longer.metrics["global_step"] >= 1024
    obs = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    here, there = (load_policy(result.run_dir, device=d) for d in ("cpu", "cuda"))
    assert np.array_equal(here.act(obs), there.act(obs))
    if acceleration == "cudagraph":
        with pytest.raises(ConfigError, match="set acceleration to eager or compile"):
            resume_training(result.run_dir, total_timesteps=1280, device="cpu")
    moved = resume_training(
        result.run_dir, total_timesteps=1280, device="cpu", acceleration="eager"
    )
    assert moved.metrics["global_step"] >= 1280


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
def test_a_first_update_agrees_with_the_cpu(make_config: MakeConfig) -> None:
    models = []
    for device in ("cpu", "cuda"):
        config = make_config(device=device, total_timesteps=128, env_id="Pendulum-v1")
        run = ExperimentManager.setup(config).train()
        models.append(load_checkpoint(run.checkpoint_path)["algorithm"]["model"])
    for name, cpu in models[0].items():
        cuda: Any = models[1][name]
        assert torch.allclose(cpu, cuda, atol=2e-3), name


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
@pytest.mark.parametrize("place", ["cpu", "accelerator"])
@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_off_policy_runs_in_graphs_and_resumes_on_the_cpu(
    algo: str, place: str, make_config: MakeConfig
) -> None:
    config = make_config(
        algo=algo, device="cuda", acceleration="cudagraph", replay_device=place, num_envs=3
    )
    result = ExperimentManager.setup(config).train()
    longer = resume_training(result.run_dir, total_timesteps=1024)
    assert longer.metrics["global_step"] >= 1024
    obs = np.random.default_rng(0).normal(size=(6, 4 if algo == "dqn" else 3)).astype(np.float32)
    here, there = (load_policy(result.run_dir, device=d) for d in ("cpu", "cuda"))
    np.testing.assert_allclose(here.act(obs), there.act(obs), atol=1e-5)


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
def test_graphs_learn(make_config: MakeConfig) -> None:
    config = make_config(
        algo="sac",
        device="cuda",
        acceleration="cudagraph",
        num_envs=8,
        total_timesteps=8192,
        eval_episodes=20,
        learning_rate=3e-3,
        gamma=0.9,
        gradient_steps=2,
        train_freq=8,
        tau=0.05,
        **probe("sac", "MatchObservation"),
    )
    assert ExperimentManager.setup(config).train().metrics["eval/return_min"] == 1.0


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("acceleration", ["eager", "cudagraph"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_atari_trains_and_its_policy_moves_to_the_cpu(
    algo: str, acceleration: str, precision: str, make_config: MakeConfig
) -> None:
    pytest.importorskip("ale_py")
    settings: dict[str, Any] = {
        **QUICK_ATARI[algo],
        "device": "cuda",
        "acceleration": acceleration,
        "precision": precision,
        "vectorization": "native",
        "num_envs": 2,
        "total_timesteps": 256,
    }
    result = ExperimentManager.setup(make_config(algo=algo, **settings)).train()
    assert result.metrics["global_step"] == 256
    longer = resume_training(result.run_dir, total_timesteps=320)
    assert longer.metrics["global_step"] == 320
    frames = np.random.default_rng(0).integers(0, 256, (6, 4, 84, 84), dtype=np.uint8)
    here, there = (load_policy(result.run_dir, device=d) for d in ("cpu", "cuda"))
    same = here.act(frames) == there.act(frames)
    assert same.all() if precision == "float32" else same.mean() >= 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = resume_training(
            result.run_dir, total_timesteps=352, device="cpu", acceleration="eager"
        )
    assert moved.metrics["global_step"] == 352


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
def test_a_rollout_holds_what_the_environments_showed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observations reach it through the accelerator, one by one and in halves."""
    pytest.importorskip("ale_py")
    shown: list[Any] = []
    real = RolloutBuffer.add

    def add(self: RolloutBuffer, obs: Any, *rest: Any) -> None:
        shown.append(np.array(obs))
        real(self, obs, *rest)

    monkeypatch.setattr(RolloutBuffer, "add", add)
    for overlap in (False, True):
        for acceleration in ("eager", "cudagraph"):
            config = make_config(
                **{
                    "algo": "ppo",
                    **QUICK_ATARI["ppo"],
                    "device": "cuda",
                    "acceleration": acceleration,
                    "vectorization": "native",
                    "overlap": overlap,
                    "eval_episodes": 0,
                }
            )
            trainer: Any = ExperimentManager.setup(config)
            shown.clear()
            trainer.train()
            stored = trainer.buffer.obs.cpu().numpy()
            assert np.array_equal(stored, np.stack(shown[-len(stored) :])), (overlap, acceleration)


@pytest.mark.filterwarnings("ignore:resume of this run will be approximate")
@pytest.mark.parametrize("algo", ["recurrent_ppo", "drqn"])
def test_memory_works_there_and_moves_to_the_cpu(
    algo: str, make_config: MakeConfig, recwarn: pytest.WarningsRecorder
) -> None:
    hidden = ["rl_training.envs.wrappers:HideVelocities"]
    config = make_config(algo=algo, device="cuda", wrappers=hidden, num_envs=4)
    result = ExperimentManager.setup(config).train()
    longer = resume_training(result.run_dir, total_timesteps=1024)
    assert longer.metrics["global_step"] >= 1024
    rng = np.random.default_rng(0)
    here: Any = load_policy(result.run_dir, device="cpu")
    there: Any = load_policy(result.run_dir, device="cuda")
    state = other = None
    for _ in range(5):
        obs = rng.normal(size=(6, 2)).astype(np.float32)
        action, state = here.predict(obs, state)
        same, other = there.predict(obs, other)
        assert np.array_equal(action, same)
        np.testing.assert_allclose(state, other, atol=2e-3)  # cuDNN multiplies in TF32
    moved = resume_training(result.run_dir, total_timesteps=1280, device="cpu")
    assert moved.metrics["global_step"] >= 1280
    assert not [w for w in recwarn if "RNN module" in str(w.message)]


def keep_busy() -> None:
    """Queue about a second of work: what is queued next runs long after the host wrote on."""
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]


def step_of(value: float, num_envs: int, obs: Any) -> VectorStep:
    """A step whose reward and end are those of ``value``."""
    ends, never = np.full(num_envs, value == 2.0), np.zeros(num_envs, bool)
    return VectorStep(obs, obs, np.full(num_envs, value), ends, never, ~ends, ())


def test_a_rollout_is_not_overwritten_before_it_is_sent() -> None:
    num_steps, num_envs = 128, 256
    buffer = RolloutBuffer(num_steps, num_envs, (3,), (), device="cuda")
    # On the host, since its copy to the device would wait for all copies before it.
    buffer.next_obs = torch.zeros(num_envs, 3)
    obs, shown = np.zeros((num_envs, 3), np.float32), torch.zeros(num_envs, 3, device="cuda")

    def add(value: float, steps: int) -> None:
        for _ in range(steps):
            step = step_of(value, num_envs, obs)
            buffer.add(obs, np.full(num_envs, value), {"obs": shown}, step)

    add(1.0, num_steps)
    torch.cuda.synchronize()
    buffer.reset()
    keep_busy()
    add(2.0, num_steps)
    buffer.reset()
    add(3.0, num_steps - 1)
    torch.cuda.synchronize()
    assert (buffer.actions == 2.0).all()
    assert (buffer.rewards == 2.0).all()
    assert (buffer.dones == 1.0).all()
    assert not buffer.valid.any()


def test_observations_are_not_overwritten_before_they_are_sent() -> None:
    class Model:
        sees_images = False

        def numpy_actor(self) -> None:
            return None

    model: Any = Model()
    chooser = _Chooser(model, torch.device("cuda"))
    obs = np.zeros((64, 1024), np.float32)
    chooser.sent(obs)
    torch.cuda.synchronize()
    keep_busy()
    sent = []
    for value in range(8):
        obs[:] = value
        sent.append(chooser.sent(obs))
    obs[:] = -1.0
    torch.cuda.synchronize()
    for value, there in enumerate(sent):
        assert (there == value).all(), value


def test_a_replay_is_not_overwritten_before_it_is_copied() -> None:
    obs_spec = ObsSpec({"": ArraySpec((256,), "float32")})
    action_spec = ActionSpec("discrete", (), "int64", nvec=(5,), start=(0,))
    host = ReplayBuffer(512, 4, obs_spec, action_spec)
    copied = ReplayBuffer(512, 4, obs_spec, action_spec, device=torch.device("cuda"))

    def add(first: int, count: int) -> None:
        for t in range(first, first + count):
            obs = np.full((4, 256), t, np.float32)
            ends, never = np.full(4, t % 7 == 0), np.zeros(4, bool)
            step = VectorStep(obs + 1, obs + 0.5, np.full(4, t), ends, never, ~never, ())
            for replay in (host, copied):
                replay.add(obs, np.full(4, t % 5), {}, step)

    def drawn(replay: ReplayBuffer) -> dict[str, Any]:
        return replay.sample(256, torch.Generator().manual_seed(1))

    add(0, 100)
    drawn(copied)
    add(100, 60)
    torch.cuda.synchronize()
    keep_busy()
    there, here = drawn(copied), drawn(host)
    add(160, 300)
    torch.cuda.synchronize()
    for key in ("obs", "actions", "next_obs", "rewards", "discounts"):
        assert torch.equal(there[key].cpu(), here[key]), key
