"""Vectors that a function of the user's makes, and those of EnvPool and Stable-Baselines3."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from rl_training import PPO, train_ppo
from rl_training.config import TrainConfig
from rl_training.envs import VectorAdapter
from rl_training.envs.sb3 import SB3Vector
from rl_training.errors import CheckpointError, ConfigError, EnvironmentFailure
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, differences

SMALL: dict[str, Any] = {
    "num_envs": 2,
    "num_steps": 16,
    "total_timesteps": 128,
    "eval_episodes": 2,
    "hidden_sizes": [16],
    "tensorboard": False,
    "progress": False,
}


class Walk(gym.Env[Any, Any]):
    """Nothing is random; an episode is truncated after 9 steps, or ends at 4 steps to a side."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def _obs(self) -> Any:
        return np.array([self._at, self._steps], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = self._steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._at += 2 * int(action) - 1
        self._steps += 1
        ends = abs(self._at) == 4
        return self._obs(), float(self._at), ends, self._steps == 9, {}


def walks(num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([Walk] * num_envs, autoreset_mode=mode)


def sb3_walks(num_envs: int) -> SB3Vector:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    return SB3Vector(vec_env.DummyVecEnv([Walk] * num_envs))


class SavedCartPoles(CartPoleVectorEnv):
    """Offers its state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metadata = {**self.metadata, "rl_training/name": "SavedCartPoles"}

    def get_state(self) -> dict[str, Any]:
        rng = self.np_random.bit_generator.state
        own = {"state": self.state, "steps": self.steps, "prev_done": self.prev_done}
        return {**own, "rng": rng}

    def set_state(self, state: dict[str, Any]) -> Any:
        for name in ("state", "steps", "prev_done"):
            setattr(self, name, np.array(state[name], getattr(self, name).dtype))
        self.np_random.bit_generator.state = state["rng"]
        return np.asarray(self.state).T.astype(np.float32)


def trained(**settings: Any) -> dict[str, torch.Tensor]:
    """Weights after a run in memory."""
    model = PPO(**{**SMALL, **settings})
    model.learn(run_dir=None)
    weights: dict[str, torch.Tensor] = model.policy.module.state_dict()
    return weights


@pytest.mark.filterwarnings("ignore:resume of this run")
@pytest.mark.parametrize(
    "vector_fn",
    [walks, functools.partial(walks, mode=AutoresetMode.DISABLED), sb3_walks],
    ids=["same-step", "disabled", "sb3"],
)
def test_a_vector_learns_what_single_environments_do(vector_fn: Callable[[int], Any]) -> None:
    single = trained(env_fn=Walk, eval_episodes=0)
    assert differences(single, trained(vector_fn=vector_fn, eval_episodes=0)) == []


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_next_step_resets_are_not_counted_as_steps() -> None:
    model = PPO(vector_fn=functools.partial(walks, mode=AutoresetMode.NEXT_STEP), **SMALL)
    result = model.learn(run_dir=None)
    assert result.metrics["global_step"] >= 128
    assert result.metrics["global_step"] % 32 != 0  # rollouts contain rows that only reset
    assert result.metrics["eval/episodes"] == 2


class Evaluated(Walk):
    made = 0

    def __init__(self) -> None:
        type(self).made += 1


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_evaluation_is_on_env_fn_where_it_is_given_and_else_on_another_vector() -> None:
    sizes: list[int] = []

    def make(num_envs: int) -> VectorEnv[Any, Any, Any]:
        sizes.append(num_envs)
        return walks(num_envs)

    PPO(vector_fn=make, **{**SMALL, "eval_episodes": 3}).learn(run_dir=None)
    assert sizes == [2, 3]
    sizes.clear()
    Evaluated.made = 0
    config = TrainConfig(
        **{k: v for k, v in SMALL.items() if k not in ("num_steps", "hidden_sizes")}
    )
    model = PPO(config, vector_fn=make, env_fn=Evaluated, num_steps=16)
    assert model.learn(run_dir=None).metrics["eval/episodes"] == 2
    assert sizes == [2]
    assert Evaluated.made == 2


def test_a_vector_that_offers_its_state_resumes_exactly(tmp_path: Path) -> None:
    def make(num_envs: int) -> VectorEnv[Any, Any, Any]:
        return SavedCartPoles(num_envs=num_envs)

    settings = {**SMALL, "output_dir": tmp_path, "checkpoint_interval": 32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        straight = train_ppo(TrainConfig(), vector_fn=make, **settings).run_dir
        stopping: Any = {"vector_fn": make, "callbacks": [StopAt(60)]}
        stopped = train_ppo(TrainConfig(), **stopping, **settings)
    assert 60 <= stopped.metrics["global_step"] < 128
    with pytest.raises(CheckpointError, match="vector_fn"):
        resume_training(stopped.run_dir)
    assert_same_run(straight, resume_training(stopped.run_dir, vector_fn=make).run_dir)


class StopAt(Callback):
    """Stops as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        if event.step >= self.step:
            trainer.stopping.signals.received = "SIGTERM"


def test_a_vector_without_a_state_declares_its_resume_approximate(tmp_path: Path) -> None:
    settings = {**SMALL, "output_dir": tmp_path, "checkpoint_interval": 32}
    with pytest.warns(UserWarning, match="resume of this run will be approximate"):
        train_ppo(TrainConfig(), vector_fn=walks, **settings)


class Scaled(VectorWrapper):
    """Has a state of its own, which the state of the vector does not contain."""


def test_a_wrapper_around_a_vector_with_a_state_is_not_taken_for_exact() -> None:
    plain = VectorAdapter(CartPoleVectorEnv(num_envs=2), seed=1)
    assert plain.exactly_resumable
    assert not VectorAdapter(Scaled(CartPoleVectorEnv(num_envs=2)), seed=1).exactly_resumable
    assert not VectorAdapter(Scaled(SavedCartPoles(num_envs=2)), seed=1).exactly_resumable


class WithoutFinals(VectorWrapper):
    def step(self, actions: Any) -> Any:
        *rest, info = super().step(actions)
        return *rest, {k: v for k, v in info.items() if "final" not in k}


@pytest.mark.parametrize(
    ("vector_fn", "settings", "message"),
    [
        (walks(2), {}, "must be a function that takes the number"),
        (lambda n: Walk(), {}, "must return a gymnasium.vector.VectorEnv"),
        (lambda n: walks(3), {}, "was called with 2 and returned 3"),
        (lambda: walks(2), {}, "is called with the number of environments"),
        (walks, {"env_kwargs": {"a": 1}}, "'env_kwargs' has no effect on 'vector_fn'"),
        (walks, {"vectorization": "async"}, "'vectorization' has no effect on 'vector_fn'"),
        (walks, {"algo": "ippo"}, "ippo trains several agents"),
    ],
)
def test_what_cannot_be_used_is_refused(
    vector_fn: Any, settings: dict[str, Any], message: str
) -> None:
    common = {k: v for k, v in SMALL.items() if k not in ("num_steps", "hidden_sizes")}
    with pytest.raises(ConfigError, match=message):
        ExperimentManager.setup(
            TrainConfig(**{**common, **settings}), vector_fn=vector_fn, run_dir=None
        )


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_a_vector_that_returns_no_final_observations_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match=r"no final observations \(info\['final_obs'\]\)"):
        PPO(vector_fn=lambda n: WithoutFinals(walks(n)), **SMALL).learn(run_dir=None)


def test_an_id_beside_vector_fn_is_refused() -> None:
    with pytest.raises(ConfigError, match="an environment and env_fn, vector_fn or device_env"):
        PPO("CartPole-v1", vector_fn=walks)


# -- EnvPool ---------------------------------------------------------------------------------------


def test_envpool_that_is_not_installed_names_the_extra() -> None:
    try:
        import envpool  # noqa: F401
    except ImportError:
        config: TrainConfig[Any] = TrainConfig(env_id="envpool:CartPole-v1", vectorization="native")
        with pytest.raises(ConfigError, match=r"needs an extra: pip install 'rl_training\[envpool"):
            ExperimentManager.setup(config, run_dir=None)


def test_envpool_has_no_single_environments() -> None:
    with pytest.raises(ConfigError, match="use vectorization: native"):
        ExperimentManager.setup(TrainConfig(env_id="envpool:CartPole-v1"), run_dir=None)


def envpool_cartpoles(seed: int, num_envs: int = 4) -> VectorAdapter:
    pytest.importorskip("envpool")
    from rl_training.envs.envpool import EnvPoolVector

    return VectorAdapter(EnvPoolVector("CartPole-v1", num_envs), seed)


def test_envpool_is_seeded_and_its_steps_are_those_of_gymnasium() -> None:
    env, again, other = (envpool_cartpoles(seed) for seed in (3, 3, 4))
    obs: Any = env.reset()
    assert differences(obs.tolist(), np.asarray(again.reset()).tolist()) == []
    assert differences(obs.tolist(), np.asarray(other.reset()).tolist())
    reference: Any = CartPoleEnv()
    reference.reset()
    random = np.random.default_rng(1)
    episodes = 0
    for _ in range(200):
        action = random.integers(2, size=4)
        step: Any = env.step(action)
        for i in np.flatnonzero(step.valid):
            reference.state = np.asarray(obs[i], np.float64)
            reference.steps_beyond_terminated = None
            expected, _, terminated, _, _ = reference.step(int(action[i]))
            np.testing.assert_allclose(step.final_obs[i], expected, atol=1e-5)
            assert step.terminated[i] == terminated
        episodes += len(step.episodes)
        assert np.array_equal(step.obs, np.asarray(again.step(action).obs))
        obs = step.obs
    assert episodes > 5
    assert not env.exactly_resumable


@pytest.mark.filterwarnings("ignore:resume of this run")
def test_ppo_on_envpool() -> None:
    pytest.importorskip("envpool")
    model = PPO("envpool:Pendulum-v1", vectorization="native", **{**SMALL, "total_timesteps": 512})
    result = model.learn(run_dir=None)
    assert result.metrics["eval/length_mean"] == 200
    with pytest.raises(ConfigError, match="EnvPool has no task 'Nothing-v0'"):
        PPO("envpool:Nothing-v0", vectorization="native").learn(run_dir=None)
