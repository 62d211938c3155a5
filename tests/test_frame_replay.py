"""Replay of stacked images: each stored once, and every batch as if all had been stored whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data.replay_buffer import Prioritization, ReplayBuffer
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, VectorStep

STACK, IMAGE = 4, (2, 3, 5)
OBS = ObsSpec({"": ArraySpec((STACK * IMAGE[0], *IMAGE[1:]), "uint8")})
PUSH = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))
CPU = torch.device("cpu")


class Games:
    """Environments that stack images, in every way they may begin, and lose lives in between."""

    def __init__(self, num_envs: int, seed: int, padding: str = "black") -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs = num_envs
        self.padding = padding
        self.stacks = np.stack([self.start() for _ in range(num_envs)])

    def image(self) -> Any:
        return self.rng.integers(1, 256, IMAGE, dtype=np.uint8)

    def start(self) -> Any:
        newest = self.image()
        older = {
            "black": np.zeros_like(newest),
            "repeated": newest,
        }.get(self.padding)
        images = [older if older is not None else self.image() for _ in range(STACK - 1)]
        return np.concatenate([*images, newest])

    def step(self) -> tuple[Any, Any, VectorStep]:
        obs = self.stacks.copy()
        action = self.rng.integers(0, 3, self.num_envs)
        after = np.stack([np.concatenate((s[IMAGE[0] :], self.image())) for s in obs])
        terminated, truncated = self.rng.random((2, self.num_envs)) < (0.15, 0.1)[0]
        truncated &= ~terminated
        life_lost = terminated & (self.rng.random(self.num_envs) < 0.5)
        final = after.copy()
        for env in np.flatnonzero((terminated & ~life_lost) | truncated):
            after[env] = self.start()
        self.stacks = after
        reward = self.rng.normal(size=self.num_envs).astype(np.float32)
        valid = np.ones(self.num_envs, bool)
        return obs, action, VectorStep(after, final, reward, terminated, truncated, valid, ())


def fill(replay: ReplayBuffer, games: Games, steps: int, lived: list[Any]) -> None:
    for _ in range(steps):
        obs, action, step = games.step()
        replay.add(obs, action, {}, step)
        lived.append((obs, action, step))


def check_all(replay: ReplayBuffer, lived: list[Any], n_step: int, gamma: float) -> None:
    """Every stored transition, n-step sums included, against what happened."""
    rows = min(len(lived), replay.rows)
    for when in range(len(lived) - rows, len(lived)):
        cells = (when % replay._ring) * replay.num_envs + np.arange(replay.num_envs)
        batch = replay._gather(cells)
        for env in range(replay.num_envs):
            total, discount, last = 0.0, 1.0, when
            for k in range(n_step):
                step = lived[when + k][2]
                total += discount * float(step.reward[env])
                discount *= gamma
                last = when + k
                ended = step.terminated[env] or step.truncated[env]
                if ended or last + 1 == len(lived):
                    break
            final = lived[last][2]
            assert np.array_equal(batch["obs"][env], lived[when][0][env])
            assert np.array_equal(batch["next_obs"][env], final.final_obs[env])
            assert batch["actions"][env] == lived[when][1][env]
            assert batch["rewards"][env] == pytest.approx(total, abs=1e-5)
            expected = 0.0 if final.terminated[env] else discount
            assert batch["discounts"][env] == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    num_envs=st.integers(1, 3),
    capacity=st.integers(5, 40),
    steps=st.integers(1, 90),
    n_step=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    padding=st.sampled_from(["black", "repeated", "whole"]),
)
def test_batches_are_what_happened(
    num_envs: int, capacity: int, steps: int, n_step: int, seed: int, padding: str
) -> None:
    replay = ReplayBuffer(
        max(capacity, num_envs), num_envs, OBS, PUSH, n_step=n_step, gamma=0.9, frame_stack=STACK
    )
    lived: list[Any] = []
    fill(replay, Games(num_envs, seed, padding), steps, lived)
    check_all(replay, lived, n_step, 0.9)


@pytest.mark.parametrize("padding", ["black", "repeated", "whole"])
def test_saved_in_chunks_and_brought_back_it_goes_on_alike(padding: str) -> None:
    def make() -> ReplayBuffer:
        replay = ReplayBuffer(60, 2, OBS, PUSH, n_step=2, gamma=0.9, frame_stack=STACK)
        replay.chunk_rows = 7
        return replay

    games = Games(2, 3, padding)
    lived: list[Any] = []
    source = make()
    fill(source, games, 75, lived)
    target = make()
    target.load_ring_state(source.ring_state())
    for index in range(source.num_chunks):
        target.load_chunk(index, source.chunk_state(index))
    target.resume_at(games.stacks)
    check_all(target, lived, 2, 0.9)
    more = [games.step() for _ in range(40)]
    for replay in (source, target):
        for obs, action, step in more:
            replay.add(obs, action, {}, step)
    check_all(target, lived + more, 2, 0.9)
    for index in range(source.num_chunks):
        one, other = source.chunk_state(index), target.chunk_state(index)
        assert np.array_equal(one["obs/"]["marks"], other["obs/"]["marks"])
        assert np.array_equal(one["obs/"]["obs"], other["obs/"]["obs"])


def test_going_on_from_elsewhere_splices_nothing() -> None:
    """A resume that could not be exact: the environments stand at other games, mid-way."""
    replay = ReplayBuffer(60, 2, OBS, PUSH, gamma=0.9, frame_stack=STACK)
    lived: list[Any] = []
    fill(replay, Games(2, 3), 9, lived)
    elsewhere = Games(2, 4, "whole")
    replay.resume_at(elsewhere.stacks)
    fill(replay, elsewhere, 9, lived)
    check_all(replay, lived, 1, 0.9)


@pytest.mark.parametrize("padding", ["black", "whole"])
def test_a_copy_on_a_device_gives_the_same_batches(padding: str) -> None:
    replays = [
        ReplayBuffer(50, 2, OBS, PUSH, n_step=2, gamma=0.9, frame_stack=STACK, device=device)
        for device in (None, CPU)
    ]
    games = [Games(2, 6, padding), Games(2, 6, padding)]
    generators = [torch.Generator().manual_seed(1) for _ in replays]
    for added in (3, 1, 1, 5, 20, 30, 60, 1):
        batches = []
        for replay, game, generator in zip(replays, games, generators, strict=True):
            fill(replay, game, added, [])
            batches.append(replay.sample(40, generator))
        for name, tensor in batches[0].items():
            assert np.array_equal(np.asarray(tensor), np.asarray(batches[1][name])), (name, added)


def test_priorities_never_point_at_rows_that_are_gone() -> None:
    replay = ReplayBuffer(
        12, 2, OBS, PUSH, gamma=0.9, frame_stack=STACK, prioritization=Prioritization(0.6)
    )
    lived: list[Any] = []
    generator = torch.Generator().manual_seed(0)
    games = Games(2, 8)
    for _ in range(60):
        fill(replay, games, 1, lived)
        batch = replay.sample(16, generator)
        replay.update_priorities(batch["cells"], torch.rand(16, generator=generator))
        rows = batch["cells"] // 2
        age = (replay._head - 1 - rows) % replay._ring
        assert (age < min(len(lived), replay.rows)).all()


@pytest.mark.parametrize("padding", ["black", "repeated", "whole"])
def test_newest_observations_are_whole_stacks(padding: str) -> None:
    games = Games(2, seed=4, padding=padding)
    lived: list[Any] = []
    replay = ReplayBuffer(24, 2, OBS, PUSH, frame_stack=STACK)
    fill(replay, games, 31, lived)
    for count in (1, 5, 12):
        obs, valid = replay.newest_observations(count)
        assert np.array_equal(obs, np.concatenate([seen for seen, _, _ in lived[-count:]]))
        assert valid.shape == (2 * count,)


def test_an_image_costs_its_bytes_once() -> None:
    each = ReplayBuffer.bytes_per_transition(OBS, PUSH, frame_stack=STACK)
    assert each == 2 * 3 * 5 + 1 + 8 + 9
    replay = ReplayBuffer(1000, 2, OBS, PUSH, frame_stack=STACK)
    fixed = 64 * 30 + (STACK * 2 + 1) * each  # the pool's first rows, and the ring's spare ones
    assert replay.nbytes <= 1000 * each + fixed
    fill(replay, Games(2, 1), 200, [])
    assert replay.nbytes <= 1000 * each + fixed + 64 * 30, "a final image now and then"
