"""The replay ring against a model that keeps every transition whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.checkpointing import to_storable
from rl_training.data.replay_buffer import Prioritization, ReplayBuffer
from rl_training.data.sum_tree import SumTree
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, VectorStep

OBS = ObsSpec({"": ArraySpec((2,), "float32")})
ACTION = ActionSpec("discrete", (), "int64", nvec=(5,), start=(0,))
GAMMA = 0.9


class World:
    """Random episodes in which every observation is unique, and a full record of them."""

    def __init__(self, num_envs: int, seed: int, next_step: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs = num_envs
        self.next_step = next_step
        self.count = 0
        self.obs = self.fresh()
        self.pending = np.zeros(num_envs, bool)
        self.record: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]

    def fresh(self) -> Any:
        start = self.count
        self.count += self.num_envs
        return np.array([[start + i, -(start + i)] for i in range(self.num_envs)], np.float32)

    def step(self, buffer: ReplayBuffer) -> None:
        action = self.rng.integers(5, size=self.num_envs)
        reward = self.rng.normal(size=self.num_envs)
        fate = self.rng.random(self.num_envs)
        valid = ~self.pending
        terminated, truncated = (fate < 0.15) & valid, (fate > 0.85) & valid
        reward = np.where(valid, reward, 0.0)
        final, done = self.fresh(), terminated | truncated
        following = final if self.next_step else np.where(done[:, None], self.fresh(), final)
        step = VectorStep(following, final, reward, terminated, truncated, valid, ())
        buffer.add(self.obs, action, {}, step)
        for i in range(self.num_envs):
            self.record[i].append(
                {
                    "obs": self.obs[i],
                    "action": action[i],
                    "reward": np.float32(reward[i]),
                    "terminated": bool(terminated[i]),
                    "done": bool(done[i]),
                    "next_obs": final[i],
                    "valid": bool(valid[i]),
                }
            )
        self.obs = following
        self.pending = done & self.next_step

    def expected(self, env: int, index: int, n_step: int) -> tuple[float, float, Any]:
        """The n-step return, the discount and the successor, one Python float at a time."""
        total, discount = 0.0, 1.0
        for k in range(n_step):
            row = self.record[env][index + k]
            total += discount * float(row["reward"])
            discount *= GAMMA
            if row["done"] or index + k + 1 == len(self.record[env]):
                break
        return total, 0.0 if row["terminated"] else discount, row["next_obs"]


def filled(
    num_envs: int, capacity: int, steps: int, seed: int, *, n_step: int = 1, **options: Any
) -> tuple[World, ReplayBuffer]:
    next_step = options.pop("next_step", False)
    buffer = ReplayBuffer(capacity, num_envs, OBS, ACTION, n_step=n_step, gamma=GAMMA, **options)
    world = World(num_envs, seed, next_step)
    for _ in range(steps):
        world.step(buffer)
    return world, buffer


def check(world: World, batch: dict[str, Any], rows: int, n_step: int) -> set[tuple[int, int]]:
    """Compare a batch with the record; returns which (environment, time) it held."""
    where = {
        (float(row["obs"][0]), int(row["action"])): (env, t)
        for env, record in enumerate(world.record)
        for t, row in enumerate(record)
        if row["valid"]
    }
    seen = set()
    for i in range(len(batch["rewards"])):
        key = (float(batch["obs"][i, 0]), int(batch["actions"][i]))
        env, t = where[key]
        assert t >= len(world.record[env]) - rows
        total, discount, next_obs = world.expected(env, t, n_step)
        assert float(batch["rewards"][i]) == pytest.approx(total, abs=1e-5)
        assert float(batch["discounts"][i]) == pytest.approx(discount, rel=1e-6)
        if discount:
            assert batch["next_obs"][i].tolist() == next_obs.tolist()
        seen.add((env, t))
    return seen


@settings(deadline=None, max_examples=60)
@given(
    num_envs=st.integers(1, 4),
    rows=st.integers(1, 12),
    steps=st.integers(1, 50),
    n_step=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    next_step=st.booleans(),
    prioritized=st.booleans(),
)
def test_samples_are_true_across_the_seam_and_every_episode_end(
    num_envs: int,
    rows: int,
    steps: int,
    n_step: int,
    seed: int,
    next_step: bool,
    prioritized: bool,
) -> None:
    world, buffer = filled(
        num_envs,
        rows * num_envs,
        steps,
        seed,
        n_step=n_step,
        next_step=next_step,
        prioritization=Prioritization() if prioritized else None,
    )
    assert len(buffer) == min(rows, steps) * num_envs
    if not any(row["valid"] for record in world.record for row in record[-rows:]):
        return
    check(world, buffer.sample(64, torch.Generator().manual_seed(seed)), rows, n_step)


@pytest.mark.parametrize("prioritized", [False, True])
def test_every_kept_transition_is_drawn_and_alike_often(prioritized: bool) -> None:
    rule = Prioritization() if prioritized else None
    world, buffer = filled(2, 20, 33, seed=3, prioritization=rule)
    batch = buffer.sample(20_000, torch.Generator().manual_seed(0))
    assert len(check(world, batch, 10, 1)) == 20
    counts = np.bincount(batch["cells"])
    counts = counts[counts > 0]
    assert counts.min() > 850
    assert counts.max() < 1150


def test_priorities_set_how_often_and_weights_correct_for_it() -> None:
    _, buffer = filled(1, 8, 8, seed=0, prioritization=Prioritization(alpha=1.0, epsilon=0.0))
    cells = np.arange(8)
    buffer.update_priorities(cells, torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 9.0]))
    batch = buffer.sample(16_000, torch.Generator().manual_seed(1), beta=1.0)
    share = float((batch["cells"] == 7).mean())
    assert share == pytest.approx(9 / 16, abs=0.02)
    weights = {int(c): float(w) for c, w in zip(batch["cells"], batch["weights"], strict=True)}
    assert weights[7] == pytest.approx(1 / 9)
    assert weights[0] == 1.0
    half = buffer.sample(64, torch.Generator().manual_seed(1), beta=0.5)
    assert float(half["weights"].min()) == pytest.approx((1 / 9) ** 0.5)


def test_new_transitions_get_the_largest_priority_so_far() -> None:
    world, buffer = filled(1, 50, 10, seed=0, prioritization=Prioritization(alpha=1.0))
    buffer.update_priorities(np.arange(10), torch.full((10,), 0.01))
    buffer.update_priorities(np.array([3]), torch.tensor([40.0]))
    world.step(buffer)
    batch = buffer.sample(4000, torch.Generator().manual_seed(2))
    assert float((batch["cells"] == 10).mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("prioritized", [False, True])
def test_state_goes_through_a_checkpoint_and_continues_alike(
    prioritized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.data.transition_ring._CHUNK_BYTES", 200)
    rule = Prioritization() if prioritized else None
    world, buffer = filled(3, 30, 47, seed=5, n_step=3, prioritization=rule)
    again = ReplayBuffer(30, 3, OBS, ACTION, n_step=3, gamma=GAMMA, prioritization=rule)
    again.load_ring_state(to_storable(buffer.ring_state()))
    assert buffer.num_chunks > 1
    for index in range(buffer.num_chunks):
        again.load_chunk(index, to_storable(buffer.chunk_state(index)))
    for _ in range(25):
        state = world.rng.bit_generator.state
        before = (world.count, world.obs, world.pending, [list(r) for r in world.record])
        world.step(buffer)
        world.rng.bit_generator.state = state
        world.count, world.obs, world.pending, world.record = before
        world.step(again)
    a, b = (x.sample(64, torch.Generator().manual_seed(9)) for x in (buffer, again))
    for key in ("obs", "actions", "rewards", "next_obs", "discounts", "weights"):
        assert torch.equal(a[key], b[key]), key
    with pytest.raises(ConfigError, match="buffer_size, num_envs and the frame stack"):
        ReplayBuffer(60, 3, OBS, ACTION).load_ring_state(buffer.ring_state())


def test_an_observation_is_stored_once() -> None:
    spec = ObsSpec({"": ArraySpec((17,), "float32")})
    action = ActionSpec("box", (6,), "float32", low=(-1.0,) * 6, high=(1.0,) * 6)
    each = ReplayBuffer.bytes_per_transition(spec, action)
    assert each == 17 * 4 + 6 * 4 + 9
    buffer = ReplayBuffer(10_000, 1, spec, action)
    pool = 64 * 17 * 4
    assert buffer.nbytes == 10_001 * each + pool


@pytest.mark.parametrize("prioritized", [False, True])
def test_arrays_are_all_that_is_held(prioritized: bool) -> None:
    rule = Prioritization() if prioritized else None
    _, buffer = filled(2, 40, 30, seed=3, prioritization=rule)
    arrays = list(buffer.arrays())
    assert all(array.flags.owndata for array in arrays)
    assert len({id(array) for array in arrays}) == len(arrays)
    assert sum(array.nbytes for array in arrays) == buffer.nbytes
    tree = 2 * 64 * 8  # cells of 21 rows and 2 environments, up to the next power of two
    assert buffer.nbytes == 21 * 2 * (8 + 8 + 9) + 64 * 8 + prioritized * tree


@pytest.mark.parametrize("steps", [0, 3, 29], ids=["empty", "first rows", "across the seam"])
@pytest.mark.parametrize("next_step", [False, True])
def test_newest_observations_are_flat_in_time_with_reset_rows_marked(
    steps: int, next_step: bool
) -> None:
    world, buffer = filled(2, 20, steps, seed=1, next_step=next_step)
    for asked in (1, 7, 100):
        obs, valid = buffer.newest_observations(asked)
        times = range(max(0, steps - min(asked, 10)), steps)
        rows = [world.record[env][t] for t in times for env in range(2)]
        expected = np.array([row["obs"] for row in rows], np.float32).reshape(-1, 2)
        assert np.array_equal(obs.numpy(), expected)
        assert valid.tolist() == [row["valid"] for row in rows]
    assert bool(valid.all()) == (not next_step or not steps)
    if steps:  # a copy: later rows do not change it
        before = obs.clone()
        for _ in range(11):
            world.step(buffer)
        assert torch.equal(obs, before)


def test_dict_observations_and_masks() -> None:
    spec = ObsSpec({"x": ArraySpec((1,), "float32"), "action_mask": ArraySpec((5,), "bool")})
    buffer = ReplayBuffer(10, 1, spec, ACTION)
    no, yes = np.array([False]), np.array([True])
    for i in range(4):
        obs = {"x": np.full((1, 1), i, np.float32), "action_mask": np.ones((1, 5), bool)}
        final = {"x": np.full((1, 1), 99.0, np.float32), "action_mask": np.zeros((1, 5), bool)}
        after = {"x": np.full((1, 1), i + 1, np.float32), "action_mask": np.ones((1, 5), bool)}
        step = VectorStep(
            after, final if i == 2 else after, np.ones(1), no, yes if i == 2 else no, yes, ()
        )
        buffer.add(obs, np.array([0]), {}, step)
    batch = buffer.sample(100, torch.Generator().manual_seed(0))
    for x, following, mask in zip(
        batch["obs"]["x"], batch["next_obs"]["x"], batch["next_obs"]["action_mask"], strict=True
    ):
        assert float(following) == (99.0 if float(x) == 2 else float(x) + 1)
        assert bool(mask.any()) == (float(x) != 2)
    newest, valid = buffer.newest_observations(3)
    assert newest["x"].flatten().tolist() == [1.0, 2.0, 3.0]
    assert newest["action_mask"].shape == (3, 5)
    assert valid.all()


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="too small for"):
        ReplayBuffer(3, 4, OBS, ACTION)
    empty = ReplayBuffer(8, 1, OBS, ACTION)
    with pytest.raises(ValueError, match="no transition to sample"):
        empty.sample(1, torch.Generator())
    with pytest.raises(ValueError, match="not prioritised"):
        empty.update_priorities(np.array([0]), torch.ones(1))


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(0, 1000))
def test_sum_tree_finds_what_a_cumulative_sum_would(values: list[float], seed: int) -> None:
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), np.array(values))
    assert tree.total == pytest.approx(sum(values))
    if tree.total <= 0:
        return
    points = np.random.default_rng(seed).random(50) * tree.total
    found = tree.find(points)
    cumulative = np.cumsum(values)
    assert all(values[i] > 0 for i in found)
    for point, index in zip(points, found, strict=True):
        assert cumulative[index] >= point - 1e-9
        assert cumulative[index] - values[index] <= point + 1e-9


def test_sum_tree_extremes() -> None:
    tree = SumTree(5)
    tree.set(np.array([1, 3, 1]), np.array([9.0, 2.0, 4.0]))
    assert tree.total == 6.0
    assert tree.find(np.array([0.0, 3.999, 4.0, 5.999, 6.0])).tolist() == [1, 1, 3, 3, 3]
    copy = SumTree(5)
    copy.load(tree.leaves())
    assert copy.total == 6.0
