"""Logical shards in one process: learners, statistics, streams, evaluation, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sharded_runs
from conftest import MakeConfig
from rl_training.algorithms.metrics import explained_variance
from rl_training.algorithms.moments import Moments, merged_rows, moments_of
from rl_training.checkpointing import state_digest, to_storable
from rl_training.communicator import (
    ALONE,
    Communicator,
    PerShard,
    gather_state,
    local_state,
    per_shard_state,
    saved_shards,
    state_of_each,
)
from rl_training.data.priorities import importance_weights
from rl_training.data.recurrent_rollout_buffer import RecurrentRolloutBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.models.normalizer import RewardNormalizer, RunningNorm
from rl_training.registry import ALGORITHMS
from rl_training.runtime.assembly import build_algorithm
from rl_training.runtime.ranks import Decision, ProcessRanks
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer
from rl_training.seeding import shard_streams, stream_seed
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep

OBS = ObsSpec({"": ArraySpec((3,), "float32")})
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
STEPS, ENVS, SHARDS = 24, 4, 2
START = Progress(0, 1000)
CLOSE = 1e-10


@pytest.fixture
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# -- learners: two shards agree with one fused batch ----------------------------------------------


def fill(buffer: RolloutBuffer, envs: slice, seed: int, state_size: int) -> RolloutBuffer:
    """Store the columns ``envs`` of a rollout in which the last two environments end often.

    Each end is followed by a reset-only row, so that the halves have different numbers of valid
    rows; one of two ends is a truncation.
    """
    rng = np.random.default_rng(seed)
    ends = np.zeros(ENVS, bool)
    for t in range(STEPS):
        obs, following, final = rng.normal(size=(3, ENVS, 3))
        states = torch.from_numpy(rng.normal(size=(2, ENVS, state_size)))
        valid = ~ends
        ends = valid & np.array([t == 12, False, t % 5 == 3, t % 4 == 2])
        truncated = ends & bool(t % 2)
        step = VectorStep(
            obs=following[envs],
            final_obs=np.where(ends[:, None], final, following)[envs],
            reward=np.where(valid, rng.normal(size=ENVS), 0.0)[envs],
            terminated=(ends & ~truncated)[envs],
            truncated=truncated[envs],
            valid=valid[envs],
            episodes=(),
        )
        record = {"state": states[0, envs], "next_state": states[1, envs]} if state_size else {}
        buffer.add(obs[envs], rng.integers(3, size=ENVS)[envs], record, step)
    for name, value in vars(buffer).items():  # its own memory is float32
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            setattr(buffer, name, value.double())
    return buffer


def rollout(envs: slice, seed: int, state_size: int = 0) -> RolloutBuffer:
    count = len(range(ENVS)[envs])
    shapes = (STEPS, count, (3,), ())
    options: dict[str, Any] = {
        "obs_dtype": torch.float64,
        "action_dtype": torch.int64,
        "masked": True,
    }
    if not state_size:
        return fill(RolloutBuffer(*shapes, **options), envs, seed, 0)
    buffer = RecurrentRolloutBuffer(*shapes, sequence_length=8, **options)
    return fill(buffer, envs, seed, state_size)


EPOCHS: dict[str, Any] = {
    "num_steps": STEPS,
    "num_minibatches": 1,
    "update_epochs": 3,
    "clip_vloss": True,
}
KNOBS: dict[str, dict[str, Any]] = {
    "ppo": EPOCHS,
    "a2c": {"num_steps": STEPS, "norm_adv": True},
    "recurrent_ppo": {**EPOCHS, "sequence_length": 8, "lstm_size": 4},
    "ppg": {**EPOCHS, "policy_phases": 3, "aux_epochs": 2, "num_aux_minibatches": 1},
    "dqn": {"prioritized": True, "double": True, "max_grad_norm": 0.5},
    "drqn": {"batch_sequences": 8, "lstm_size": 4, "n_step": 2},
    "sac": {"batch_size": 8},
    "sac_discrete": {"batch_size": 8},
    "pqn": {"num_steps": STEPS, "num_minibatches": 1},
    "td3": {"batch_size": 8},
}


ON_POLICY = ["ppo", "a2c", "recurrent_ppo", "ppg", "pqn"]


def two_learners(algo: str, make: MakeConfig, action_spec: ActionSpec, **more: Any) -> list[Any]:
    """Return learners with the same weights: of one shard, and of two."""
    common = {"num_envs": ENVS, "normalize_obs": True, "learning_rate": 0.01}
    knobs = {**KNOBS[algo], **more}
    sizes = {"buffer_size": 320} if algo not in ON_POLICY else {}
    return [
        build_algorithm(
            make(algo=algo, shards=communicator.shards, **common, **sizes, **knobs),
            OBS,
            action_spec,
            torch.device("cpu"),
            communicator=communicator,
        )
        for communicator in (ALONE, Communicator(SHARDS))
    ]


def weights(learner: Any) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for name, value in learner.module.state_dict().items()
        if value.is_floating_point()
    }


def assert_agree(learners: Sequence[Any], before: Mapping[str, Tensor]) -> None:
    """Check that learners have the same weights and statistics, which are not those before."""
    fused, sharded = map(weights, learners)
    for name, value in fused.items():
        torch.testing.assert_close(sharded[name], value, rtol=0, atol=CLOSE, msg=name)
    moved = [float((fused[name] - before[name]).abs().max()) for name in before]
    assert max(moved) > 1e-3


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("algo", ON_POLICY)
def test_a_rollout_in_shards_is_learnt_as_a_whole(algo: str, make_config: MakeConfig) -> None:
    fused, sharded = learners = two_learners(algo, make_config, DISCRETE)
    before = weights(fused)
    state_size = fused.model.state_size if algo == "recurrent_ppo" else 0
    for seed in range(3):
        whole = rollout(slice(0, 4), seed, state_size)
        halves = [rollout(envs, seed, state_size) for envs in (slice(0, 2), slice(2, 4))]
        assert len({int(half.valid.sum()) for half in halves}) == 2
        assert fused.learn(whole, START) == sharded.learn(halves, START)
        metrics, of_shards = fused.pop_metrics(), sharded.pop_metrics()
        assert of_shards == {k: pytest.approx(v, abs=CLOSE) for k, v in metrics.items()}
    if algo == "ppg":
        assert sharded.auxiliary_phases == 1
    assert_agree(learners, before)


BATCH = 8


@pytest.mark.usefixtures("_float64")
def test_the_divergence_of_all_shards_ends_a_learning_phase(make_config: MakeConfig) -> None:
    epochs = []
    for target in 10.0 ** torch.linspace(-3, -1, 13):
        knobs = {"target_kl": float(target), "update_epochs": 20}
        fused, sharded = two_learners("ppo", make_config, DISCRETE, **knobs)
        count = fused.learn(rollout(slice(0, 4), 0), START)
        halves = [rollout(envs, 0) for envs in (slice(0, 2), slice(2, 4))]
        assert sharded.learn(halves, START) == count
        epochs.append(count)
    assert len(set(epochs)) > 3, epochs


LEARNT = ("actions", "rewards", "discounts", "mask")


def transitions(seed: int, spec: ActionSpec) -> dict[str, Any]:
    """A batch with weights, as of prioritised replay, and noise."""
    generator = torch.Generator().manual_seed(seed)
    discounts = torch.full((BATCH,), 0.9)
    discounts[-1] = 0.0
    actions = 2 * torch.rand(BATCH, 2, generator=generator) - 1
    if spec is DISCRETE:
        actions = torch.randint(3, (BATCH,), generator=generator)
    return {
        "obs": torch.randn(BATCH, 3, generator=generator),
        "next_obs": torch.randn(BATCH, 3, generator=generator),
        "rewards": torch.randn(BATCH, generator=generator),
        "discounts": discounts,
        "weights": torch.rand(BATCH, generator=generator),
        "actions": actions,
        "noise": torch.randn(2, BATCH, 2, generator=generator),
    }


def sequences(seed: int, length: int = 6) -> dict[str, Any]:
    """Sequences; in the second half more of their steps are padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(length, BATCH)
    mask[2:, BATCH // 2 + 1 :] = 0.0
    return {
        "obs": torch.randn(length + 1, BATCH, 3, generator=generator),
        "actions": torch.randint(3, (length, BATCH), generator=generator),
        "rewards": torch.randn(length, BATCH, generator=generator),
        "discounts": torch.full((length, BATCH), 0.9),
        "mask": mask,
        "state": torch.randn(BATCH, 8, generator=generator),
    }


def halves_of(batch: Mapping[str, Any], axes: Mapping[str, int]) -> list[dict[str, Any]]:
    parts = {key: value.chunk(SHARDS, axes.get(key, 0)) for key, value in batch.items()}
    return [{key: value[i] for key, value in parts.items()} for i in range(SHARDS)]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("algo", ["dqn", "drqn", "sac", "sac_discrete", "td3"])
def test_a_batch_in_shards_is_learnt_as_a_whole(algo: str, make_config: MakeConfig) -> None:
    spec = BOX if algo in ("sac", "td3") else DISCRETE
    fused, sharded = learners = two_learners(algo, make_config, spec)
    before = weights(fused)
    axes = {"noise": 1} if algo != "drqn" else dict.fromkeys(("obs", *LEARNT), 1)
    for seed in range(3):
        batch = sequences(seed) if algo == "drqn" else transitions(seed, spec)
        parts = halves_of(batch, axes)
        if algo == "td3":  # it takes noise for one policy alone
            batch, *parts = ({**one, "noise": one["noise"][0]} for one in (batch, *parts))
        metrics, of_shards = fused.update(batch), sharded.update(*parts)
        for name in metrics.keys() & {"loss", "critic_loss", "actor_loss", "entropy"}:
            torch.testing.assert_close(metrics[name], of_shards[name], rtol=0, atol=CLOSE)
        if algo == "dqn":
            errors = torch.cat(of_shards["td_errors"])
            torch.testing.assert_close(metrics["td_errors"][0], errors, rtol=0, atol=CLOSE)
    assert_agree(learners, before)


# -- statistics -----------------------------------------------------------------------------------


def test_merged_moments_are_those_of_all_numbers() -> None:
    rng = np.random.default_rng(0)
    parts = [5.0 + rng.normal(size=count) for count in (7, 1, 30)]
    masks = [rng.random(len(part)) < 0.6 for part in parts]
    masks[1][:] = False  # a shard in which nothing counts
    rows = [
        moments_of(torch.from_numpy(part), torch.from_numpy(mask.astype(np.float64)))
        for part, mask in zip(parts, masks, strict=True)
    ]
    counted = np.concatenate([part[mask] for part, mask in zip(parts, masks, strict=True)])
    merged = merged_rows(torch.stack(rows))
    assert float(merged.count) == len(counted)
    assert float(merged.mean) == pytest.approx(counted.mean(), rel=1e-12)
    assert float(merged.variance()) == pytest.approx(counted.var(), rel=1e-12)
    assert float(merged.variance(correction=1)) == pytest.approx(counted.var(ddof=1), rel=1e-12)
    everything = merged_rows(torch.stack([moments_of(torch.from_numpy(part)) for part in parts]))
    assert float(everything.variance()) == pytest.approx(np.concatenate(parts).var(), rel=1e-12)


def test_the_formulas_agree_with_those_without_shards() -> None:
    """Rounding alone differs: of standard deviations, rewards per rollout, importance weights."""
    generator = np.random.default_rng(11)
    values = torch.from_numpy(generator.normal(3.0, 7.0, 500))
    returns = torch.from_numpy(generator.normal(1.0, 2.0, 500))
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    found = explained_variance([{"returns": returns, "values": values}])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)

    in_rollouts, at_once = (RewardNormalizer(4, 0.99, clip=1e9) for _ in range(2))
    nothing, everything = np.zeros(4, bool), np.ones(4, bool)
    for step in range(200):
        rewards = generator.normal(0.5, 3.0, 4)
        ours, theirs = (one(rewards, nothing, everything) for one in (in_rollouts, at_once))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
        if step % 16 == 15:
            in_rollouts.end_rollout([in_rollouts.rollout_moments])

    priorities = generator.random(64) + 0.01
    chances = priorities / priorities.sum()
    weights = importance_weights(chances, float(chances.min()), 0.4)
    np.testing.assert_allclose(weights, (priorities / priorities.min()) ** -0.4, rtol=1e-6)


def test_moments_are_merged_one_shard_after_the_other() -> None:
    rows = torch.tensor([[3.0, 0.1, 0.2], [4.0, 0.7, 0.4], [5.0, -0.3, 0.9]])
    expected = Moments(*rows[0]).merged(Moments(*rows[1])).merged(Moments(*rows[2]))
    assert merged_rows(rows) == expected


def test_a_normaliser_of_observations_takes_the_rows_of_all_shards() -> None:
    rng = np.random.default_rng(0)
    batches = [torch.from_numpy(3.0 + 2.0 * rng.normal(size=(rows, 2))) for rows in (9, 0, 4, 6)]
    norm = RunningNorm((2,), clip=10.0)
    norm.update(*batches[:2], communicator=Communicator(2))
    norm.update(*batches[2:], communicator=Communicator(2))
    everything = torch.cat(batches).numpy()
    assert float(norm.count) == len(everything)
    np.testing.assert_allclose(norm.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.m2 / norm.count, everything.var(0), rtol=1e-12)


def test_normalisers_of_rewards_are_merged_between_rollouts() -> None:
    rng = np.random.default_rng(0)
    shards = [RewardNormalizer(2, gamma=0.9, clip=10.0) for _ in range(2)]
    never, always = np.zeros(2, bool), np.ones(2, bool)
    returns, seen = np.zeros((2, 2)), []
    for rollout_number in range(2):
        for _ in range(5):
            rewards = rng.normal(size=(2, 2)) * (1.0 + rollout_number)
            returns = 0.9 * returns + rewards
            seen.append(returns)
            for shard, row in zip(shards, rewards, strict=True):
                shard(row, never, always)
        alone = [shard.moments for shard in shards]
        assert alone[0] != alone[1]
        together = [shard.rollout_moments for shard in shards]
        for shard in shards:
            shard.end_rollout(together)
        assert shards[0].moments == shards[1].moments
        merged = shards[0].moments
        assert merged.count == 20 * (rollout_number + 1)
        assert merged.variance() == pytest.approx(np.array(seen).var(), rel=1e-12)


# -- state ----------------------------------------------------------------------------------------


class Process(Communicator):
    """One of several processes, each a thread of this one."""

    is_local = False

    def __init__(self, shards: int, rank: int, world_size: int, table: dict[Any, Any]) -> None:
        super().__init__(shards)
        self.rank, self.world_size = rank, world_size
        each = shards // world_size
        self.local = range(rank * each, (rank + 1) * each)
        self._table = table
        self._barrier: threading.Barrier = table["barrier"]

    def gather_objects(self, values: Sequence[Any], *, everywhere: bool = True) -> list[Any]:
        self._table[self.rank] = list(values)
        self._barrier.wait(10)
        return [value for rank in range(self.world_size) for value in self._table[rank]]


def on_each_process(shards: int, world_size: int, function: Callable[[Process], Any]) -> list[Any]:
    table: dict[Any, Any] = {"barrier": threading.Barrier(world_size)}
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        found[rank] = function(Process(shards, rank, world_size, table))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def state_of(communicator: Communicator) -> dict[str, Any]:
    """A state with values of the local shards at two places."""
    return {
        "step": 7,
        "learner": {
            "rng": per_shard_state([f"rng {i}" for i in communicator.local], communicator),
            "weights": [1, 2],
        },
        "envs": per_shard_state([{"shard": i} for i in communicator.local], communicator),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_state_holds_every_shard_wherever_it_was_saved(world_size: int) -> None:
    shards = 4
    whole = gather_state(state_of(Communicator(shards)), Communicator(shards))
    assert saved_shards(whole["envs"]) == [{"shard": i} for i in range(shards)]
    gathered = on_each_process(shards, world_size, lambda one: gather_state(state_of(one), one))
    assert gathered == [whole] * world_size

    def restored(one: Communicator) -> list[Any]:
        state = local_state(whole, one)
        assert state == state_of(one)
        assert isinstance(state["envs"], PerShard)
        return state_of_each(state["learner"]["rng"], one)

    parts = on_each_process(shards, world_size, restored)
    assert [name for part in parts for name in part] == [f"rng {i}" for i in range(shards)]


def test_the_state_of_an_only_shard_is_as_it_was_without_shards() -> None:
    state = state_of(ALONE)
    assert gather_state(state, ALONE) == state
    assert state["envs"] == {"shard": 0}
    assert local_state(state, ALONE) == state
    assert saved_shards(state["envs"]) == [{"shard": 0}]


def test_a_state_of_another_number_of_shards_is_refused() -> None:
    whole = gather_state(state_of(Communicator(4)), Communicator(4))
    with pytest.raises(ValueError, match="does not have parts of 2 shards"):
        local_state(whole, Communicator(2))
    with pytest.raises(ValueError, match="one part for each of 2 shards"):
        state_of_each([1, 2, 3], Communicator(2))


# -- decisions ------------------------------------------------------------------------------------


class OtherRank:
    """A group of two ranks, of which the other one has a message at a given exchange."""

    rank, world_size, shards, local = 0, 2, 2, range(1)

    def __init__(self, **messages: Sequence[int]) -> None:
        self.messages = {int(number): row for number, row in messages.items()}
        self.exchanges = 0

    def gather_ranks(self, row: Tensor) -> Tensor:
        self.exchanges += 1
        other = self.messages.get(self.exchanges, (0, 0, 0))
        return torch.stack((row, torch.tensor([*other, *row[3:].tolist()])))


def test_ranks_decide_together_and_exchange_seldom() -> None:
    group = OtherRank(**{"3": (2, 0, 0), "4": (0, 1, 0)})
    ranks = ProcessRanks(group)  # type: ignore[arg-type]
    decisions = [ranks.poll(None, overdue=False, place="learn") for _ in range(400)]
    assert group.exchanges < 20
    assert Decision("SIGTERM", False, True) in decisions
    assert Decision(None, True, True) in decisions
    first = decisions.index(Decision("SIGTERM", False, True))
    assert decisions[first + 1] == Decision(None), "no message between two exchanges"


def test_slow_work_is_noticed_after_fast_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of 1 ms, then steps of 0.1 s: each kind of work has a pace of its own."""
    clock = [0.0]
    monkeypatch.setattr("rl_training.runtime.ranks.time.monotonic", lambda: clock[0])
    group = OtherRank()
    ranks = ProcessRanks(group)  # type: ignore[arg-type]

    def seconds_between_exchanges(place: str, seconds: float) -> float:
        begin, before = clock[0], group.exchanges
        while group.exchanges == before:
            clock[0] += seconds
            ranks.poll(None, overdue=False, place=place)
        return clock[0] - begin

    for _ in range(20):
        assert seconds_between_exchanges("learn", 0.001) < 0.3
    assert seconds_between_exchanges("learn", 0.001) > 0.2
    for _ in range(20):
        assert seconds_between_exchanges("collect", 0.1) < 0.5
    for _ in range(20):
        seconds_between_exchanges("collect", 1e-6)
    assert seconds_between_exchanges("collect", 0.05) < 26, "even where fast work becomes slow"


def test_a_rank_waits_for_those_that_still_work() -> None:
    group = OtherRank(**{"1": (0, 0, 0), "2": (0, 1, 0), "3": (0, 0, 1), "4": (0, 0, 2)})
    ranks = ProcessRanks(group)  # type: ignore[arg-type]
    decisions = [ranks.wait(None, overdue=False, failed=False) for _ in range(4)]
    assert decisions == [
        Decision(None, waiting=True),
        Decision(None, overdue=True, waiting=True),
        Decision(None),
        Decision(None, failed=True),
    ]
    assert ranks.wait("SIGTERM", overdue=False, failed=False).signal == "SIGTERM"


# -- streams --------------------------------------------------------------------------------------


def set_up(algo: str, shards: int, **overrides: Any) -> Trainer:
    """Return the trainer of a case, kept in memory."""
    config = sharded_runs.make_case(algo, shards, Path()).with_overrides(**overrides)
    return ExperimentManager.setup(config, run_dir=None)


def test_episodes_name_environments_by_their_index_in_the_run() -> None:
    trainer: Any = set_up("ppo", 2, env_kwargs={"max_episode_steps": 3})
    taken = trainer.source.collect(trainer.buffers, 16, Progress(0, 256))
    assert {episode.env for episode in taken.episodes} == {0, 1, 2, 3}
    trainer.close()


def streams_of(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Return of each shard: first observations, the actor's noise and the learner's order."""
    sources = getattr(trainer.source, "shards", [trainer.source])
    learner: Any = trainer.learner
    return [
        (
            np.asarray(source.env.reset()),
            state_digest(to_storable(source.actor.state_dict())),
            generator.initial_seed(),
        )
        for source, generator in zip(sources, learner.generators, strict=True)
    ]


@pytest.mark.parametrize(
    ("algo", "vectorization"), [*((algo, "sync") for algo in KNOBS), ("ppo", "native")]
)
def test_shards_have_streams_of_their_own(algo: str, vectorization: str) -> None:
    trainer = set_up(algo, 4, vectorization=vectorization)
    shards = streams_of(trainer)
    trainer.close()
    assert len({obs.tobytes() for obs, _, _ in shards}) == 4
    assert len({noise for _, noise, _ in shards}) == 4
    assert len({order for _, _, order in shards}) == 4
    plain = set_up(algo, 1, vectorization=vectorization)
    (only,) = streams_of(plain)
    plain.close()
    assert shards[0][1:] == only[1:], "the first shard has the streams of a run without shards"
    if vectorization == "sync":  # these are seeded one by one
        np.testing.assert_array_equal(np.concatenate([obs for obs, _, _ in shards]), only[0])


def test_the_first_shard_has_the_stream_itself() -> None:
    seeds = [one.initial_seed() for one in shard_streams(7, "minibatches", range(3))]
    assert seeds[0] == stream_seed(7, "minibatches"), "as runs had it before there were shards"
    assert len(set(seeds)) == 3
    later = shard_streams(7, "minibatches", range(2, 3))
    assert [one.initial_seed() for one in later] == seeds[2:]


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "made"),
    [(3, [(2, 0, 0), (1, 2, 1)]), (1, [(1, 0, 0)]), (4, [(2, 0, 0), (2, 2, 1)])],
)
def test_episodes_of_an_evaluation_are_divided_among_shards(
    episodes: int, made: list[tuple[int, ...]]
) -> None:
    trainer = set_up("ppo", 2)
    make, calls = trainer.make_eval_env, []

    def recorded(*arguments: int) -> Any:
        calls.append(arguments)
        return make(*arguments)

    trainer.make_eval_env = recorded
    result, _ = trainer.evaluate(episodes, deterministic=False)
    assert (result, {}) == trainer.evaluate(episodes, deterministic=False)
    trainer.close()
    assert calls == made
    assert len(result.returns) == len(result.lengths) == episodes
    if episodes > 2:
        assert len(set(result.returns)) > 1


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"shards": 3},
            "'shards' must be a divisor of num_envs = 4 .or set num_envs to a multiple .*; got 3",
        ),
        ({"shards": 0}, "'shards' must be 1 to .*; got 0"),
        (
            {"num_steps": 3, "num_minibatches": 4, "shards": 2},
            r"num_minibatches' must be a divisor of the rollout, .* / shards .* 2 \* 3 = 6; got 4",
        ),
        (
            {"algo": "recurrent_ppo", "num_steps": 32, "num_minibatches": 4, "shards": 2},
            "num_minibatches' must be a divisor of the rollout's sequences, num_envs / shards",
        ),
        (
            {"algo": "ppg", "policy_phases": 1, "num_aux_minibatches": 256, "shards": 2},
            "num_aux_minibatches' must be a divisor of policy_phases .* num_envs / shards",
        ),
        ({"algo": "dqn", "batch_size": 33, "shards": 2}, "batch_size' must be divisible by shards"),
        (
            {"algo": "dqn", "buffer_size": 301, "shards": 2},
            "buffer_size' must be divisible by shards = 2",
        ),
        (
            {"algo": "drqn", "batch_sequences": 7, "shards": 2},
            "batch_sequences' must be divisible by shards",
        ),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(
    settings: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(num_envs=4, **settings)


def test_an_algorithm_that_does_not_declare_it_has_no_shards(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "ppo", ALGORITHMS["ppo"]._replace(engines=("local",)))
    assert make_config(shards=1).shards == 1
    with pytest.raises(ConfigError, match="'shards' must be 1 for ppo; got 2; use a2c, "):
        make_config(shards=2)


class Encoder(nn.Module):
    """A layer, and what a subclass adds."""

    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__()
        self.output_size = 8
        self.linear = nn.Linear(obs_spec.leaves[""].size, 8)
        self.more: nn.Module = nn.LayerNorm(8)

    def forward(self, obs: Tensor) -> Tensor:
        found: Tensor = self.more(self.linear(obs)).tanh()
        return found


class WithBatchNorm(Encoder):
    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__(obs_spec)
        self.more = nn.BatchNorm1d(8)


class WithDropout(Encoder):
    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__(obs_spec)
        self.more = nn.Dropout(0.5)


class WithFunctionalDropout(Encoder):
    def forward(self, obs: Tensor) -> Tensor:
        return functional.dropout(super().forward(obs), 0.5, training=self.training)


def trained_with(name: str, algo: str, shards: int) -> None:
    encoder = {"encoder": f"{__name__}:{name}", "hidden_sizes": (8,)}
    set_up(algo, shards, eval_episodes=0, **encoder).train()


@pytest.mark.parametrize("algo", ["ppo", "sac"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithBatchNorm", r"'shards' must be 1: the buffer \S*running_mean may change"),
        ("WithDropout", r"'shards' must be 1: \S+ \(Dropout\) draws random numbers"),
        ("WithFunctionalDropout", "'shards' must be 1: a network draws random numbers"),
    ],
)
def test_networks_that_depend_on_the_placement_are_refused(
    name: str, message: str, algo: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trained_with(name, algo, 2)
    trained_with(name, algo, 1)
    trained_with("Encoder", algo, 2)
