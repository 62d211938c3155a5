"""Truncation, termination and resets against numbers worked out beforehand, on every backend."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn

from conformance_envs import (
    TERM,
    FixedLength,
    NativeChain,
    Recorder,
    ScriptedActor,
    Transition,
    chain_action,
    chain_actor,
    chain_makers,
    chain_transitions,
)
from conftest import MakeConfig
from rl_training.algorithms.ppo import PPO, PPOConfig
from rl_training.communicator import Communicator
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs import VectorAdapter
from rl_training.envs.episodes import SeededEpisodes
from rl_training.envs.sb3 import SB3Vector
from rl_training.envs.sync import FastSyncVectorEnv
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.errors import ConfigError
from rl_training.eval import evaluate_actor
from rl_training.models.mlp_actor_critic import Evaluation, MLPActorCritic
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.collector import Collector
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import Trainer
from rl_training.types import Array, Episode, Obs, Progress, Rows

NUM_ENVS = 3
ROLLOUT = 17
ROLLOUTS = 4
GAMMA = 0.9
POISON = 1e4
"""A value that nothing may ever bootstrap from: that of a terminal observation."""
START = Progress(0, 1)

Vector = VectorEnv[Any, Any, Any]


def _sync(mode: AutoresetMode, form: str) -> Vector:
    return SyncVectorEnv(chain_makers(NUM_ENVS, form), autoreset_mode=mode)


def _async(mode: AutoresetMode, form: str) -> Any:
    return AsyncVectorEnv(chain_makers(NUM_ENVS, form), autoreset_mode=mode)


def _sb3(form: str) -> Any:
    """The environments in a `VecEnv` of Stable-Baselines3."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    return SB3Vector(vec_env.DummyVecEnv(chain_makers(NUM_ENVS, form)))


class BatchedFinals(gym.vector.VectorWrapper):
    """Returns final observations as one batch, as simulators of other packages do."""

    def step(self, actions: Any) -> Any:
        obs, *rest, info = super().step(actions)
        if "final_obs" in info:
            whole = copy.deepcopy(obs)
            for i in np.flatnonzero(info["_final_obs"]):
                row = info["final_obs"][i]
                for key in row if isinstance(whole, dict) else ():
                    whole[key][i] = row[key]
                if not isinstance(whole, dict):
                    whole[i] = row
            info = {**info, "final_obs": whole}
        return obs, *rest, info


BACKENDS: dict[str, Callable[[str], Any]] = {
    "sync-next-step": functools.partial(_sync, AutoresetMode.NEXT_STEP),
    "sync-same-step": functools.partial(_sync, AutoresetMode.SAME_STEP),
    "sync-disabled": functools.partial(_sync, AutoresetMode.DISABLED),
    "async-next-step": functools.partial(_async, AutoresetMode.NEXT_STEP),
    "async-same-step": functools.partial(_async, AutoresetMode.SAME_STEP),
    "async-disabled": functools.partial(_async, AutoresetMode.DISABLED),
    "fast-sync": lambda form: FastSyncVectorEnv(chain_makers(NUM_ENVS, form, seeded=True)),
    "workers": lambda form: WorkerVectorEnv(
        chain_makers(NUM_ENVS, form, seeded=True), timeout=30, seed=0
    ),
    "native-next-step": lambda form: NativeChain(NUM_ENVS),
    "sb3": _sb3,
    "batched-finals": lambda form: BatchedFinals(_sync(AutoresetMode.SAME_STEP, form)),
}
LOSING = {"sync-same-step", "async-same-step", "batched-finals", "sb3"}
NEXT_STEP = {"sync-next-step", "async-next-step", "native-next-step"}

every_backend = pytest.mark.parametrize("backend", BACKENDS)


@contextlib.contextmanager
def chains(backend: str, form: str = "box") -> Iterator[VectorAdapter]:
    adapter = VectorAdapter(BACKENDS[backend](form), seed=0)
    try:
        yield adapter
    finally:
        adapter.close()


def rollout_buffer(env: VectorAdapter) -> RolloutBuffer:
    return RolloutBuffer(
        ROLLOUT,
        env.num_envs,
        env.obs_spec.shape(),
        (),
        action_dtype=torch.int64,
        masked=env.has_invalid_rows,
    )


class KnownValue(nn.Module):
    """A critic that is a given function of the chain's position."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.function = function

    def value(self, obs: Any) -> Tensor:
        return self.function(obs[:, 0])

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        value = self.value(batch["obs"])
        return Evaluation(torch.zeros_like(value), torch.zeros_like(value), value)

    def update_normalizer(self, *rows: Rows, communicator: Communicator) -> None:
        """There is none."""


def exact_value(position: Tensor) -> Tensor:
    """A reward of 1 a step until TERM; truncation is no part of the problem."""
    value = (1 - GAMMA ** (TERM - position)) / (1 - GAMMA)
    return torch.where(position >= TERM, torch.full_like(value, POISON), value)


def constant_value(position: Tensor) -> Tensor:
    return torch.where(position >= TERM, torch.full_like(position, POISON), 10.0)


def prepare(
    rollout: RolloutBuffer, value: Callable[[Tensor], Tensor], gae_lambda: float
) -> RolloutBuffer:
    """What PPO does with a rollout before it learns from it."""
    config = PPOConfig(gamma=GAMMA, gae_lambda=gae_lambda)
    PPO(KnownValue(value), config).prepare(rollout, START)
    return rollout


def observed(rollout: RolloutBuffer) -> Tensor:
    assert isinstance(rollout.obs, Tensor)
    return rollout.obs


def each_rollout(env: VectorAdapter) -> Iterator[RolloutBuffer]:
    """Rollouts that end wherever they end, in the middle of episodes as a rule."""
    buffer = rollout_buffer(env)
    collector = Collector(env, chain_actor(), buffer)
    for _ in range(ROLLOUTS):
        buffer.reset()
        collector.collect(ROLLOUT, START)
        yield buffer


class Cursor:
    """Pairs each environment's valid rows with the transitions of its chain, in order."""

    def __init__(self) -> None:
        self.book = [chain_transitions(i, ROLLOUT * ROLLOUTS) for i in range(NUM_ENVS)]
        self.used = [0] * NUM_ENVS

    def take(self, index: int, count: int) -> list[Transition]:
        first = self.used[index]
        self.used[index] += count
        return self.book[index][first : first + count]


# -- the chains themselves -------------------------------------------------------------------------


def test_chains_hold_every_kind_of_ending_and_rollouts_cut_episodes() -> None:
    for index in range(NUM_ENVS):
        book = chain_transitions(index, ROLLOUT * ROLLOUTS)
        endings = {(t.terminated, t.truncated) for t in book}
        assert endings == {(False, False), (True, False), (False, True), (True, True)}
        last_rows = [book[ROLLOUT * k - 1] for k in range(1, ROLLOUTS + 1)]
        assert not all(t.terminated or t.truncated for t in last_rows)


# -- one trajectory, whatever the backend ----------------------------------------------------------


def _row(obs: Obs, index: int) -> tuple[int, int]:
    if isinstance(obs, dict):
        return int(obs["position"][index, 0]), int(obs["episode"][index, 0])
    return int(obs[index, 0]), int(obs[index, 1])


@every_backend
@pytest.mark.parametrize("form", ["box", "dict", "reused"])
def test_every_backend_gives_the_trajectories_and_true_final_observations(
    backend: str, form: str
) -> None:
    if backend == "native-next-step" and form != "box":
        pytest.skip("the native chain has one form")
    if form == "reused" and backend in LOSING:
        pytest.skip("other libraries' SAME_STEP vectors lose the final observation of such ones")
    with chains(backend, form) as env:
        recorder = Recorder()
        collector = Collector(env, chain_actor(), recorder)
        collector.collect(ROLLOUT * ROLLOUTS, START)
    rows = recorder.rows
    for index in range(NUM_ENVS):
        valid = [row for row in rows if row[2].valid[index]]
        for (obs, action, step), (position, episode, terminated, truncated) in zip(
            valid, chain_transitions(index, len(valid)), strict=True
        ):
            assert _row(obs, index) == (position, episode)
            assert action[index] == chain_action(position, episode)
            assert step.reward[index] == 1.0
            if backend == "sb3":  # where both are true, a VecEnv returns that it was not truncated
                truncated = truncated and not terminated
            assert (step.terminated[index], step.truncated[index]) == (terminated, truncated)
            assert _row(step.final_obs, index) == (position + 1, episode)
    for (_, _, step), (obs, _, _) in itertools.pairwise(rows):
        assert all(_row(step.obs, i) == _row(obs, i) for i in range(NUM_ENVS))


@every_backend
def test_every_backend_reports_the_return_and_length_of_each_episode(backend: str) -> None:
    with chains(backend) as env:
        recorder = Recorder()
        collector = Collector(env, chain_actor(), recorder)
        result = collector.collect(ROLLOUT * ROLLOUTS, START)
    for index in range(NUM_ENVS):
        count = sum(bool(step.valid[index]) for _, _, step in recorder.rows)
        expected, length = [], 0
        for transition in chain_transitions(index, count):
            length += 1
            if transition.terminated or transition.truncated:
                expected.append(Episode(index, float(length), length))
                length = 0
        assert [episode for episode in result.episodes if episode.env == index] == expected
    assert list(collector.source.recent) == [(e.ret, e.length) for e in result.episodes]


@every_backend
def test_reset_rows_are_invalid_and_everything_else_is_valid_and_counted(backend: str) -> None:
    with chains(backend) as env:
        assert env.has_invalid_rows == (backend in NEXT_STEP)
        recorder = Recorder()
        result = Collector(env, chain_actor(), recorder).collect(ROLLOUT * ROLLOUTS, START)
    valid = np.array([step.valid for _, _, step in recorder.rows])
    done = np.array([step.terminated | step.truncated for _, _, step in recorder.rows])
    expected = np.ones_like(valid)
    if backend in NEXT_STEP:
        expected[1:] = ~done[:-1]
    assert done[:-1].any()
    assert np.array_equal(valid, expected)
    assert result.steps == np.count_nonzero(expected)


@every_backend
def test_the_actor_hears_of_every_ending_and_of_every_reset(backend: str) -> None:
    with chains(backend) as env:
        recorder, actor = Recorder(), chain_actor()
        Collector(env, actor, recorder).collect(ROLLOUT, START)
    cut = [step.terminated | step.truncated | ~step.valid for _, _, step in recorder.rows]
    assert np.array_equal(actor.ended, [row for row in cut if row.any()])


def test_the_reward_of_a_reset_row_is_never_counted() -> None:
    env = VectorAdapter(NativeChain(NUM_ENVS, reset_reward=55.0), seed=0)
    normalizer = RewardNormalizer(NUM_ENVS, GAMMA, clip=1e9)
    clean = VectorAdapter(NativeChain(NUM_ENVS), seed=0)
    expected = RewardNormalizer(NUM_ENVS, GAMMA, clip=1e9)
    result = Collector(env, chain_actor(), Recorder(), normalizer).collect(60, START)
    wanted = Collector(clean, chain_actor(), Recorder(), expected).collect(60, START)
    assert result == wanted
    assert normalizer.moments == expected.moments


def test_a_vector_that_hides_its_autoreset_mode_is_refused() -> None:
    vector = NativeChain(2)
    vector.metadata = {}
    with pytest.raises(ConfigError, match="NativeChain does not state its autoreset mode"):
        VectorAdapter(vector, seed=0)


# -- returns and advantages ------------------------------------------------------------------------


@every_backend
def test_with_exact_values_every_advantage_is_zero_for_any_lambda(backend: str) -> None:
    with chains(backend) as env:
        for rollout in each_rollout(env):
            for gae_lambda in (0.0, 0.5, 0.95, 1.0):
                prepare(rollout, exact_value, gae_lambda)
                rows = rollout.valid
                value = exact_value(observed(rollout)[..., 0])
                assert rollout.advantages[rows].abs().max() < 2e-5
                torch.testing.assert_close(rollout.returns[rows], value[rows], rtol=0, atol=2e-5)
                assert value[rows].max() < 1 / (1 - GAMMA)


def _closed_form(transitions: list[Transition], value: float, gae_lambda: float) -> list[float]:
    """Returns of consecutive transitions, the last of which is the rollout's last.

    n steps remain to the end of the episode or of the rollout; the end bootstraps from ``value``
    unless it is a termination. With lambda = 1: (1 - g^n) / (1 - g) + g^n value; with lambda = 0
    the same for n = 1 (what follows a step that ends nothing has ``value`` too).
    """
    result, n, bootstrap = [], 0, value
    for t in reversed(transitions):
        if t.terminated or t.truncated:
            n, bootstrap = 0, 0.0 if t.terminated else value
        elif gae_lambda == 0.0:
            n, bootstrap = 0, value
        n += 1
        result.append((1 - GAMMA**n) / (1 - GAMMA) + GAMMA**n * bootstrap)
    return result[::-1]


@every_backend
@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_with_wrong_values_returns_equal_the_closed_form(backend: str, gae_lambda: float) -> None:
    cursor = Cursor()
    with chains(backend) as env:
        for rollout in each_rollout(env):
            prepare(rollout, constant_value, gae_lambda)
            for index in range(NUM_ENVS):
                rows = rollout.valid[:, index]
                transitions = cursor.take(index, int(rows.sum()))
                expected = torch.tensor(_closed_form(transitions, 10.0, gae_lambda))
                torch.testing.assert_close(rollout.returns[rows, index], expected)


@every_backend
def test_only_truncations_bootstrap_and_from_the_observation_they_ended_on(backend: str) -> None:
    cursor = Cursor()
    with chains(backend) as env:
        for rollout in each_rollout(env):
            prepare(rollout, exact_value, 1.0)
            truncated = rollout.truncated_observations()
            index, final_obs = truncated if truncated is not None else (torch.zeros(0), None)
            found = {}
            for flat, obs in zip(index.tolist(), final_obs, strict=True):  # type: ignore[arg-type]
                found[divmod(flat, NUM_ENVS)] = (int(obs[0]), int(obs[1]))
            expected = {}
            for i in range(NUM_ENVS):
                rows = torch.nonzero(rollout.valid[:, i]).flatten().tolist()
                for t, step in zip(rows, cursor.take(i, len(rows)), strict=True):
                    if step.truncated and not step.terminated:
                        expected[t, i] = (step.position + 1, step.episode)
                    assert rollout.dones[t, i] == (step.terminated or step.truncated)
            assert expected
            assert found == expected
            wanted = torch.zeros_like(rollout.bootstrap)
            for (t, i), (position, _) in expected.items():
                wanted[t, i] = exact_value(torch.tensor(float(position)))
            torch.testing.assert_close(rollout.bootstrap, wanted)


@pytest.mark.parametrize("backend", sorted(NEXT_STEP))
def test_some_rollouts_begin_and_some_end_on_a_reset_row(backend: str) -> None:
    # Otherwise the tests above would not have seen these cases.
    first, last = [], []
    with chains(backend) as env:
        for rollout in each_rollout(env):
            first.append(rollout.valid[0].clone())
            last.append(rollout.valid[-1].clone())
    assert not torch.stack(first).all()
    assert not torch.stack(last).all()


# -- reset rows never enter a mean -----------------------------------------------------------------


def _actor_critic(env: VectorAdapter) -> MLPActorCritic:
    torch.manual_seed(0)
    return MLPActorCritic(
        env.obs_spec,
        env.action_spec,
        hidden_sizes=(16,),
        activation="tanh",
        log_std_init=0.0,
        normalize_obs=True,
        clip_obs=10.0,
    )


def _learn(poison: float | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Learn from a NEXT_STEP rollout whose reset rows were overwritten."""
    with chains("sync-next-step") as env:
        rollout = next(each_rollout(env))
        if poison is not None:
            reset_rows = ~rollout.valid
            assert reset_rows.any()
            observed(rollout)[reset_rows] = poison
            rollout.actions[reset_rows] = 1 - rollout.actions[reset_rows]
            rollout.rewards[reset_rows] = poison
        config = PPOConfig(num_minibatches=3, update_epochs=2, clip_vloss=True, learning_rate=0.01)
        algorithm = PPO(_actor_critic(env), config, generator=torch.Generator().manual_seed(0))
        algorithm.learn(rollout, START)
    return dict(algorithm.module.state_dict()), algorithm.pop_metrics()


def test_what_a_reset_row_holds_changes_nothing_that_is_learnt_or_reported() -> None:
    weights, metrics = _learn(None)
    other_weights, other_metrics = _learn(1234.0)
    assert metrics == other_metrics
    for name, tensor in weights.items():
        assert torch.equal(tensor, other_weights[name]), name


def test_the_observation_normaliser_sees_the_valid_rows_alone() -> None:
    with chains("native-next-step") as env:
        rollout = next(each_rollout(env))
        algorithm = PPO(_actor_critic(env), PPOConfig(num_minibatches=3))
        algorithm.learn(rollout, START)
        seen = observed(rollout)[rollout.valid].double()
    state = algorithm.module.state_dict()
    (count,) = (v for k, v in state.items() if k.endswith("count"))
    (mean,) = (v for k, v in state.items() if k.endswith("mean"))
    assert count == len(seen) < ROLLOUT * NUM_ENVS
    torch.testing.assert_close(mean, seen.mean(0))


@pytest.mark.parametrize("backend", ["sync-next-step", "native-next-step", "fast-sync"])
def test_minibatches_carry_the_mask_of_valid_rows_where_there_are_others(backend: str) -> None:
    with chains(backend) as env:
        rollout = next(each_rollout(env))
        minibatches = list(prepare(rollout, exact_value, 0.9).iter_minibatches(3))
    if backend not in NEXT_STEP:
        assert all("mask" not in minibatch for minibatch in minibatches)
        return
    mask = torch.cat([minibatch["mask"] for minibatch in minibatches])
    values = torch.cat([minibatch["values"] for minibatch in minibatches])
    assert mask.sum() == rollout.valid.sum() < mask.numel()
    # Of the valid rows none stands on a terminal observation; of the others, some do.
    assert (values[mask > 0] < POISON).all()
    assert (values[mask == 0] == POISON).any()


@every_backend
def test_the_reward_normaliser_measures_the_returns_of_valid_rows(backend: str) -> None:
    recorder = Recorder()
    normalizer = RewardNormalizer(NUM_ENVS, GAMMA, clip=1e9)
    with chains(backend) as env:
        Collector(env, chain_actor(), recorder, normalizer).collect(ROLLOUT * ROLLOUTS, START)
    returns = []
    for index in range(NUM_ENVS):
        count = sum(bool(step.valid[index]) for _, _, step in recorder.rows)
        n = 0
        for t in chain_transitions(index, count):
            n += 1
            returns.append((1 - GAMMA**n) / (1 - GAMMA))
            n = 0 if t.terminated or t.truncated else n
    count, mean, m2 = normalizer.moments
    assert count == len(returns)
    assert mean == pytest.approx(np.mean(returns))
    assert m2 / count == pytest.approx(np.var(returns))
    last = recorder.rows[-1][2]
    expected = np.where(last.valid, 1.0 / np.std(returns), 0.0)
    assert last.reward == pytest.approx(expected, rel=1e-6)


class _CountValid(Callback):
    def __init__(self) -> None:
        self.valid = self.rows = 0

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        assert isinstance(trainer, OnPolicyTrainer)
        buffer = trainer.buffer
        self.valid += int(buffer.valid.sum())
        self.rows += buffer.valid.numel()
        assert event.step == self.valid


def test_a_native_run_counts_valid_rows_as_its_steps(make_config: MakeConfig) -> None:
    counter = _CountValid()
    config = make_config(vectorization="native", total_timesteps=1024, eval_episodes=0)
    result = train_ppo(config, callbacks=[counter])
    assert counter.valid == result.metrics["global_step"] >= 1024
    assert counter.rows > counter.valid


# -- evaluation ------------------------------------------------------------------------------------


def _lengths_env(lengths: tuple[int, ...], mode: AutoresetMode) -> VectorAdapter:
    makers = [functools.partial(FixedLength, length) for length in lengths]
    if mode is AutoresetMode.SAME_STEP:
        return VectorAdapter(FastSyncVectorEnv(makers), seed=0)
    return VectorAdapter(SyncVectorEnv(makers, autoreset_mode=mode), seed=0)


def _idle(num_envs: int) -> ScriptedActor:
    return ScriptedActor(lambda obs, call: np.zeros(num_envs, np.int64))


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("num_episodes", [1, 2, 3, 4, 7, 10])
def test_evaluation_plays_exactly_the_episodes_asked_for(
    mode: AutoresetMode, num_episodes: int
) -> None:
    env = _lengths_env((2, 3, 5), mode)
    result = evaluate_actor(_idle(3), env, num_episodes=num_episodes, seed=1)
    share, rest = divmod(num_episodes, 3)
    expected = [length for i, length in enumerate((2, 3, 5)) for _ in range(share + (i < rest))]
    assert list(result.lengths) == expected
    assert result.returns == tuple(float(n) for n in expected)
    assert result.metrics()["eval/episodes"] == num_episodes
    assert result.metrics()["eval/length_mean"] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_evaluation_does_not_favour_short_episodes(mode: AutoresetMode) -> None:
    # The short environment ends forty episodes while the long one plays its first.
    result = evaluate_actor(_idle(2), _lengths_env((1, 40), mode), num_episodes=8, seed=1)
    assert sorted(result.lengths) == [1] * 4 + [40] * 4
    assert result.mean_return == 20.5


def test_evaluations_with_one_seed_are_the_same_and_forget_what_came_before() -> None:
    def env() -> VectorAdapter:
        makers = [
            functools.partial(SeededEpisodes, gym.make("CartPole-v1"), 0, i) for i in range(2)
        ]
        return VectorAdapter(FastSyncVectorEnv(makers), seed=0)

    def act(obs: Obs, call: int) -> Array:
        assert not isinstance(obs, dict)
        return (obs[:, 2] > 0).astype(np.int64)

    used = env()
    first = evaluate_actor(ScriptedActor(act), used, num_episodes=5, seed=3)
    other = evaluate_actor(ScriptedActor(act), used, num_episodes=5, seed=4)
    again = evaluate_actor(ScriptedActor(act), used, num_episodes=5, seed=3)
    fresh = evaluate_actor(ScriptedActor(act), env(), num_episodes=5, seed=3)
    assert first == again == fresh
    assert first != other
