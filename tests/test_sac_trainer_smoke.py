"""SAC and TD3 on the runtime: warm-up, scales, resume, refusals; what is SAC's own at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training
from conftest import MakeConfig
from rl_training.config import config_from_file
from rl_training.errors import ConfigError, NonFiniteError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.sac_trainer import train_sac
from rl_training.runtime.workflows import evaluate_checkpoint, load_policy, resume_training
from state_compare import assert_same_run
from test_resume import run_and_kill

BOTH = pytest.mark.parametrize("algo", ["sac", "td3"])


def actions_taken(trainer: Any) -> np.ndarray[Any, Any]:
    """Train, and return every action as the policy gave it."""
    seen: list[np.ndarray[Any, Any]] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(action: Any) -> Any:
            seen.append(np.array(action))
            return function(action)

        return step if part == "environment" else function

    trainer.measure(timed)
    trainer.train()
    return np.concatenate(seen)


@pytest.mark.filterwarnings("ignore:nothing will be learnt")
@BOTH
def test_warm_up_is_uniform_and_learns_nothing(algo: str, make_config: MakeConfig) -> None:
    config = make_config(algo=algo, learning_starts=2000, total_timesteps=2000, eval_episodes=0)
    trainer = ExperimentManager.setup(config)
    before = [p.clone() for p in trainer.algorithm.module.parameters()]
    actions = actions_taken(trainer)
    after = trainer.algorithm.module.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    counts, _ = np.histogram(actions, bins=10, range=(-1, 1))
    assert counts.sum() == 2000
    assert counts.min() > 140  # 200 each; three deviations are 40
    assert counts.max() < 260


@pytest.mark.filterwarnings("ignore:nothing will be learnt")
@BOTH
def test_after_it_actions_are_the_policys_with_noise(algo: str, make_config: MakeConfig) -> None:
    config = make_config(
        algo=algo,
        learning_starts=100,
        total_timesteps=500,
        num_envs=1,
        train_freq=10_000,
        buffer_size=500,
    )
    trainer = ExperimentManager.setup(config)
    assert isinstance(trainer, OffPolicyTrainer)
    actions = actions_taken(trainer)[100:]
    model: Any = trainer.algorithm.module
    obs = torch.from_numpy(trainer.replay._obs.rows[100:500, 0])
    greedy = model.actor.actions(obs).detach().numpy()
    away = actions - greedy
    assert (away != 0).all()
    assert np.abs(actions).max() <= 1
    if algo == "td3":
        assert 0.08 < away.std() < 0.12  # exploration_noise 0.1


@BOTH
@pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.full), 3])
def test_killed_and_resumed_equals_never_stopped(
    algo: str, num_envs: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        algo=algo,
        num_envs=num_envs,
        total_timesteps=3000,
        checkpoint_interval=1000,
        eval_interval=1000,
        train_freq=7,
        gradient_steps=0.9,
        n_step=2,
    )
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "2000")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


@pytest.mark.parametrize("algo", ["sac", pytest.param("td3", marks=pytest.mark.full)])
def test_mujoco_is_resumed_exactly(algo: str, make_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    config = make_config(
        algo=algo, env_id="HalfCheetah-v5", total_timesteps=2000, checkpoint_interval=1000
    )
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "1500")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


@BOTH
def test_box2d_async_workers(algo: str, make_config: MakeConfig) -> None:
    pytest.importorskip("Box2D")
    config = make_config(
        algo=algo,
        env_id="LunarLander-v3",
        env_kwargs={"continuous": True},
        vectorization="async",
        total_timesteps=600,
    )
    result = ExperimentManager.setup(config).train()
    action = load_policy(result.run_dir).act(np.zeros(8, np.float32))
    assert action.shape == (2,)


class Unbounded(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class HalfBounded(Unbounded):
    action_space = gym.spaces.Box(np.array([0.0, 0.0]), np.array([1.0, np.inf]), dtype=np.float64)


@BOTH
def test_actions_it_cannot_take_are_refused_naming_who_can(
    algo: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=rf"{algo} takes bounded Box .* not Discrete.*ppo, .*dqn"):
        ExperimentManager.setup(make_config(algo=algo, env_id="CartPole-v1"))
    for env in (Unbounded, HalfBounded):
        with pytest.raises(ConfigError, match=r"not unbounded Box ones; use ppo, .*recurrent_ppo"):
            ExperimentManager.setup(make_config(algo=algo), env_fn=env)


@BOTH
def test_the_managed_class_learns_saves_loads_and_predicts_in_bounds(
    algo: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    cls = getattr(rl_training, algo.upper())
    agent = cls(make_config(algo=algo))
    agent.learn()
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    actions = agent.act(obs)
    assert actions.shape == (50, 1)
    assert (np.abs(actions) <= 2).all()  # Pendulum's torque
    loaded = cls.load(agent.save(tmp_path / "policy"))
    assert np.array_equal(loaded.act(obs), actions)
    assert not np.array_equal(loaded.act(obs, deterministic=False), actions)
    assert agent.evaluate(2).returns == loaded.evaluate(2).returns


@BOTH
def test_weights_from_elsewhere_reach_the_targets(algo: str, make_config: MakeConfig) -> None:
    source = ExperimentManager.setup(make_config(algo=algo)).train()
    trainer = ExperimentManager.setup(make_config(algo=algo, seed=9, init_from=source.run_dir))
    trainer.close()
    state = trainer.algorithm.state_dict()
    target = state["target"] if algo == "sac" else state["target_critics"]
    for name, tensor in target.items():
        assert torch.equal(tensor, state["model"][f"critics.{name}"]), name


class FrozenEncoder(torch.nn.Module):
    output_size = 4

    def __init__(self, obs_spec: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(obs_spec.leaves[""].size, 4).requires_grad_(False)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(obs))


@BOTH
def test_frozen_weights_reach_the_targets_too(algo: str, make_config: MakeConfig) -> None:
    encoder = "test_sac_trainer_smoke:FrozenEncoder"
    source = ExperimentManager.setup(make_config(algo=algo, encoder=encoder)).train()
    config = make_config(algo=algo, encoder=encoder, seed=9, init_from=source.run_dir)
    trainer: Any = ExperimentManager.setup(config)
    trainer.close()
    target = trainer.algorithm.target if algo == "sac" else trainer.algorithm.target_critics
    theirs, ours = target.module.encoder.layer, trainer.algorithm.model.critics.encoder.layer
    assert torch.equal(theirs.weight, ours.weight)


@pytest.mark.parametrize(("theirs", "ours"), [(None, 0.2), (0.0, None), (0.3, 0.1)])
def test_a_temperature_is_never_taken_from_elsewhere(
    theirs: float | None, ours: float | None, make_config: MakeConfig
) -> None:
    source = train_sac(make_config(algo="sac", ent_coef=theirs))
    config = make_config(algo="sac", ent_coef=ours, seed=9, init_from=source.run_dir)
    trainer: Any = ExperimentManager.setup(config)
    trainer.close()
    found = float(trainer.algorithm.model.temperature.log_ent_coef.detach().exp())
    assert found == pytest.approx(1.0 if ours is None else ours)


class Scalars(gym.Env[Any, Any]):
    """Observations and actions that are single numbers, without a shape."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.float32(0.5), {}

    def step(self, action: Any) -> Any:
        return (
            np.float32(0.5),
            -(float(action) ** 2),
            False,
            bool(self.np_random.random() < 0.1),
            {},
        )


@BOTH
def test_spaces_without_a_shape(algo: str, make_config: MakeConfig) -> None:
    result = ExperimentManager.setup(make_config(algo=algo), env_fn=Scalars).train()
    assert result.metrics["global_step"] == 512


def test_an_empty_replay_is_filled_before_anything_is_learnt_again(
    make_config: MakeConfig,
) -> None:
    config = make_config(algo="sac", learning_starts=200, total_timesteps=1000)
    result = ExperimentManager.setup(config).train()
    trainer: Any = ExperimentManager.resume(result.run_dir, total_timesteps=2000, replay="empty")
    lengths: list[int] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if part == "update":
                lengths.append(len(args[0]))
            return function(*args, **kwargs)

        return noting

    trainer.measure(timed)
    trainer.train()
    assert min(lengths) >= 200
    assert sum(lengths) > 0


def test_many_updates_a_step_make_shorter_iterations(make_config: MakeConfig) -> None:
    config = make_config(algo="sac", gradient_steps=16.0, total_timesteps=600, batch_size=2)
    trainer = ExperimentManager.setup(config)
    trainer.train()
    assert trainer.iteration == 3  # four updates a step: 250 steps


class NanAtTheEnd(Scalars):
    """Its episodes end in a NaN that no policy ever sees, only the critics."""

    def step(self, action: Any) -> Any:
        ends = bool(self.np_random.random() < 0.05)
        return np.float32(np.nan if ends else 0.5), 0.0, False, ends, {}


@BOTH
def test_a_nan_is_traced_to_the_final_observation(algo: str, make_config: MakeConfig) -> None:
    with pytest.raises(NonFiniteError, match=r"returned a non-finite final observation in"):
        ExperimentManager.setup(make_config(algo=algo), env_fn=NanAtTheEnd).train()


def test_a_run_that_learns_nothing_says_so(make_config: MakeConfig) -> None:
    with pytest.warns(UserWarning, match="nothing will be learnt in 512 steps"):
        ExperimentManager.setup(make_config(algo="sac", learning_starts=512)).close()


def test_a_refused_replay_leaves_no_run_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower buffer_size"):
        ExperimentManager.setup(make_config(algo="sac", buffer_size=10**13))
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@BOTH
def test_presets_are_what_they_say(algo: str) -> None:
    for name, env_id in (("pendulum", "Pendulum-v1"), ("halfcheetah", "HalfCheetah-v5")):
        config = config_from_file(f"{algo}/{name}")
        assert (config.algo, config.env_id) == (algo, env_id)
        assert config.algo_kwargs.hidden_sizes == (256, 256)
        assert (config.algo_kwargs.train_freq, config.algo_kwargs.gradient_steps) == (1, 1.0)


def test_sac_logs_what_it_learns(make_config: MakeConfig) -> None:
    result = train_sac(make_config(algo="sac"))
    names = {"critic_loss", "q_mean", "actor_loss", "entropy", "ent_coef"}
    assert {f"losses/{name}" for name in names} <= set(result.metrics)
    sampled = evaluate_checkpoint(result.run_dir, num_episodes=3, deterministic=False)
    assert sampled.returns != evaluate_checkpoint(result.run_dir, num_episodes=3).returns
