"""The rollout buffer: advantages on numbers worked by hand, and every row stored and read once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import NonFiniteError
from rl_training.types import Array, Obs, VectorStep


def vector_step(
    obs: Obs,
    *,
    reward: Any = 0.0,
    terminated: Any = False,
    truncated: Any = False,
    valid: Any = True,
    final_obs: Obs | None = None,
    num_envs: int = 1,
) -> VectorStep:
    """One step; a single number stands for the same in every environment."""

    def spread(value: Any, dtype: Any) -> Array:
        return np.broadcast_to(np.asarray(value, dtype), (num_envs,)).copy()

    return VectorStep(
        obs=obs,
        final_obs=obs if final_obs is None else final_obs,
        reward=spread(reward, np.float64),
        terminated=spread(terminated, bool),
        truncated=spread(truncated, bool),
        valid=spread(valid, bool),
        episodes=(),
    )


def gae(
    rewards: list[float],
    values: list[float],
    *,
    last_value: float,
    dones: list[int] | None = None,
    bootstrap: list[float] | None = None,
    gamma: float,
    gae_lambda: float,
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one environment's rollout."""
    steps = len(rewards)
    buffer = RolloutBuffer(steps, 1, (1,), ())
    for name, column in (
        ("rewards", rewards),
        ("values", values),
        ("dones", dones or [0] * steps),
        ("bootstrap", bootstrap or [0.0] * steps),
    ):
        getattr(buffer, name).copy_(torch.tensor(column)[:, None])
    buffer.compute_returns_and_advantages(
        last_value=torch.tensor([last_value]), gamma=gamma, gae_lambda=gae_lambda
    )
    return buffer.advantages.flatten().tolist(), buffer.returns.flatten().tolist()


def test_gae_of_a_rollout_that_ends_mid_episode() -> None:
    """gamma = lambda = 1/2: deltas 1 + 2 - 2 = 1, 2 + 3 - 4 = 1, 3 + 4 - 6 = 1."""
    advantages, returns = gae(
        [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], last_value=8.0, gamma=0.5, gae_lambda=0.5
    )
    assert advantages == [1.3125, 1.25, 1.0]
    assert returns == [3.3125, 5.25, 7.0]


def test_gae_stops_at_a_termination() -> None:
    """The middle delta loses its next value, 2 - 4 = -2, and the trace does not cross it."""
    advantages, returns = gae(
        [1.0, 2.0, 3.0],
        [2.0, 4.0, 6.0],
        dones=[0, 1, 0],
        last_value=8.0,
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantages == [1.0 + 0.25 * -2.0, -2.0, 1.0]
    assert returns == [2.5, 2.0, 7.0]


def test_gae_bootstraps_a_truncation_from_the_final_observation() -> None:
    """V(final) = 10: the middle delta is 2 + 0.5 * 10 - 4 = 3; the next episode's 6 is not used."""
    advantages, returns = gae(
        [1.0, 2.0, 3.0],
        [2.0, 4.0, 6.0],
        dones=[0, 1, 0],
        bootstrap=[0.0, 10.0, 0.0],
        last_value=8.0,
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantages == [1.75, 3.0, 1.0]
    assert returns == [3.75, 7.0, 7.0]


def test_gae_uses_no_last_value_where_the_last_step_ended_the_episode() -> None:
    advantages, _ = gae([1.0], [0.5], dones=[1], last_value=100.0, gamma=0.9, gae_lambda=0.9)
    assert advantages == [0.5]


def test_gae_keeps_environments_apart() -> None:
    buffer = RolloutBuffer(2, 2, (1,), ())
    buffer.rewards.copy_(torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
    buffer.dones.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    buffer.compute_returns_and_advantages(
        last_value=torch.tensor([4.0, 40.0]), gamma=0.5, gae_lambda=1.0
    )
    assert buffer.returns.tolist() == [[1.0 + 1.0 + 1.0, 10.0], [4.0, 40.0]]


REWARDS = [1.0, -2.0, 0.5, 3.0, 1.5]
VALUES = [0.3, -0.7, 2.0, 1.1, 0.9]


def test_lambda_1_gives_the_discounted_return_minus_the_value() -> None:
    advantages, returns = gae(REWARDS, VALUES, last_value=5.0, gamma=0.9, gae_lambda=1.0)
    for t in range(5):
        tail = REWARDS[t:]
        total = sum(0.9**k * r for k, r in enumerate(tail)) + 0.9 ** len(tail) * 5.0
        assert returns[t] == pytest.approx(total, rel=1e-6)
        assert advantages[t] == pytest.approx(total - VALUES[t], rel=1e-5)


def test_lambda_0_gives_the_td_error() -> None:
    advantages, _ = gae(REWARDS, VALUES, last_value=5.0, gamma=0.9, gae_lambda=0.0)
    following = [*VALUES[1:], 5.0]
    expected = [r + 0.9 * n - v for r, n, v in zip(REWARDS, following, VALUES, strict=True)]
    assert advantages == pytest.approx(expected, rel=1e-5)


def test_gamma_0_gives_the_reward_alone() -> None:
    advantages, returns = gae(REWARDS, VALUES, last_value=5.0, gamma=0.0, gae_lambda=0.95)
    assert returns == pytest.approx(REWARDS, abs=1e-6)
    expected = [r - v for r, v in zip(REWARDS, VALUES, strict=True)]
    assert advantages == pytest.approx(expected, abs=1e-6)


def oracle(
    rewards: list[float],
    values: list[float],
    ends: list[str],
    finals: list[float],
    *,
    last_value: float,
    gamma: float,
    gae_lambda: float,
) -> list[float]:
    """Advantages of one environment, episode by episode, each as the sum it is by definition."""
    advantages: list[float] = []
    start = 0
    while start < len(rewards):
        stop = next((t for t in range(start, len(rewards)) if ends[t] != "on"), len(rewards) - 1)
        after = {"on": last_value, "terminated": 0.0, "truncated": finals[stop]}[ends[stop]]
        worth = [*values[start : stop + 1], after]
        deltas = [
            rewards[start + k] + gamma * worth[k + 1] - worth[k] for k in range(len(worth) - 1)
        ]
        for k in range(len(deltas)):
            trace = [(gamma * gae_lambda) ** j * d for j, d in enumerate(deltas[k:])]
            advantages.append(sum(trace))
        start = stop + 1
    return advantages


numbers = st.floats(-10, 10, width=32)
units = st.floats(0, 1, width=32)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[float, float, str, float]]]]:
    steps, envs = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    row = st.tuples(numbers, numbers, st.sampled_from(["on", "terminated", "truncated"]), numbers)
    column = st.lists(row, min_size=steps, max_size=steps)
    return steps, envs, draw(st.lists(column, min_size=envs, max_size=envs))


@settings(max_examples=150, deadline=None)
@given(rollouts(), numbers, units, units)
def test_gae_equals_a_slow_oracle(
    rollout: tuple[int, int, list[list[tuple[float, float, str, float]]]],
    last_value: float,
    gamma: float,
    gae_lambda: float,
) -> None:
    """Through `add` and the fields an algorithm fills, against sums over python floats."""
    steps, envs, columns = rollout
    buffer = RolloutBuffer(steps, envs, (1,), ())
    obs = np.zeros((envs, 1), np.float32)
    for t in range(steps):
        rewards, values, ends, finals = zip(*(column[t] for column in columns), strict=True)
        step = vector_step(
            obs,
            final_obs=np.array(finals, np.float32)[:, None],
            reward=rewards,
            terminated=[end == "terminated" for end in ends],
            truncated=[end == "truncated" for end in ends],
            num_envs=envs,
        )
        buffer.add(obs, np.zeros(envs, np.float32), {"values": torch.tensor(values)}, step)
    truncated = buffer.truncated_observations()
    if truncated is not None:
        index, final_obs = truncated
        assert isinstance(final_obs, Tensor)
        buffer.bootstrap.view(-1)[index] = final_obs[:, 0]  # V(x) = x
    buffer.compute_returns_and_advantages(
        last_value=torch.full((envs,), last_value), gamma=gamma, gae_lambda=gae_lambda
    )
    for env, column in enumerate(columns):
        parts: list[list[Any]] = [list(part) for part in zip(*column, strict=True)]
        expected = oracle(*parts, last_value=last_value, gamma=gamma, gae_lambda=gae_lambda)
        actual = buffer.advantages[:, env].tolist()
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-4)
        returns = [a + v for a, v in zip(actual, parts[1], strict=True)]
        assert buffer.returns[:, env].tolist() == pytest.approx(returns, rel=1e-4, abs=1e-4)


def numbered_rollout(steps: int = 6, envs: int = 4, **kwargs: Any) -> RolloutBuffer:
    """Row i (time x environment) holds i in every field, scaled so that fields differ."""
    buffer = RolloutBuffer(steps, envs, (2,), (), **kwargs)
    rows = torch.arange(steps * envs, dtype=torch.float32).reshape(steps, envs)
    assert isinstance(buffer.obs, Tensor)
    buffer.obs.copy_(torch.stack((rows, -rows), -1))
    for scale, name in enumerate(("actions", "logprobs", "values", "advantages", "returns"), 1):
        getattr(buffer, name).copy_(rows * scale)
    return buffer


def test_minibatches_hold_every_row_once_with_its_fields_together() -> None:
    buffer = numbered_rollout()
    generator = torch.Generator().manual_seed(3)
    minibatches = list(buffer.iter_minibatches(3, generator=generator))
    assert [len(minibatch["actions"]) for minibatch in minibatches] == [8, 8, 8]
    rows = torch.cat([minibatch["actions"] for minibatch in minibatches])
    assert sorted(rows.tolist()) == list(range(24))
    assert rows.tolist() != list(range(24))
    for minibatch in minibatches:
        row = minibatch["actions"]
        assert torch.equal(minibatch["obs"], torch.stack((row, -row), -1))
        for scale, name in enumerate(("old_logprobs", "values", "advantages", "returns"), 2):
            assert torch.equal(minibatch[name], row * scale)
        assert "mask" not in minibatch


def test_flat_rows_go_environment_by_environment_within_a_step() -> None:
    batch = numbered_rollout().flat()
    assert batch["actions"].tolist() == list(range(24))
    assert batch["obs"][5].tolist() == [5.0, -5.0]


def test_minibatch_order_is_that_of_the_generator() -> None:
    def orders(seed: int) -> list[list[float]]:
        buffer, generator = numbered_rollout(), torch.Generator().manual_seed(seed)
        epochs = [list(buffer.iter_minibatches(2, generator=generator)) for _ in range(2)]
        return [torch.cat([m["actions"] for m in epoch]).tolist() for epoch in epochs]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    first, second = orders(1)
    assert first != second
    assert first == torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("count", [0, -1, 5, 48])
def test_minibatches_that_do_not_divide_the_rows_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} minibatches do not divide 24 rows"):
        next(numbered_rollout().iter_minibatches(count))


def dict_buffer(steps: int = 2, envs: int = 2) -> RolloutBuffer:
    return RolloutBuffer(
        steps,
        envs,
        {"pixels": (2, 3), "speed": (1,), "action_mask": (3,)},
        (),
        obs_dtype={
            "pixels": torch.uint8,
            "speed": torch.float32,
            "action_mask": torch.bool,
        },
        action_dtype=torch.int64,
    )


def dict_obs(number: int, envs: int = 2) -> dict[str, Array]:
    return {
        "pixels": np.full((envs, 2, 3), number, np.uint8),
        "speed": np.full((envs, 1), number + 0.5, np.float32),
        "action_mask": np.tile(np.array([True, False, number % 2 == 0]), (envs, 1)),
    }


def test_dict_observations_keep_their_values_and_dtypes() -> None:
    buffer = dict_buffer()
    for t in (0, 1):
        step = vector_step(
            dict_obs(t + 1),
            final_obs=dict_obs(200 + t),
            truncated=[t == 1, False],
            num_envs=2,
        )
        buffer.add(dict_obs(t), np.array([t, t + 1]), {}, step)
    flat = buffer.flat()
    assert {key: leaf.dtype for key, leaf in flat["obs"].items()} == {
        "pixels": torch.uint8,
        "speed": torch.float32,
        "action_mask": torch.bool,
    }
    assert flat["actions"].dtype == torch.int64
    assert flat["actions"].tolist() == [0, 1, 1, 2]
    assert flat["obs"]["pixels"].shape == (4, 2, 3)
    assert flat["obs"]["speed"].flatten().tolist() == [0.5, 0.5, 1.5, 1.5]
    assert (
        flat["obs"]["action_mask"].tolist()
        == [[True, False, True]] * 2 + [[True, False, False]] * 2
    )
    assert isinstance(buffer.next_obs, dict)
    assert buffer.next_obs["pixels"].dtype == torch.uint8
    assert buffer.next_obs["speed"].tolist() == [[2.5], [2.5]]

    truncated = buffer.truncated_observations()
    assert truncated is not None
    index, final_obs = truncated
    assert index.tolist() == [2]
    assert isinstance(final_obs, dict)
    assert final_obs["pixels"].dtype == torch.uint8
    assert final_obs["action_mask"].dtype == torch.bool
    assert final_obs["pixels"].flatten().tolist() == [201] * 6

    minibatch = next(buffer.iter_minibatches(2, generator=torch.Generator().manual_seed(0)))
    assert {key: (leaf.dtype, len(leaf)) for key, leaf in minibatch["obs"].items()} == {
        "pixels": (torch.uint8, 2),
        "speed": (torch.float32, 2),
        "action_mask": (torch.bool, 2),
    }
    leaves = minibatch["obs"]
    assert torch.equal(leaves["pixels"][:, 0, 0] + 0.5, leaves["speed"][:, 0])


def test_one_dtype_serves_every_leaf_and_a_mapping_needs_a_mapping_of_shapes() -> None:
    buffer = RolloutBuffer(1, 1, {"a": (2,), "b": ()}, (), obs_dtype=torch.float64)
    assert isinstance(buffer.obs, dict)
    assert {leaf.dtype for leaf in buffer.obs.values()} == {torch.float64}
    with pytest.raises(TypeError, match="mapping"):
        RolloutBuffer(1, 1, (2,), (), obs_dtype={"a": torch.float32})


def test_uint8_vectors_and_vector_actions_are_stored_as_they_are() -> None:
    buffer = RolloutBuffer(1, 2, (3,), (2,), obs_dtype=torch.uint8)
    obs = np.array([[0, 128, 255], [1, 2, 3]], np.uint8)
    actions = np.array([[0.25, -0.5], [1.5, 2.0]], np.float32)
    buffer.add(obs, actions, {}, vector_step(obs[::-1].copy(), num_envs=2))
    assert isinstance(buffer.obs, Tensor)
    assert isinstance(buffer.next_obs, Tensor)
    assert buffer.obs.dtype == buffer.next_obs.dtype == torch.uint8
    assert buffer.obs[0].tolist() == obs.tolist()
    assert buffer.next_obs.tolist() == obs[::-1].tolist()
    assert buffer.actions[0].tolist() == actions.tolist()


def test_a_step_past_the_end_is_refused_until_reset() -> None:
    buffer = RolloutBuffer(2, 1, (1,), ())
    obs = np.zeros((1, 1), np.float32)
    action = np.zeros(1, np.float32)
    for _ in range(2):
        buffer.add(obs, action, {}, vector_step(obs, truncated=True))
    with pytest.raises(RuntimeError, match=r"is complete \(2 steps\)"):
        buffer.add(obs, action, {}, vector_step(obs))
    buffer.reset()
    buffer.add(obs, action, {}, vector_step(obs, reward=7.0))
    assert buffer.position == 1
    assert buffer.rewards[0].tolist() == [7.0]


def test_reset_forgets_bootstraps_truncations_and_marks() -> None:
    buffer = RolloutBuffer(1, 2, (1,), ())
    obs = np.zeros((2, 1), np.float32)
    action = np.zeros(2, np.float32)
    ended = vector_step(obs, truncated=True, valid=[True, False], num_envs=2)
    buffer.add(obs, action, {}, ended)
    buffer.bootstrap.fill_(3.0)
    buffer.reset()
    assert buffer.position == 0
    assert buffer.truncated_observations() is None
    assert buffer.bootstrap.tolist() == [[0.0, 0.0]]
    buffer.add(obs, action, {}, vector_step(obs, num_envs=2))
    assert buffer.dones.tolist() == [[0.0, 0.0]]
    assert buffer.valid.tolist() == [[True, True]]


def test_record_fills_the_fields_it_names() -> None:
    buffer = RolloutBuffer(2, 2, (1,), ())
    obs = np.zeros((2, 1), np.float32)
    record = {"values": torch.tensor([1.0, 2.0]), "logprobs": torch.tensor([-1.0, -2.0])}
    buffer.add(obs, np.zeros(2, np.float32), record, vector_step(obs, num_envs=2))
    assert buffer.values.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert buffer.logprobs.tolist() == [[-1.0, -2.0], [0.0, 0.0]]


def test_invalid_rows_are_marked_and_travel_as_a_mask_only_where_asked() -> None:
    for masked in (False, True):
        buffer = RolloutBuffer(2, 2, (1,), (), masked=masked)
        obs = np.zeros((2, 1), np.float32)
        for t in range(2):
            valid = [True, t == 0]
            buffer.add(
                obs, np.full(2, t, np.float32), {}, vector_step(obs, valid=valid, num_envs=2)
            )
        assert buffer.valid.tolist() == [[True, True], [True, False]]
        assert ("mask" in buffer.flat()) is masked
    assert buffer.flat()["mask"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert buffer.flat()["mask"].dtype == torch.float32
    buffer.actions.copy_(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    for minibatch in buffer.iter_minibatches(2):
        assert minibatch["mask"].tolist() == (minibatch["actions"] < 3).float().tolist()


def test_stored_steps_are_copies() -> None:
    buffer = RolloutBuffer(1, 1, (1,), ())
    obs, final, following = (np.full((1, 1), x, np.float32) for x in (1.0, 2.0, 3.0))
    action = np.array([4.0], np.float32)
    buffer.add(obs, action, {}, vector_step(following, final_obs=final, truncated=True))
    for array in (obs, final, following, action):
        array.fill(-1.0)
    truncated = buffer.truncated_observations()
    assert truncated is not None
    assert isinstance(truncated[1], Tensor)
    assert isinstance(buffer.obs, Tensor)
    assert isinstance(buffer.next_obs, Tensor)
    stored = (buffer.obs, truncated[1], buffer.next_obs, buffer.actions)
    assert [tensor.item() for tensor in stored] == [1.0, 2.0, 3.0, 4.0]


def test_truncated_observations_are_the_final_ones_at_flat_rows() -> None:
    buffer = RolloutBuffer(3, 3, (1,), ())
    for t in range(3):
        obs = np.full((3, 1), t, np.float32)
        final = np.array([[10.0 * t], [10.0 * t + 1], [10.0 * t + 2]], np.float32)
        truncated = [[True, False, True], [False] * 3, [False, True, False]][t]
        step = vector_step(obs + 1, final_obs=final, truncated=truncated, num_envs=3)
        buffer.add(obs, np.zeros(3, np.float32), {}, step)
    found = buffer.truncated_observations()
    assert found is not None
    index, final_obs = found
    assert isinstance(final_obs, Tensor)
    assert index.tolist() == [0, 2, 7]
    assert final_obs.flatten().tolist() == [0.0, 2.0, 21.0]
    assert buffer.dones.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_termination_wins_where_both_are_reported() -> None:
    buffer = RolloutBuffer(2, 2, (1,), ())
    obs = np.zeros((2, 1), np.float32)
    both = vector_step(obs, terminated=[True, False], truncated=[True, True], num_envs=2)
    buffer.add(obs, np.zeros(2, np.float32), {}, both)
    only = vector_step(obs, terminated=[True, False], truncated=[True, False], num_envs=2)
    buffer.add(obs, np.zeros(2, np.float32), {}, only)
    found = buffer.truncated_observations()
    assert found is not None
    assert found[0].tolist() == [1]
    assert buffer.dones.tolist() == [[1.0, 1.0], [1.0, 0.0]]


def test_a_terminated_rollout_has_nothing_to_bootstrap() -> None:
    buffer = RolloutBuffer(1, 1, (1,), ())
    obs = np.zeros((1, 1), np.float32)
    buffer.add(obs, np.zeros(1, np.float32), {}, vector_step(obs, terminated=True, truncated=True))
    assert buffer.truncated_observations() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["reward", "action", "observation"])
def test_check_finite_names_what_is_not_and_where(field: str, bad: float) -> None:
    buffer = RolloutBuffer(4, 3, (2,), ())
    buffer.check_finite(0)
    named = {"reward": buffer.rewards, "action": buffer.actions, "observation": buffer.obs}
    tensor = named[field]
    assert isinstance(tensor, Tensor)
    tensor[2, 1] = bad
    tensor[3, 0] = bad
    with pytest.raises(
        NonFiniteError,
        match=rf"^(?=.*environment 1 )(?=.*non-finite {field} ).* global step 960 plus 2 steps",
    ):
        buffer.check_finite(960)


def test_check_finite_names_the_leaf_of_a_dict_and_passes_integers_by() -> None:
    buffer = dict_buffer()
    buffer.check_finite(0)
    assert isinstance(buffer.obs, dict)
    buffer.obs["speed"][1, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"environment 0 .*'speed'\] .* plus 1 step"):
        buffer.check_finite(0)
