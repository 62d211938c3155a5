"""Adapters for simulators: fakes with the interfaces of Isaac Lab and ManiSkill; Brax."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training import PPO, train_ppo
from rl_training.config import TrainConfig
from rl_training.device_envs.simulators import IsaacLabEnv, ManiSkillEnv
from rl_training.errors import ConfigError

LIMIT = 5
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "num_steps": 8,
    "total_timesteps": 128,
    "eval_episodes": 0,
    "hidden_sizes": [8],
    "tensorboard": False,
    "progress": False,
}
BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


class FakeIsaacLab:
    """What Isaac Lab documents: groups of observations, buffers that every step overwrites,
    resets within the step, ``extras["final_obs"]`` in steps that reset, if it is configured.

    Environment i terminates after i + 2 steps, others are truncated after LIMIT.
    """

    def __init__(self, num_envs: int, *, finals: bool = True, finite_horizon: bool = False) -> None:
        self.num_envs, self.device = num_envs, "cpu"
        self.cfg = types.SimpleNamespace(compute_final_obs=finals, is_finite_horizon=finite_horizon)
        private = gym.spaces.Box(-np.inf, np.inf, (7,), np.float32)
        self.single_observation_space = gym.spaces.Dict({"policy": BOX, "critic": private})
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.extras: dict[str, Any] = {}
        self.reward_buf = torch.zeros(num_envs)
        self.reset_terminated = torch.zeros(num_envs, dtype=torch.bool)
        self.reset_time_outs = torch.zeros(num_envs, dtype=torch.bool)
        self.seeds: list[int | None] = []
        self.closed = False

    @property
    def unwrapped(self) -> FakeIsaacLab:
        return self

    def _observe(self) -> dict[str, Tensor]:
        policy = self.clock[:, None].expand(-1, 3).clone()
        return {"policy": policy, "critic": torch.zeros(self.num_envs, 7)}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.clock = torch.zeros(self.num_envs)
        return self._observe(), self.extras

    def step(self, action: Tensor) -> Any:
        assert action.shape == (self.num_envs, 2)
        self.clock += 1
        lives = torch.arange(self.num_envs) + 2
        self.reward_buf[:] = self.clock
        self.reset_terminated[:] = self.clock == lives
        self.reset_time_outs[:] = self.clock == LIMIT
        ended = self.reset_terminated | self.reset_time_outs
        if ended.any() and self.cfg.compute_final_obs:
            self.extras["final_obs"] = self._observe()
        self.clock[ended] = 0.0
        buffers = (self.reward_buf, self.reset_terminated, self.reset_time_outs)
        return self._observe(), *buffers, self.extras

    def close(self) -> None:
        self.closed = True


def test_isaac_lab_steps() -> None:
    fake = FakeIsaacLab(6)
    env = IsaacLabEnv(fake)
    assert env.obs_spec.shape() == (3,)
    assert env.action_spec.described == "unbounded Box"
    assert not env.reset(2**62 + 5).any()
    assert fake.seeds == [5]
    for number in range(1, 9):
        clock = fake.clock + 1
        step = env.step(torch.zeros(6, 2))
        # The true observations of this step, also where extras still hold those of another.
        assert torch.equal(step.final_obs[:, 0], clock)
        ended = step.terminated | step.truncated
        assert torch.equal(step.obs[:, 0], torch.where(ended, 0.0, clock))
        assert torch.equal(step.reward, clock)
        if number == LIMIT:
            assert step.truncated.tolist() == [False, False, False, True, True, True]
            assert step.terminated.tolist() == [False, False, False, True, False, False]
    env.close()
    assert fake.closed


def test_isaac_lab_time_outs_of_a_finite_horizon_are_terminal() -> None:
    env = IsaacLabEnv(FakeIsaacLab(6, finite_horizon=True))
    env.reset(1)
    steps = [env.step(torch.zeros(6, 2)) for _ in range(LIMIT)]
    assert steps[-1].terminated[5]
    assert not steps[-1].truncated.any()


def test_isaac_lab_with_final_observations_of_older_versions_is_refused() -> None:
    fake = FakeIsaacLab(2)
    env = IsaacLabEnv(fake)
    env.reset(1)
    fake.extras["final_obs"] = np.empty(2, dtype=object)
    with pytest.raises(ConfigError, match="as in older versions of Isaac Lab"):
        env.step(torch.zeros(2, 2))


@pytest.mark.filterwarnings("ignore:resume of this run")
@pytest.mark.parametrize("finals", [True, False])
def test_ppo_on_isaac_lab(finals: bool) -> None:
    def make(count: int, device: Any) -> IsaacLabEnv:
        return IsaacLabEnv(FakeIsaacLab(count, finals=finals))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = PPO(device_env_fn=make, **SMALL).learn(run_dir=None)
    approximate = [one for one in caught if "approximate truncation" in str(one.message)]
    assert len(approximate) == (not finals)
    assert 2 <= result.metrics["rollout/length_mean"] <= LIMIT


class FakeManiSkill:
    """What ManiSkill documents of `ManiSkillVectorEnv`: it resets within the step, and
    ``infos["final_observation"]`` holds the observations of all environments where one ended."""

    def __init__(self, num_envs: int, *, auto_reset: bool = True, space: Any = BOX) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.auto_reset, self.spec = auto_reset, types.SimpleNamespace(id="PickCube-v1")
        self.single_observation_space = space
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _observe(self) -> Any:
        rows = self.elapsed[:, None].expand(-1, 3).clone()
        if isinstance(self.single_observation_space, gym.spaces.Dict):
            return {"agent": {"qpos": rows}, "extra": {"goal": rows[:, :1]}}
        return rows

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is None:
            self.elapsed = torch.zeros(self.num_envs)
        else:
            self.elapsed[options["env_idx"]] = 0.0
        return self._observe(), {}

    def step(self, actions: Tensor) -> Any:
        assert (actions.abs() <= 1).all()
        self.elapsed += 1
        terminated = self.elapsed == torch.arange(self.num_envs) + 2
        truncated = self.elapsed >= LIMIT
        obs, reward, infos = self._observe(), self.elapsed.clone(), {}
        dones = terminated | truncated
        if dones.any() and self.auto_reset:
            final = obs
            obs, infos = self.reset(options={"env_idx": torch.arange(self.num_envs)[dones]})
            infos |= {"final_observation": final, "_final_observation": dones}
        return obs, reward, terminated, truncated, infos

    def close(self) -> None:
        pass


NESTED = gym.spaces.Dict(
    {
        "agent": gym.spaces.Dict({"qpos": BOX}),
        "extra": gym.spaces.Dict({"goal": gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)}),
    }
)


@pytest.mark.parametrize("space", [BOX, NESTED], ids=["state", "state_dict"])
def test_maniskill_steps(space: Any) -> None:
    fake = FakeManiSkill(6, space=space)
    env = ManiSkillEnv(fake)
    env.reset(3)
    for _ in range(9):
        clock = fake.elapsed + 1
        step = env.step(torch.zeros(6, 2))
        ended = step.terminated | step.truncated
        name = "agent.qpos" if space is NESTED else None
        obs, final = (one[name] if name else one for one in (step.obs, step.final_obs))
        assert torch.equal(final[:, 0], clock)
        assert torch.equal(obs[:, 0], torch.where(ended, 0.0, clock))


@pytest.mark.filterwarnings("ignore:resume of this run")
@pytest.mark.parametrize("space", [BOX, NESTED], ids=["state", "state_dict"])
def test_ppo_on_maniskill(space: Any) -> None:
    def make(count: int, device: Any) -> ManiSkillEnv:
        return ManiSkillEnv(FakeManiSkill(count, space=space))

    result = PPO(device_env_fn=make, **SMALL).learn(run_dir=None)
    assert 2 <= result.metrics["rollout/length_mean"] <= LIMIT


def test_what_the_adapters_cannot_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto_reset=True"):
        ManiSkillEnv(FakeManiSkill(2, auto_reset=False))
    pictures = gym.spaces.Box(0, 255, (32, 48, 3), np.uint8)
    with pytest.raises(ConfigError, match="images with the channels first"):
        ManiSkillEnv(FakeManiSkill(2, space=pictures))


# -- Brax ------------------------------------------------------------------------------------------


def test_brax_that_is_not_installed_names_the_extra() -> None:
    from rl_training.device_envs.brax import BraxEnv

    try:
        import brax  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'rl_training\[brax\]'"):
            BraxEnv("ant", 2)


@pytest.mark.full
def test_brax_steps_truncates_and_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("brax")
    from rl_training.device_envs.brax import BraxEnv

    env = BraxEnv("fast", 3, episode_length=4)
    first = env.reset(5).clone()
    assert torch.equal(first, BraxEnv("fast", 3).reset(5))
    for number in range(1, 5):
        step = env.step(torch.full((3, 1), 0.1))
        assert step.truncated.all() == (number == 4)
        assert not step.terminated.any()
    assert torch.equal(step.obs, first)
    assert not torch.equal(step.final_obs, first)

    def make(count: int, device: Any) -> BraxEnv:
        return BraxEnv("fast", count, device, episode_length=20)

    from rl_training.runtime.workflows import resume_training
    from state_compare import assert_same_run
    from test_device_source import StopAt

    settings = {**SMALL, "output_dir": tmp_path, "eval_episodes": 2}
    whole = train_ppo(TrainConfig(), device_env_fn=make, **settings)
    part = train_ppo(TrainConfig(), device_env_fn=make, callbacks=[StopAt(60)], **settings)
    assert part.interrupted
    resume_training(part.run_dir, device_env_fn=make)
    assert_same_run(whole.run_dir, part.run_dir)
