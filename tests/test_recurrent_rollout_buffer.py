"""The rollout of sequences: what is remembered where, and that padding is never learnt from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data.recurrent_rollout_buffer import RecurrentRolloutBuffer, split_at
from rl_training.types import Array, Remembered
from test_rollout_buffer import vector_step

STATE = 3


def fill(
    length: int,
    cut: Array,
    *,
    truncated: Array | None = None,
    valid: Array | None = None,
    masked: bool = False,
) -> RecurrentRolloutBuffer:
    """A rollout whose observations are 100 t + env, and states 1000 t + 100 env, zero at starts."""
    steps, envs = cut.shape
    buffer = RecurrentRolloutBuffer(steps, envs, (1,), (), sequence_length=length, masked=masked)
    buffer.reset()
    before = np.zeros((envs, STATE), np.float32)
    for t in range(steps):
        obs = (100.0 * t + np.arange(envs, dtype=np.float32))[:, None]
        after = np.repeat(1000.0 * (t + 1) + 100 * np.arange(envs, dtype=np.float32), STATE)
        after = after.reshape(envs, STATE).astype(np.float32)
        shortened = np.zeros(envs, bool) if truncated is None else truncated[t]
        step = vector_step(
            obs + 100,
            final_obs=obs + 50,
            terminated=cut[t] & ~shortened,
            truncated=cut[t] & shortened,
            valid=True if valid is None else valid[t],
            num_envs=envs,
        )
        buffer.add(obs, np.zeros(envs), {"state": before, "next_state": after}, step)
        before = np.where(step.cut[:, None], np.float32(0), after)
    return buffer


def test_segments_of_numbers_worked_by_hand() -> None:
    # Two sequences of four; in the first an episode begins at its third step.
    starts = np.array([[1, 0], [0, 0], [1, 0], [0, 0]], bool)
    segments = split_at(starts)
    assert segments.rows.T.tolist() == [[0, 2, 0, 0], [4, 6, 4, 4], [1, 3, 5, 7]]
    assert segments.mask.T.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert segments.sequence.tolist() == [0, 0, 1]
    assert segments.leads.tolist() == [True, False, True]


def test_padding_is_no_longer_than_the_longest_segment() -> None:
    starts = np.array([[0, 1], [1, 0], [0, 1], [1, 0]], bool)
    segments = split_at(starts)
    assert segments.rows.T.tolist() == [[0, 0], [2, 4], [6, 6], [1, 3], [5, 7]]
    assert segments.mask.sum(0).tolist() == [1, 2, 1, 2, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2]),
)
def test_every_step_is_learnt_from_once_and_no_episode_runs_into_another(
    length: int, chunks: int, envs: int, seed: int, parts: int
) -> None:
    cut = np.random.default_rng(seed).random((length * chunks, envs)) < 0.3
    buffer = fill(length, cut)
    if buffer.num_sequences % parts:
        parts = 1
    seen: list[float] = []
    for minibatch in buffer.iter_minibatches(parts, generator=torch.Generator().manual_seed(seed)):
        obs, mask, state = minibatch["obs"][..., 0], minibatch["mask"], minibatch["state"]
        assert obs.shape == mask.shape == minibatch["old_logprobs"].shape
        for column in range(obs.shape[1]):
            real = obs[mask[:, column] > 0, column].tolist()
            seen += real
            assert len(real) == int(mask[:, column].sum()) >= 1
            assert real == [real[0] + 100.0 * i for i in range(len(real))]
            t, env = int(real[0]) // 100, int(real[0]) % 100
            for i in range(len(real) - 1):
                assert not cut[t + i, env]
            begins = t == 0 or cut[t - 1, env]
            remembered = 0.0 if begins else 1000.0 * t + 100 * env
            assert state[column].tolist() == [remembered] * STATE
            # Padding is a copy of the segment itself: no other environment is in its column.
            assert set((obs[:, column] % 100).tolist()) == {float(env)}
    assert sorted(seen) == sorted(
        100.0 * t + e for t in range(length * chunks) for e in range(envs)
    )


def test_minibatches_have_equal_numbers_of_steps() -> None:
    cut = np.random.default_rng(0).random((32, 3)) < 0.2
    sizes = [float(m["mask"].sum()) for m in fill(8, cut).iter_minibatches(4)]
    assert sizes == [24.0] * 4


def test_reset_only_rows_are_masked_and_cut_memory() -> None:
    cut = np.zeros((4, 1), bool)
    cut[1] = True
    valid = np.array([[True], [True], [False], [True]])
    buffer = fill(4, cut, valid=valid, masked=True)
    (minibatch,) = buffer.iter_minibatches(1)
    kept = minibatch["mask"] > 0
    assert sorted(minibatch["obs"][..., 0][kept].tolist()) == [0.0, 100.0, 300.0]
    last = (minibatch["obs"][0, :, 0] == 300.0).nonzero().item()
    assert minibatch["state"][last].tolist() == [0.0] * STATE


def test_truncation_is_valued_with_the_state_from_before_the_reset() -> None:
    cut = np.zeros((4, 2), bool)
    cut[1, 1] = cut[3, 0] = True
    buffer = fill(2, cut, truncated=cut)
    found = buffer.truncated_observations()
    assert found is not None
    index, seen = found
    assert isinstance(seen, Remembered)
    assert index.tolist() == [3, 6]
    assert seen.obs[:, 0].tolist() == [151.0, 350.0]
    assert seen.state[:, 0].tolist() == [2100.0, 4000.0]
    # What follows the rollout starts afresh only where an episode ended with it.
    following = buffer.next_inputs()
    assert following.state[:, 0].tolist() == [0.0, 4100.0]
    assert following.obs[:, 0].tolist() == [400.0, 401.0]


def test_what_a_model_says_finds_its_way_back() -> None:
    cut = np.random.default_rng(1).random((12, 3)) < 0.3
    buffer = fill(4, cut)
    whole = buffer.whole()
    assert set(whole) == {"obs", "actions", "state"}
    said: Any = whole["obs"][..., 0]
    buffer.keep_evaluation(said + 1, said + 2)
    obs: Any = buffer.obs
    assert torch.equal(buffer.logprobs, obs[..., 0] + 1)
    assert torch.equal(buffer.values, obs[..., 0] + 2)


def test_a_second_rollout_forgets_the_first() -> None:
    buffer = fill(2, np.ones((4, 1), bool), truncated=np.ones((4, 1), bool))
    buffer.reset()
    assert buffer.truncated_observations() is None
    assert not buffer.states


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="'sequence_length' must divide num_steps; got 3 and 8"):
        RecurrentRolloutBuffer(8, 1, (1,), (), sequence_length=3)
    buffer = fill(4, np.zeros((8, 1), bool))
    with pytest.raises(ValueError, match="3 minibatches do not divide 2 sequences"):
        next(iter(buffer.iter_minibatches(3)))
