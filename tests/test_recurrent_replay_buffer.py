"""The replay of sequences against a model that keeps every transition whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.checkpointing import to_storable
from rl_training.data.recurrent_replay_buffer import RecurrentReplayBuffer
from rl_training.errors import ConfigError
from rl_training.types import VectorStep
from test_frame_replay import OBS as STACKED
from test_frame_replay import PUSH, STACK, Games
from test_replay_buffer import ACTION, GAMMA, OBS

STATE = 2


class World:
    """Episodes of unique observations, whose states are the number of steps in the episode."""

    def __init__(
        self, num_envs: int, seed: int, next_step: bool = False, ends: float = 0.16
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs = num_envs
        self.next_step = next_step
        self.ends = ends
        self.count = 0
        self.obs = self.fresh()
        self.age = np.zeros(num_envs, np.int64)
        self.pending = np.zeros(num_envs, bool)
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]

    def fresh(self) -> Any:
        start = self.count
        self.count += self.num_envs
        return np.array([[start + i, -(start + i)] for i in range(self.num_envs)], np.float32)

    def step(self, buffer: RecurrentReplayBuffer) -> None:
        action = self.rng.integers(5, size=self.num_envs)
        reward = self.rng.normal(size=self.num_envs).astype(np.float32)
        fate = self.rng.random(self.num_envs)
        valid = ~self.pending
        terminated, truncated = (fate < self.ends / 2) & valid, (fate > 1 - self.ends / 2) & valid
        final, done = self.fresh(), terminated | truncated
        following = final if self.next_step else np.where(done[:, None], self.fresh(), final)
        state = np.repeat(self.age[:, None], STATE, 1).astype(np.float32)
        step = VectorStep(following, final, reward, terminated, truncated, valid, ())
        buffer.add(self.obs, action, {"state": state}, step)
        for i in range(self.num_envs):
            self.rows[i].append(
                {
                    "obs": self.obs[i],
                    "action": int(action[i]),
                    "reward": float(reward[i]),
                    "discount": 0.0 if terminated[i] else GAMMA,
                    "next": final[i],
                    "age": int(self.age[i]),
                    "ends": bool(done[i] | ~valid[i]),
                    "valid": bool(valid[i]),
                }
            )
        self.age = np.where(done | ~valid, 0, self.age + 1)
        self.pending = done if self.next_step else np.zeros(self.num_envs, bool)
        self.obs = following

    def sequences(self, length: int, kept: int, burn_in: int = 0) -> dict[float, Any]:
        """By their first observation, those still whole that something is learnt from."""
        found: dict[float, list[dict[str, Any]]] = {}
        for rows in self.rows:
            current: list[dict[str, Any]] = []
            episodes = room = 0
            for t, row in enumerate(rows):
                if not current:
                    begins = row["age"] == 0
                    room = length - (episodes % length if begins else 0)
                    episodes += begins and row["valid"]
                current.append(row)
                if row["ends"] or len(current) == room or t == len(rows) - 1:
                    unlearnt = 0 if current[0]["age"] == 0 else burn_in
                    whole = t - len(current) + 1 >= len(rows) - kept
                    if whole and row["valid"] and len(current) > unlearnt:
                        found[float(current[0]["obs"][0])] = current
                    current = []
        return found


def make(capacity: int, num_envs: int, length: int, burn_in: int = 0) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(
        capacity,
        num_envs,
        OBS,
        ACTION,
        sequence_length=length,
        state_size=STATE,
        burn_in=burn_in,
        gamma=GAMMA,
    )


def test_stacked_images_are_stored_once_and_sampled_whole() -> None:
    """Sequences are those of a replay that stores every stack whole."""
    buffers = [
        RecurrentReplayBuffer(
            40, 2, STACKED, PUSH, sequence_length=5, state_size=1, burn_in=1, frame_stack=stack
        )
        for stack in (1, STACK)
    ]
    games = Games(2, seed=3, padding="repeated")
    for t in range(61):
        obs, action, step = games.step()
        state = np.full((2, 1), t + 1.0, np.float32)
        for buffer in buffers:
            buffer.add(obs, action, {"state": state}, step)
        if t not in (7, 25, 60):
            continue
        whole, once = (one.sample(16, torch.Generator().manual_seed(t)) for one in buffers)
        for name in whole.keys() - {"cells"}:
            torch.testing.assert_close(once[name], whole[name], rtol=0, atol=0)
    assert buffers[1].nbytes < 0.5 * buffers[0].nbytes


def check_column(
    batch: dict[str, Any], b: int, rows: list[dict[str, Any]], burn_in: int = 0
) -> None:
    """One drawn sequence is the recorded one, padded."""
    length, mask = len(rows), batch["mask"][:, b].tolist()
    unlearnt = 0 if rows[0]["age"] == 0 else min(burn_in, length)
    counted = [0.0] * unlearnt + [1.0] * (length - unlearnt)
    assert mask == counted + [0.0] * (len(mask) - length)
    for t, row in enumerate(rows):
        assert batch["obs"][t, b].tolist() == row["obs"].tolist()
        assert batch["obs"][t + 1, b].tolist() == row["next"].tolist()
        assert int(batch["actions"][t, b]) == row["action"]
        assert float(batch["rewards"][t, b]) == row["reward"]
        assert float(batch["discounts"][t, b]) == pytest.approx(row["discount"])
    assert batch["state"][b].tolist() == [float(rows[0]["age"])] * STATE
    starts = batch["episode_starts"][:, b].tolist()
    assert starts == [rows[0]["age"] == 0] + [False] * (len(mask) - 1)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(10, 20),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_every_drawn_sequence_is_one_that_happened(
    length: int, num_envs: int, steps: int, rows: int, next_step: bool, seed: int
) -> None:
    burn_in = seed % length
    world = World(num_envs, seed, next_step)
    buffer = make(rows * num_envs, num_envs, length, burn_in)
    for step in range(steps):
        world.step(buffer)
        if step % 3 == seed % 5:  # as often as it is drawn from, or never before the end
            buffer.sample(1, torch.Generator())
    true = world.sequences(length, min(rows, steps), burn_in)
    if not true:
        with pytest.raises(ValueError, match="contains no transition to sample"):
            buffer.sample(1, torch.Generator())
        return
    batch = buffer.sample(50, torch.Generator().manual_seed(seed))
    assert batch["obs"].shape == (length + 1, 50, 2)
    assert batch["actions"].shape == batch["mask"].shape == (length, 50)
    for b in range(50):
        check_column(batch, b, true[float(batch["obs"][0, b, 0])], burn_in)


def learnt_steps(world: World, length: int, kept: int, burn_in: int) -> set[float]:
    """Names of all learnt steps, by a walk over what happened that knows nothing of the buffer."""
    found = set()
    for rows in world.rows:
        episode, start, begins, room = -1, 0, True, 0
        for t, row in enumerate(rows):
            if not row["valid"]:
                continue
            if row["age"] == 0:
                episode += 1
                start, begins, room = t, True, length - episode % length
            elif t - start == room:
                start, begins, room = t, False, length
            is_burn_in = not begins and t - start < burn_in
            if not is_burn_in and start >= len(rows) - kept:
                found.add(float(row["obs"][0]))
    return found


def trained_steps(buffer: RecurrentReplayBuffer, batches: int, size: int) -> Counter[float]:
    """How often each step is trained."""
    generator, counts = torch.Generator().manual_seed(1), Counter[float]()
    for _ in range(batches):
        batch = buffer.sample(size, generator)
        counts.update(batch["obs"][:-1, :, 0][batch["mask"] > 0].tolist())
    return counts


@pytest.mark.parametrize("burn_in", [0, 3])
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("steps", [45, 333])
def test_every_learnt_step_is_trained_equally_often(
    steps: int, next_step: bool, burn_in: int
) -> None:
    """Counted over many batches, before the ring is full and after it was filled four times.

    Episodes last from one step to 80, 16 on average: two sequences. A count is nearly Poisson
    distributed, so that z is standard normal where all have the same mean.
    """
    world, buffer = World(3, 4, next_step, ends=1 / 16), make(240, 3, 8, burn_in)
    for step in range(steps):
        world.step(buffer)
        if step % 5 == 0:
            buffer.sample(1, torch.Generator())
    expected = learnt_steps(world, 8, min(steps, 80), burn_in)
    counts = trained_steps(buffer, batches=40, size=1000)
    assert counts.keys() == expected
    mean = counts.total() / len(expected)
    assert mean > 500
    z = (np.array(list(counts.values())) - mean) / mean**0.5
    assert np.abs(z).max() < 5
    # Steps of one sequence are counted together, eight at most: this mean deviates from one by
    # less than sqrt(2 * 8 / n).
    assert (z**2).mean() < 1 + 5 * (16 / len(z)) ** 0.5
    newest = {float(rows[-1]["obs"][0]) for rows in world.rows}  # of sequences still growing
    assert newest & expected


@pytest.mark.parametrize("next_step", [False, True])
def test_a_reset_row_begins_no_episode(next_step: bool) -> None:
    """First sequences get shorter by one step from episode to episode, however it is reset."""
    buffer, never = make(1000, 1, 4), np.zeros(1, bool)

    def add(number: int, age: int, valid: Any) -> None:
        obs, state = np.full((1, 2), 100 * number + age, np.float32), np.full((1, STATE), age)
        ends = np.full(1, age == 5) & valid
        step = VectorStep(obs, obs, np.zeros(1), ends, never, valid, ())
        buffer.add(obs, np.zeros(1, np.int64), {"state": state}, step)

    for number in range(9):
        for age in range(6):
            add(number, age, ~never)
        if next_step:
            add(number, 0, never)
    batch = buffer.sample(1000, torch.Generator().manual_seed(0))
    lengths = dict(zip(batch["obs"][0, :, 0].tolist(), batch["mask"].sum(0).tolist(), strict=True))
    assert [lengths[100.0 * number] for number in range(9)] == [4, 3, 2, 1, 4, 3, 2, 1, 4]


def test_a_growing_sequence_is_not_continued_by_the_oldest_rows() -> None:
    buffer = make(8, 1, 4)
    for t in range(10):
        obs, following = np.full((1, 2), t, np.float32), np.full((1, 2), t + 1, np.float32)
        never, always = np.zeros(1, bool), np.ones(1, bool)
        step = VectorStep(following, following, np.full(1, float(t)), never, never, always, ())
        buffer.add(obs, np.zeros(1, np.int64), {"state": np.full((1, STATE), float(t))}, step)
    batch = buffer.sample(100, torch.Generator().manual_seed(0))
    newest = (batch["obs"][0, :, 0] == 8).nonzero().flatten()[0]
    assert batch["mask"][:, newest].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch["obs"][:, newest, 0].tolist() == [8.0, 9.0, 10.0, 10.0, 10.0]
    assert batch["state"][newest].tolist() == [8.0] * STATE


@pytest.mark.parametrize("steps", [10, 60])
def test_state_goes_through_a_checkpoint_and_continues_alike(steps: int) -> None:
    world, buffer = World(2, 5), make(60, 2, 4)
    for _ in range(steps):
        world.step(buffer)
        buffer.sample(1, torch.Generator())
    saved = to_storable(buffer.ring_state())
    chunks = [to_storable(buffer.chunk_state(i)) for i in range(buffer.num_chunks)]
    other = make(60, 2, 4)
    for _ in range(70):  # what it held before is gone
        World(2, 9).step(other)
    other.sample(1, torch.Generator())
    other.load_ring_state(saved)
    for index, chunk in enumerate(chunks):
        other.load_chunk(index, chunk)
    other.resume_at(world.obs)
    twin_rng = np.random.default_rng()
    twin_rng.bit_generator.state = world.rng.bit_generator.state
    for replay in (buffer, other):
        assert len(replay) == len(buffer)
    for _ in range(25):
        world.step(buffer)
        row = [rows[-1] for rows in world.rows]
        step = VectorStep(
            world.obs,
            np.stack([r["next"] for r in row]),
            np.array([r["reward"] for r in row]),
            np.array([r["discount"] == 0 for r in row]),
            np.array([r["ends"] and r["discount"] > 0 for r in row]),
            np.array([r["valid"] for r in row]),
            (),
        )
        state = np.array([[r["age"]] * STATE for r in row], np.float32)
        actions = np.array([r["action"] for r in row])
        other.add(np.stack([r["obs"] for r in row]), actions, {"state": state}, step)
        here = buffer.sample(20, torch.Generator().manual_seed(1))
        there = other.sample(20, torch.Generator().manual_seed(1))
        for key in here:
            assert np.array_equal(here[key], there[key]), key


def test_memory_is_counted() -> None:
    each = RecurrentReplayBuffer.bytes_per_step(OBS, ACTION, sequence_length=4, state_size=STATE)
    assert each == 8 + 8 + 9 + 4 + 58
    world, buffer = World(2, 7), make(4000, 2, 4)
    for _ in range(2000):
        world.step(buffer)
    assert 0.5 * 4000 * each < buffer.nbytes < 1.2 * 4000 * each


@pytest.mark.parametrize(("episode", "length", "burn_in"), [(32, 16, 4), (40, 8, 4), (20, 5, 4)])
def test_every_step_of_episodes_of_one_length_is_learnt_from(
    episode: int, length: int, burn_in: int
) -> None:
    buffer = make(4000, 1, length, burn_in)
    never, always, nothing = np.zeros(1, bool), np.ones(1, bool), np.zeros(1)
    for t in range(3000):
        age = t % episode
        obs = np.full((1, 2), age, np.float32)
        step = VectorStep(
            obs + 1, obs + 1, nothing, never, np.full(1, age == episode - 1), always, ()
        )
        buffer.add(obs, np.zeros(1, np.int64), {"state": np.full((1, STATE), float(age))}, step)
    batch = buffer.sample(4000, torch.Generator().manual_seed(0))
    learnt = batch["obs"][:-1, :, 0][batch["mask"] > 0]
    assert set(learnt.tolist()) == set(map(float, range(episode)))
    assert (batch["mask"].sum(0) > 0).all()


def test_a_replay_that_begins_in_mid_episode_keeps_what_is_remembered() -> None:
    buffer = make(100, 1, 4)
    obs, never, always = np.zeros((1, 2), np.float32), np.zeros(1, bool), np.ones(1, bool)
    step = VectorStep(obs, obs, np.zeros(1), never, never, always, ())
    buffer.add(obs, np.zeros(1, np.int64), {"state": np.full((1, STATE), 7.0)}, step)
    batch = buffer.sample(3, torch.Generator())
    assert batch["state"].tolist() == [[7.0] * STATE] * 3
    assert not batch["episode_starts"].any()


def add_one(
    buffer: RecurrentReplayBuffer, t: int, *, ends: bool = False, valid: bool = True
) -> None:
    """A step that shows ``t`` and is never without memory: the replay begins in mid-episode."""
    obs, never = np.full((1, 2), t, np.float32), np.zeros(1, bool)
    step = VectorStep(obs + 1, obs + 1, np.zeros(1), never, np.full(1, ends), np.full(1, valid), ())
    buffer.add(obs, np.zeros(1, np.int64), {"state": np.full((1, STATE), t + 1.0)}, step)


def test_burn_in_and_resets_alone_are_nothing_to_sample() -> None:
    buffer = make(100, 1, 4, burn_in=3)
    add_one(buffer, 0)
    add_one(buffer, 1, ends=True)
    for t, valid in ((2, False), (3, True)):
        with pytest.raises(ValueError, match="contains no transition to sample"):
            buffer.sample(1, torch.Generator())
        add_one(buffer, t, valid=valid)
    # An episode that was seen from its start needs no burn-in.
    assert buffer.sample(1, torch.Generator())["obs"][0, 0, 0] == 3


def test_the_only_step_to_learn_from_is_found_however_rare() -> None:
    buffer = make(800, 1, 400, burn_in=399)
    for t in range(400):
        add_one(buffer, t)
    batch = buffer.sample(5, torch.Generator().manual_seed(0))
    assert batch["mask"].T.tolist() == [[0.0] * 399 + [1.0]] * 5


def test_a_draw_does_not_look_through_all_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    world, buffer = World(2, 1), make(2000, 2, 4, burn_in=2)
    for _ in range(1500):
        world.step(buffer)
    buffer.sample(1, torch.Generator())
    looked: list[int] = []
    real = buffer.is_valid

    def is_valid(cells: Any) -> Any:
        looked.append(len(cells))
        return real(cells)

    monkeypatch.setattr(buffer, "is_valid", is_valid)
    for steps in (0, 1, 3):
        for _ in range(steps):
            world.step(buffer)
        buffer.sample(8, torch.Generator())
    assert looked == [2, 6]


def test_an_inexact_resume_joins_no_episodes_however_alike() -> None:
    buffer = make(100, 1, 4)
    obs, never, always = np.zeros((1, 2), np.float32), np.zeros(1, bool), np.ones(1, bool)
    step = VectorStep(obs, obs, np.zeros(1), never, never, always, ())
    for row, exact in enumerate((True, False)):
        buffer.add(obs, np.zeros(1, np.int64), {"state": np.zeros((1, STATE))}, step)
        buffer.resume_at(obs, exact=exact)
        assert buffer.episode_continues(row).tolist() == [exact]


def test_impossible_shapes_are_refused() -> None:
    for capacity, length, burn_in in ((100, 0, 0), (100, 4, 4), (100, 4, -1), (7, 4, 0)):
        with pytest.raises(ConfigError, match=r"must be at least 0|two sequences"):
            make(capacity, 1, length, burn_in)
    with pytest.raises(ConfigError, match="two sequences of 4 steps from each of 2 environments"):
        make(15, 2, 4)
