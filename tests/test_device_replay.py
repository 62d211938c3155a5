"""A replay on the device equals the one on the host, transition by transition."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.off_policy import ReplayLearner
from rl_training.data.device_replay import DeviceReplay
from rl_training.data.replay_buffer import Draw, ReplayBuffer
from rl_training.data.transition_ring import ENDED
from rl_training.device_envs import DeviceStep
from rl_training.errors import ConfigError, NonFiniteError
from rl_training.runtime.memory import make_claimed
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep
from state_compare import differences

CPU = torch.device("cpu")
ENVS = 3
OBS = ObsSpec(
    {
        "at": ArraySpec((5,), "float32"),
        "image": ArraySpec((1, 3, 3), "uint8"),
        ACTION_MASK: ArraySpec((7,), "bool"),
    }
)
MOVE = ActionSpec("box", (2, 3), "float32", low=(-1.0,) * 6, high=(1.0,) * 6)


def random_obs(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "at": rng.normal(size=(ENVS, 5)).astype(np.float32),
        "image": rng.integers(0, 256, (ENVS, 1, 3, 3), dtype=np.uint8),
        ACTION_MASK: rng.random((ENVS, 7)) < 0.5,
    }


class Steps:
    """The same random steps for both replays; every third ends an episode in some way."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)
        self.obs = random_obs(self.rng)

    def fill(self, host: ReplayBuffer | None, there: DeviceReplay, count: int) -> None:
        for _ in range(count):
            action = self.rng.normal(size=(ENVS, 2, 3)).astype(np.float32)
            reward = self.rng.normal(size=ENVS).astype(np.float32)
            terminated, truncated = self.rng.random((2, ENVS)) < 0.2
            ended, obs, final = terminated | truncated, random_obs(self.rng), random_obs(self.rng)
            for key, leaf in final.items():
                leaf[~ended] = obs[key][~ended]
            valid = np.ones(ENVS, bool)
            if host is not None:
                step = VectorStep(obs, final, reward, terminated, truncated, valid, ())
                host.add(self.obs, action, {}, step)
            tensors: list[Any] = [
                {key: torch.from_numpy(leaf) for key, leaf in one.items()} for one in (obs, final)
            ]
            flags = [torch.from_numpy(one) for one in (reward, terminated, truncated)]
            shown = {key: torch.from_numpy(leaf) for key, leaf in self.obs.items()}
            there.add(shown, torch.from_numpy(action), {}, DeviceStep(*tensors, *flags))
            self.obs = obs


def pair(capacity: int, n_step: int) -> tuple[ReplayBuffer, DeviceReplay]:
    settings: dict[str, Any] = {"n_step": n_step, "gamma": 0.9}
    return (
        ReplayBuffer(capacity, ENVS, OBS, MOVE, **settings),
        DeviceReplay(capacity, ENVS, OBS, MOVE, device=CPU, **settings),
    )


def stored_cells(replay: Any) -> Any:
    (ring, _, _), (head, filled) = (replay.ring_state()[key] for key in ("shape", "position"))
    rows = (head - filled + np.arange(filled)) % ring
    return (rows[:, None] * ENVS + np.arange(ENVS)).reshape(-1)


def assert_same_batch(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(batch) - {"cells"} == set(other)
    for name, theirs in other.items():
        mine = batch[name]
        pairs = [(mine[k], theirs[k]) for k in mine] if isinstance(mine, dict) else [(mine, theirs)]
        for one, its in pairs:
            assert one.dtype == its.dtype
            assert torch.equal(one, its), name


@pytest.mark.parametrize("n_step", [1, 3])
def test_it_returns_what_the_host_does(n_step: int) -> None:
    host, there = pair(30, n_step)
    steps = Steps()
    for added in (1, 2, 6, 1, 1, 15, 40):
        steps.fill(host, there, added)
        cells = stored_cells(host)
        assert np.array_equal(cells, stored_cells(there))
        batch = host.batch(Draw(cells, None), 1.0, 1.0)
        assert_same_batch(batch, there.transitions(torch.from_numpy(cells)))
        newest = [replay.newest_observations(4) for replay in (host, there)]
        for key in OBS.leaves:
            assert torch.equal(newest[0].obs[key], newest[1].obs[key])
    assert len(there) == len(host) == 30


def test_every_stored_transition_is_drawn_and_no_other() -> None:
    _, there = pair(30, 1)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="no transition"):
        there.sample(4, generator)
    steps = Steps()
    for added in (2, 8, 1, 14):
        steps.fill(None, there, added)
        drawn = there._drawn_cells(there.sample(3000, generator)["recipe"]).numpy()
        cells, counts = np.unique(drawn, return_counts=True)
        assert np.array_equal(cells, np.sort(stored_cells(there)))
        expected = 3000 / len(cells)
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize("rows", [4, 26])
def test_its_chunks_restore_it_and_a_replay_of_the_host(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.data.transition_ring._CHUNK_BYTES", 1000)
    host, there = pair(45, 1)
    steps = Steps()
    steps.fill(host, there, rows)
    assert there.chunk_rows == host.chunk_rows < 15
    assert there.num_chunks == host.num_chunks
    assert there.changed_chunks == host.changed_chunks
    restored = pair(45, 1)
    for replay in restored:
        replay.load_ring_state(there.ring_state())
        for index in range(there.num_chunks):
            replay.load_chunk(index, there.chunk_state(index))
    cells = stored_cells(there)
    expected = host.batch(Draw(cells, None), 1.0, 1.0)
    assert_same_batch(expected, restored[1].transitions(torch.from_numpy(cells)))
    own = {k: v for k, v in restored[0].batch(Draw(cells, None), 1.0, 1.0).items() if k != "cells"}
    assert_same_batch(expected, own)
    other = copy.deepcopy(steps)
    steps.fill(None, there, 8)  # and it continues as the one that was saved
    other.fill(None, restored[1], 8)
    for index in range(there.num_chunks):
        saved, again = (one.chunk_state(index) for one in (there, restored[1]))
        assert differences(saved, again) == []
    with pytest.raises(ConfigError, match="must not change on resume"):
        pair(60, 1)[1].load_ring_state(there.ring_state())


def test_after_an_inexact_resume_no_return_contains_two_episodes() -> None:
    _, there = pair(30, 3)
    steps = Steps()
    steps.fill(None, there, 4)
    newest = torch.arange(9, 12)
    before = there.transitions(newest - 3)
    there.resume_at(None, exact=True)
    steps.fill(None, there, 3)
    changed = there.transitions(newest - 3)["rewards"] != before["rewards"]
    assert changed.any()  # the next episode's rewards continue the return
    _, other = pair(30, 3)
    again = Steps()
    again.fill(None, other, 4)
    other.resume_at(None, exact=False)
    assert (other._layout.flags(other._cells)[newest] & ENDED > 0).all()
    again.fill(None, other, 3)
    assert torch.equal(other.transitions(newest - 3)["rewards"], before["rewards"])


def test_without_final_observations_truncation_bootstraps_from_the_one_before() -> None:
    spec = ObsSpec({"": ArraySpec((1,), "float32")})
    action = ActionSpec("discrete", (), "int64", nvec=(2,), start=(0,))
    replay = DeviceReplay(8, 2, spec, action, device=CPU, gamma=0.5)
    obs, following = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    ends, never = torch.tensor([True, False]), torch.zeros(2, dtype=torch.bool)
    replay.add(
        obs,
        torch.ones(2, dtype=torch.int64),
        {},
        DeviceStep(following, None, torch.ones(2), never, ends),
    )
    batch = replay.transitions(torch.arange(2))
    assert batch["next_obs"].tolist() == [[1.0], [4.0]]
    assert batch["discounts"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="cannot store"):
        replay.add(obs, torch.ones(2), {"logprobs": obs}, None)


def test_a_nan_is_found_and_named() -> None:
    _, there = pair(30, 1)
    steps = Steps()
    steps.fill(None, there, 6)
    there.check_finite(6, 0)
    there._layout.rewards.of(there._transitions)[4, 1] = torch.nan
    with pytest.raises(NonFiniteError, match="environment 1 returned a non-finite reward"):
        there.check_finite(6, 0)
    there.check_finite(1, 15)
    there.is_finite = True  # as the source has read it
    there.check_finite(6, 0)


def test_its_memory_is_what_is_announced() -> None:
    each = DeviceReplay.bytes_per_transition(OBS, MOVE)
    assert each == 2 * (24 + 16 + 8) + 24 + 8
    _, there = pair(30, 1)
    assert there._transitions.nbytes == each * ENVS * 11
    assert make_claimed(lambda: there, 1.0) is there


class Counting(ReplayLearner):
    """Keeps the batches of its updates."""

    noise_shape = (2,)

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(torch.nn.Linear(1, 1), config, **kwargs)
        self.batches: list[dict[str, Any]] = []

    def update(self, *batches: Any, delayed: bool = False) -> dict[str, Any]:
        del delayed
        self.batches += batches
        return {"zero": torch.zeros(())}

    def sync_targets(self) -> None:
        """There are none."""


def test_recipes_of_a_copy_become_the_same_batches_within_the_update() -> None:
    from rl_training.algorithms.sac import SACConfig

    replays = [ReplayBuffer(300, ENVS, OBS, MOVE, device=device) for device in (None, CPU, CPU)]
    replays[2].gather_within_update()
    learners = [Counting(SACConfig(batch_size=8)) for _ in replays]
    for learner in learners:
        learner.generators = [torch.Generator().manual_seed(3)]
    unused = DeviceReplay(3, ENVS, OBS, MOVE, device=CPU)
    made: list[Any] = []
    for replay, learner in zip(replays, learners, strict=True):
        steps, places = Steps(), []
        for added in (3, 1, 2, 80):  # the last fills the pool of final observations
            steps.fill(replay, unused, added)
            learner.learn(replay, Progress(0, 10), updates=2)
            places.append(learner._places)
        made.append(places)
    for batch, other, inside in zip(*(one.batches for one in learners), strict=True):
        assert_same_batch(batch, other)
        assert_same_batch(batch, inside)
    assert made[0] == made[1] == [[]] * 4
    first, _, before, last = (places[0] for places in made[2])
    assert first == before
    assert before != last  # graphs that read the old memory would be captured again
