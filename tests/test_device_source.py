"""Training on environments whose steps are tensors: `DeviceSource` and `DeviceRollout`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import MakeConfig, any_env
from recorded_graph import RecordedGraph
from rl_training import PPO, SAC, train_ppo, train_sac
from rl_training.config import TrainConfig
from rl_training.data.device_rollout import DeviceRollout
from rl_training.device_envs import DeviceStep, register_device_env
from rl_training.device_envs.classic import CartPole, Pendulum
from rl_training.device_envs.vector import DeviceVector
from rl_training.errors import CheckpointError, ConfigError, NonFiniteError, Paused
from rl_training.eval import make_eval_env
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runtime import device
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.workflows import resume_training
from rl_training.types import ActionSpec, ArraySpec, ObsSpec
from state_compare import assert_same_run, differences, final_state, metric_rows
from test_pause import Interruptions, finish
from test_resume import run_and_kill

REPLAY: dict[str, Any] = {
    "num_envs": 16,
    "total_timesteps": 2048,
    "learning_starts": 256,
    "train_freq": 64,
    "gradient_steps": 3,
    "batch_size": 16,
    "buffer_size": 800,
    "hidden_sizes": [16],
}
ON_DEVICE = [name for name, entry in ALGORITHMS.items() if entry.device_envs]
KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 16},
    "a2c": {"num_steps": 16},
    "ppg": {"num_steps": 16, "policy_phases": 2, "aux_epochs": 1},
    "dqn": {**REPLAY, "n_step": 3},
    "sac": {**REPLAY, "env_kwargs": {"max_episode_steps": 20}},
    "td3": {**REPLAY, "env_kwargs": {"max_episode_steps": 20}},
}
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "total_timesteps": 256,
    "eval_episodes": 0,
    "tensorboard": False,
    "progress": False,
}


class Walk:
    """Nothing is random; an episode is truncated after 7 steps, or ends at 3 steps to a side."""

    obs_spec = ObsSpec({"": ArraySpec((2,), "float32")})
    action_spec = ActionSpec("discrete", (), "int64", nvec=(2,), start=(1,))
    name = "Walk"

    def __init__(self, num_envs: int, device: Any, *, finals: bool = True) -> None:
        self.num_envs, self.device, self._finals = num_envs, torch.device(device), finals

    def reset(self, seed: int) -> Tensor:
        self._at = torch.zeros(self.num_envs)
        self._steps = torch.arange(self.num_envs, dtype=torch.float32) % 3
        return self._obs()

    def _obs(self) -> Tensor:
        return torch.stack((self._at, self._steps), 1)

    def step(self, action: Tensor) -> DeviceStep:
        assert ((action == 1) | (action == 2)).all()
        self._at = self._at + 2 * action - 3
        self._steps = self._steps + 1
        terminated, truncated = self._at.abs() == 3, self._steps == 7
        final, reward = self._obs(), self._at.clone()
        ended = terminated | truncated
        self._at, self._steps = (x.masked_fill(ended, 0.0) for x in (self._at, self._steps))
        finals = final if self._finals else None
        return DeviceStep(self._obs(), finals, reward, terminated, truncated)


class SavedWalk(Walk):
    """Offers its state, and draws random numbers from a stream that is a part of it."""

    def reset(self, seed: int) -> Tensor:
        self._generator = torch.Generator().manual_seed(seed)
        return super().reset(seed)

    def step(self, action: Tensor) -> DeviceStep:
        step = super().step(action)
        return step._replace(reward=torch.rand(self.num_envs, generator=self._generator))

    def state_dict(self) -> dict[str, Any]:
        state = {"at": self._at, "steps": self._steps}
        return {**state, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self._at, self._steps = state["at"].clone(), state["steps"].clone()
        self._generator.set_state(state["generator"])


def config_for(make_config: MakeConfig, algo: str, **settings: Any) -> TrainConfig[Any]:
    common = {**SMALL, "vectorization": "device", "log_interval_steps": 1}
    return make_config(algo=algo, **{**common, **KNOBS[algo], "env_id": any_env(algo), **settings})


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        if event.step >= self.step:
            trainer.stopping.signals.received = "SIGTERM"


@pytest.mark.parametrize("algo", ON_DEVICE)
def test_a_seed_decides_a_run_and_a_resumed_one_is_the_same(
    algo: str, make_config: MakeConfig
) -> None:
    settings: dict[str, Any] = {"eval_episodes": 2, "normalize_obs": True}
    settings["eval_interval"] = KNOBS[algo].get("total_timesteps", SMALL["total_timesteps"]) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = ExperimentManager.setup(config_for(make_config, algo, **settings)).train()
        again = ExperimentManager.setup(config_for(make_config, algo, **settings)).train()
        other = ExperimentManager.setup(config_for(make_config, algo, **settings, seed=9)).train()
        stops = [StopAt(100)]
        config = config_for(make_config, algo, **settings)
        part = ExperimentManager.setup(config, callbacks=stops).train()
        assert part.interrupted
        resume_training(part.run_dir)
    assert_same_run(whole.run_dir, again.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)
    models = [final_state(run.run_dir)["algorithm"]["model"] for run in (whole, other)]
    assert differences(*models)
    assert any("rollout/return_mean" in row for row in metric_rows(whole.run_dir))


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_run_that_is_stopped_between_any_steps_ends_the_same(
    algo: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A replay of eight rows is overwritten many times, chunk by chunk.
    monkeypatch.setattr("rl_training.data.transition_ring._CHUNK_BYTES", 1000)
    total = 1024 if algo == "sac" else 128
    settings: dict[str, Any] = {"total_timesteps": total, "env_id": "Pendulum-v1"}
    settings |= {"env_kwargs": {"max_episode_steps": 5}}
    settings |= {"buffer_size": 128} if algo == "sac" else {}
    whole = ExperimentManager.setup(config_for(make_config, algo, **settings)).train()
    interruptions = Interruptions(monkeypatch)
    trainer = ExperimentManager.setup(config_for(make_config, algo, **settings))
    interruptions.at = 5
    part = trainer.train()
    assert part.interrupted
    part = finish(part, interruptions, gap=37)
    assert_same_run(whole.run_dir, part.run_dir)


def test_a_killed_run_with_a_replay_ends_as_one_that_was_not(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = config_for(
        make_config, "sac", total_timesteps=4096, checkpoint_interval=1000, progress=False
    )
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "3000")
    assert metric_rows(killed) != metric_rows(whole.run_dir)
    assert len(list((killed / "replay").iterdir())) >= 1
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def trained(**settings: Any) -> OnPolicyTrainer:
    model = PPO(**{**SMALL, "num_steps": 16, "hidden_sizes": [16], **settings})
    model.learn(run_dir=None)
    assert isinstance(model._in_memory, OnPolicyTrainer)
    return model._in_memory


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_it_learns_and_reports_what_the_host_does() -> None:
    on_device = trained(device_env_fn=Walk)
    on_host = trained(vector_fn=lambda count: DeviceVector(Walk(count, "cpu")))
    # The host chooses actions in NumPy, which rounds differently.
    weights = [run.learner.module.state_dict().values() for run in (on_device, on_host)]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert on_device.source.metrics() == pytest.approx(on_host.source.metrics())
    mine, theirs = on_device.buffer, on_host.buffer
    for name in ("rewards", "dones", "actions", "advantages", "bootstrap"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), atol=1e-5, rtol=1e-4)
    assert (mine.bootstrap != 0).any()


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {}),
        ("ppo", {"target_kl": 1e-3, "learning_rate": 3e-3, "normalize_obs": True}),
        ("ppg", {}),
    ],
)
def test_rollouts_and_epochs_as_one_function_are_the_same_step_by_step(
    algo: str, settings: dict[str, Any], make_config: MakeConfig
) -> None:
    """These functions are what CUDA graphs are captured from."""
    runs = []
    for whole in (False, True):
        trainer: Any = ExperimentManager.setup(config_for(make_config, algo, **settings))
        trainer.source.collects_whole = trainer.learner.learns_whole = whole
        runs.append(trainer.train().run_dir)
    assert_same_run(*runs)
    epochs = [row["losses/epochs"] for row in metric_rows(runs[0]) if "losses/epochs" in row]
    assert (min(epochs) < 4) == bool(settings)


def in_graphs(trainer: Any) -> Any:
    """Record and replay what would be captured as CUDA graphs."""
    source, learner = trainer.source, trainer.learner
    source.collects_whole = True
    for name in ("_one", "_whole"):
        setattr(source, name, RecordedGraph(getattr(source, name)))
    if hasattr(trainer, "replay"):
        updates = learner._updates

        def recorded() -> Any:
            return {key: RecordedGraph(one) for key, one in updates().items()}

        learner._updates = recorded
        learner._run = recorded()
        return trainer
    learner.learns_whole = True
    for name in ("_evaluate_all", "_run_epochs", "_run_update", "_run_auxiliary"):
        if hasattr(learner, name):
            setattr(learner, name, RecordedGraph(getattr(learner, name)))
    return trainer


@pytest.mark.parametrize("algo", ON_DEVICE)
def test_graphs_that_run_no_python_compute_the_same(algo: str, make_config: MakeConfig) -> None:
    """The numbers that graphs read from the host must not change between calls."""
    constant = {"lr_schedule": "constant"}  # a tensor on CUDA
    settings = {**constant, "total_timesteps": 2 * KNOBS[algo].get("total_timesteps", 320)}
    runs = []
    for prepare in (in_graphs, lambda trainer: trainer):
        trainer = ExperimentManager.setup(config_for(make_config, algo, **settings))
        runs.append(prepare(trainer).train().run_dir)
        if len(runs) == 1:
            assert RecordedGraph.replays > 10
            RecordedGraph.replays = 0
    assert_same_run(*runs)


def test_epochs_as_one_function_can_be_stopped_before(make_config: MakeConfig) -> None:
    trainer: Any = ExperimentManager.setup(config_for(make_config, "ppo"))
    progress = trainer_progress(trainer)
    trainer.source.collect(trainer.buffer, 16, progress)
    trainer.learner.learns_whole = True
    with pytest.raises(Paused):
        trainer.learner.learn(trainer.buffer, progress, lambda: True)
    trainer.close()


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_without_final_observations_truncation_is_approximate() -> None:
    def make(count: int, place: Any) -> Walk:
        return Walk(count, place, finals=False)

    with pytest.warns(UserWarning, match="approximate truncation: Walk returns no final obs"):
        rollout: Any = trained(device_env_fn=make).buffer
    assert rollout.final_obs is None
    expected = torch.where(rollout.truncated, rollout.values, 0.0)
    assert torch.equal(rollout.bootstrap, expected)
    assert rollout.truncated.any()


class Synchronisations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations for which the host waits for a device."""

    NAMES = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(self.NAMES):
            self.found.append(str(func))
        indices = args[1] if str(func).startswith(("aten.index.", "aten.index_put")) else []
        if any(getattr(one, "dtype", None) == torch.bool for one in indices):
            self.found.append(f"{func} with a mask")
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing_while_it_collects_and_learns(make_config: MakeConfig) -> None:
    for algo in ("ppo", "a2c"):
        for env_id in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"):
            trainer: Any = ExperimentManager.setup(config_for(make_config, algo, env_id=env_id))
            rollout = trainer.buffer
            progress = trainer_progress(trainer)
            trainer.learner.learns_whole = True
            trainer.source.collect(rollout, 15, progress)  # the last step reads the sums
            with Synchronisations() as waits:
                trainer.source.collect(rollout, 1, progress)
                trainer.learner.learn(rollout, progress)
            assert waits.found == []
            trainer.close()
    with Synchronisations() as waits:
        float(torch.ones(1) + 1)
    assert waits.found


@pytest.mark.parametrize("algo", ["sac", "td3", "dqn"])
def test_the_host_waits_twice_in_an_iteration_of_many_updates(
    algo: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = ExperimentManager.setup(config_for(make_config, algo))
    progress = trainer_progress(trainer)
    trainer.iterate(progress)
    transfers: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        real = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, real: Any = real, name: str = name) -> Any:
            transfers.append(name)
            return real(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    trainer._pending += 20
    with Synchronisations() as waits:
        assert trainer.iterate(progress) is not None
    monkeypatch.undo()
    assert trainer.learner.num_updates >= 50
    assert waits.found == []
    assert transfers == ["tolist", "tolist"]  # sums of episodes, means of losses
    trainer.close()


def trainer_progress(trainer: Any) -> Any:
    from rl_training.types import Progress

    return Progress(0, trainer.total)


class Broken(Walk):
    def step(self, action: Tensor) -> DeviceStep:
        step = super().step(action)
        self.count = getattr(self, "count", 0) + 1
        if self.count == 20:
            step.reward[2] = torch.nan
        return step


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_a_nan_names_its_environment() -> None:
    with pytest.raises(NonFiniteError, match="environment 2 returned a non-finite reward in step"):
        trained(device_env_fn=Broken)


def test_evaluation_is_on_gymnasiums_environment() -> None:
    config: TrainConfig[Any] = TrainConfig(vectorization="device")
    env: Any = make_eval_env(config, 2)
    assert type(env.env.envs[0].unwrapped) is gym.make("CartPole-v1").unwrapped.__class__
    env.close()


class SingleWalk(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2, start=1)
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 5.0, True, False, {}


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_device_env_fn_is_evaluated_on_env_fn_or_on_another_of_its_own() -> None:
    settings = {**SMALL, "eval_episodes": 3, "num_steps": 16}
    result = PPO(device_env_fn=Walk, **settings).learn(run_dir=None)
    assert 1 <= result.metrics["eval/length_mean"] <= 7
    single = PPO(device_env_fn=Walk, env_fn=SingleWalk, **settings).learn(run_dir=None)
    assert single.metrics["eval/return_mean"] == 5.0
    assert SingleWalk.made == 3


def test_device_env_fn_with_a_state_resumes_exactly_and_is_needed_again(tmp_path: Path) -> None:
    settings = {**SMALL, "num_steps": 16, "output_dir": tmp_path}
    make: Any = {"device_env_fn": SavedWalk}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = train_ppo(TrainConfig(), **make, **settings)
        part = train_ppo(TrainConfig(), callbacks=[StopAt(100)], **make, **settings)
        with pytest.raises(CheckpointError, match="trained with env_fn"):
            resume_training(part.run_dir)
        resume_training(part.run_dir, **make)
    assert_same_run(whole.run_dir, part.run_dir)


def test_without_a_state_the_resume_is_declared_approximate(tmp_path: Path) -> None:
    settings = {**SMALL, "num_steps": 16, "output_dir": tmp_path}
    with pytest.warns(UserWarning, match="resume of this run will be approximate"):
        part = train_ppo(TrainConfig(), callbacks=[StopAt(100)], device_env_fn=Walk, **settings)
    with pytest.warns(UserWarning, match="approximate|exactly"):
        result = resume_training(part.run_dir, device_env_fn=Walk)
    assert result.metrics["global_step"] == 256


def test_any_algorithm_trains_on_the_vector_of_a_device_environment(tmp_path: Path) -> None:
    def make(count: int) -> DeviceVector:
        return DeviceVector(Pendulum(count, max_episode_steps=20))

    settings = {**SMALL, "output_dir": tmp_path, "learning_starts": 64, "batch_size": 16}
    settings |= {"hidden_sizes": [16], "train_freq": 16, "total_timesteps": 1400}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = train_sac(TrainConfig(), vector_fn=make, **settings)
        part = train_sac(TrainConfig(), vector_fn=make, callbacks=[StopAt(900)], **settings)
        assert part.interrupted
        resume_training(part.run_dir, vector_fn=make)
    assert_same_run(whole.run_dir, part.run_dir)


def test_ids_can_be_registered(make_config: MakeConfig) -> None:
    def make(num_envs: int, place: Any, **kwargs: Any) -> CartPole:
        return CartPole(num_envs, place, **kwargs)

    register_device_env("CartPole-v0", make)
    result = ExperimentManager.setup(
        config_for(make_config, "ppo", env_id="CartPole-v0", eval_episodes=1)
    ).train()
    assert result.metrics["eval/episodes"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algo": "drqn"},
            "vectorization: device does not work with drqn; use ppo, a2c, ppg, dqn, sac or td3",
        ),
        (
            {"algo": "dqn", "algo_kwargs": {"prioritized": True}},
            "'algo_kwargs.prioritized' must be false with vectorization: device",
        ),
        (
            {"algo": "dqn", "algo_kwargs": {"noisy": True}},
            "'algo_kwargs.noisy' must be false with vectorization: device",
        ),
        ({"normalize_reward": True}, "'normalize_reward' must be false with vectorization: device"),
        ({"device": "mps"}, "'device' must be auto, cpu or cuda with vectorization: device"),
        ({"shards": 2}, "'shards' must be 1 with vectorization: device"),
        ({"log_info": ["a"]}, "'log_info' must be empty with vectorization: device"),
        ({"env_id": "LunarLander-v3"}, "no environment 'LunarLander-v3' on a device"),
        ({"env_kwargs": {"gravity": 1}}, "cannot make CartPole-v1 on a device"),
        ({"env_fn": SingleWalk}, "give an env_id or device_env_fn"),
        ({"device_env_fn": SingleWalk}, "takes 1 positional argument"),
        ({"device_env_fn": lambda n, d: SingleWalk()}, "which has no num_envs, device"),
        ({"device_env_fn": lambda n, d: Walk(3, d)}, "called with 4 and returned 3"),
        ({"device_env_fn": 5}, "'device_env_fn' must be a function"),
        ({"device_env_fn": Walk, "vector_fn": Walk}, "give one of them"),
    ],
)
def test_what_does_not_work_is_refused(settings: dict[str, Any], message: str) -> None:
    given = {k: settings[k] for k in ("env_fn", "vector_fn", "device_env_fn") if k in settings}
    config = {k: v for k, v in settings.items() if k not in given}
    with pytest.raises((ConfigError, TypeError), match=message):
        ExperimentManager.setup(
            TrainConfig(**{**SMALL, "vectorization": "device", **config}), run_dir=None, **given
        )


def test_auto_is_the_accelerator_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.pick_device("auto", None).type == "cpu" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device.pick_device("auto", None) == torch.device("cuda", 0)
    vectors = ObsSpec({"": ArraySpec((2,), "float32")})
    assert device.pick_device("auto", vectors) == torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.learn
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_learns_cartpole_on_the_device_and_plays_gymnasiums(seed: int) -> None:
    model = PPO(
        "CartPole-v1",
        vectorization="device",
        seed=seed,
        **{**SMALL, "num_envs": 32, "total_timesteps": 150_000},
        num_steps=32,
        update_epochs=10,
        learning_rate=1e-3,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
    )
    model.learn(run_dir=None)
    assert model.evaluate(100, seed=1000 + seed).mean_return >= 475


@pytest.mark.learn
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sac_learns_pendulum_on_the_device_and_plays_gymnasiums(seed: int) -> None:
    model = SAC(
        "Pendulum-v1",
        vectorization="device",
        seed=seed,
        **{**SMALL, "num_envs": 8, "total_timesteps": 14_000},
        learning_starts=1000,
        train_freq=8,
        gradient_steps=6,
        hidden_sizes=[64, 64],
        learning_rate=2e-3,
        batch_size=128,
        buffer_size=20_000,
        gamma=0.95,
    )
    model.learn(run_dir=None)
    assert model.evaluate(20, seed=1000 + seed).mean_return >= -250


def test_episodes_that_cannot_continue_are_truncated_in_the_rollout() -> None:
    rollout = DeviceRollout(4, 3, (2,), (), action_dtype=torch.int64)
    env = Walk(3, "cpu")
    obs = env.reset(0)
    for _ in range(3):
        step = env.step(torch.full((3,), 2))
        rollout.add(obs, torch.ones(3, dtype=torch.int64), {}, step)
        obs = step.obs
    assert rollout.dones[2].tolist() == [1, 1, 1]  # three steps to the right
    assert rollout.truncate(obs, {}).tolist() == []
    step = env.step(torch.tensor([1, 2, 2]))
    rollout.add(obs, torch.ones(3, dtype=torch.int64), {}, step)
    assert rollout.truncate(np.asarray(step.obs + 5), {}).tolist() == [0, 1, 2]
    assert rollout.dones[3].tolist() == [1, 1, 1]
    assert not rollout.truncated[2].any()
    rollout.fill_bootstrap(lambda flat: flat.sum(1))
    assert torch.equal(rollout.bootstrap[3], (step.obs + 5).sum(1))
    assert not rollout.bootstrap[:3].any()
