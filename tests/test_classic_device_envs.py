"""The torch environments equal Gymnasium's, step by step."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_training.device_envs import make_device_env
from rl_training.device_envs.classic import CLASSIC, ClassicControl
from rl_training.device_envs.streams import EpisodeStreams
from rl_training.envs import spaces
from rl_training.errors import ConfigError
from rl_training.types import Array

every_env = pytest.mark.parametrize("kind", CLASSIC, ids=lambda kind: kind.env_id)
STATES = 10_000

LIMITS: dict[str, list[tuple[float, float]]] = {
    "CartPole-v1": [(-2.6, 2.6), (-4, 4), (-0.25, 0.25), (-4, 4)],
    "Pendulum-v1": [(-10, 10), (-8, 8)],
    "Acrobot-v1": [(-np.pi, np.pi), (-np.pi, np.pi), (-4 * np.pi, 4 * np.pi), (-28, 28)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}
"""Of each variable, the range in which states are drawn: on both sides of every limit."""


def drawn(env_id: str, env: Any) -> tuple[Array, Array]:
    """States and actions that float32 represents exactly."""
    random = np.random.default_rng(3)
    low, high = np.array(LIMITS[env_id]).T
    states = random.uniform(low, high, (STATES, len(low))).astype(np.float32)
    if isinstance(env.action_space, gym.spaces.Discrete):
        return states, random.integers(env.action_space.n, size=STATES)
    # Beyond the bounds, too, where the environment clips.
    bound = 1.5 * float(env.action_space.high[0])
    return states, random.uniform(-bound, bound, (STATES, 1)).astype(np.float32)


def gymnasium_steps(
    env_id: str, env: Any, states: Array, actions: Array
) -> list[tuple[Array, float, bool]]:
    """State after a step from each state, reward, and whether it terminated."""
    found = []
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    for state, action in zip(states, actions, strict=True):
        env.state = state.astype(np.float64)
        env.steps_beyond_terminated = None
        taken = int(action) if discrete else action.astype(np.float64)
        _, reward, terminated, _, _ = env.step(taken)
        found.append((np.array(env.state, np.float64), float(reward), bool(terminated)))
    return found


@every_env
def test_one_step_equals_gymnasiums(kind: type[ClassicControl]) -> None:
    env = gym.make(kind.env_id).unwrapped
    env.reset(seed=0)
    states, actions = drawn(kind.env_id, env)
    following, rewards, ends = zip(*gymnasium_steps(kind.env_id, env, states, actions), strict=True)
    assert kind.env_id == "Pendulum-v1" or 50 < sum(ends) < STATES - 50
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        device_env: Any = kind(STATES, dtype=dtype)  # type: ignore[call-arg]
        device_env.state.copy_(torch.from_numpy(states).T)
        action = torch.from_numpy(actions)
        state, reward, terminated = device_env._advance(device_env.state, action)
        expected = device_env.observed(torch.tensor(np.array(following)).T)
        difference = (device_env.observed(state).double() - expected).abs().max()
        assert difference < tolerance
        assert np.abs(reward.double().numpy() - np.array(rewards)).max() < tolerance
        assert terminated.tolist() == list(ends)
        step = device_env.step(action)
        assert torch.equal(step.final_obs, device_env.observed(state).float())
        assert torch.equal(step.terminated, terminated)
        assert not step.truncated.any()
        assert torch.equal((step.obs != step.final_obs).any(1), terminated)
        assert torch.equal(device_env.steps == 0, terminated)


@every_env
def test_spaces_and_time_limits_are_gymnasiums(kind: type[ClassicControl]) -> None:
    env = gym.make(kind.env_id)
    device_env: Any = make_device_env(kind.env_id, 2)
    assert device_env.action_spec.to_plain() == spaces.action_spec(env.action_space).to_plain()
    spec = spaces.obs_spec(env.observation_space, device_env.action_spec)
    assert device_env.obs_spec.to_plain() == spec.to_plain()
    assert env.spec is not None
    assert device_env.max_episode_steps == env.spec.max_episode_steps


def still(env: ClassicControl) -> torch.Tensor:
    """Actions under which none of these episodes terminates soon."""
    if env.action_spec.kind == "box":
        return torch.zeros(env.num_envs, 1)
    return torch.ones(env.num_envs, dtype=torch.int64)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"])
def test_an_episode_is_truncated_at_the_limit_and_begins_anew(env_id: str) -> None:
    env: Any = make_device_env(env_id, 3, max_episode_steps=5)
    first = env.reset(7)
    env.steps[1] = 3  # its episode is further on
    for number in range(1, 12):
        step = env.step(still(env))
        assert step.truncated.tolist() == [number % 5 == 0, number in (2, 7), number % 5 == 0]
        changed = (step.obs != step.final_obs).any(1)
        assert torch.equal(changed, step.truncated)
    assert not torch.equal(first, step.obs)


@every_env
def test_first_states_are_distributed_as_gymnasiums(kind: type[ClassicControl]) -> None:
    device_env: Any = kind(2000)  # type: ignore[call-arg]
    obs = device_env.reset(5).double().numpy()
    env = gym.make(kind.env_id)
    expected = np.array([env.reset(seed=i)[0] for i in range(2000)], np.float64)
    scale = expected.std(0) + 1e-3 * (expected.std(0) == 0)
    assert (np.abs(obs.mean(0) - expected.mean(0)) < 0.15 * scale).all()
    assert (np.abs(obs.std(0) - expected.std(0)) < 0.1 * scale).all()
    assert (obs.min(0) >= expected.min(0) - 0.02 * scale).all()
    assert (obs.max(0) <= expected.max(0) + 0.02 * scale).all()


def test_seeds_decide_everything_and_environments_have_streams_of_their_own() -> None:
    def played(seed: int, num_envs: int) -> torch.Tensor:
        env: Any = make_device_env("CartPole-v1", num_envs)
        seen = [env.reset(seed)]
        seen += [env.step(torch.ones(num_envs, dtype=torch.int64)).obs for _ in range(50)]
        return torch.stack(seen)

    assert torch.equal(played(3, 4), played(3, 4))
    assert not torch.equal(played(3, 4), played(4, 4))
    # Of an environment nothing depends on how many others there are.
    assert torch.equal(played(3, 4), played(3, 9)[:, :4])
    assert len(torch.unique(played(3, 9)[0, :, 0])) == 9


def test_a_state_continues_bit_for_bit() -> None:
    env: Any = make_device_env("Acrobot-v1", 4, max_episode_steps=7)
    env.reset(1)
    actions = torch.randint(3, (40, 4), generator=torch.Generator().manual_seed(2))
    for action in actions[:20]:
        env.step(action)
    saved = copy.deepcopy(env.state_dict())
    again: Any = make_device_env("Acrobot-v1", 4, max_episode_steps=7)
    again.load_state_dict(saved)
    for action in actions[20:]:
        pairs = zip(env.step(action), again.step(action), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def reference_splitmix(state: int) -> int:
    """SplitMix64 as published, in Python's integers."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float64, 53)])
def test_the_streams_are_splitmix64(dtype: torch.dtype, bits: int) -> None:
    golden = 0x9E3779B97F4A7C15
    streams = EpisodeStreams(3, torch.device("cpu"))
    streams.seed(2**62 + 11)
    streams.advance(torch.tensor([False, True, True]))
    streams.advance(torch.tensor([False, False, True]))
    found = streams.uniform(2, dtype)
    for env in range(3):
        key = reference_splitmix((env + 1) * golden + 2**62 + 11)
        for number in range(2):
            mixed = reference_splitmix(key + (env * 2**16 + number + 1) * golden)
            assert float(found[number, env]) == (mixed >> (64 - bits)) / 2**bits


def test_unknown_ids_and_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'CartPole-v2' on a device.*CartPole-v1"):
        make_device_env("CartPole-v2", 2)
    with pytest.raises(ConfigError, match=r"cannot make CartPole-v1 .* 'gravity'"):
        make_device_env("CartPole-v1", 2, gravity=1.0)
    with pytest.raises(ConfigError, match="'max_episode_steps' must be at least 1"):
        make_device_env("CartPole-v1", 2, max_episode_steps=0)
