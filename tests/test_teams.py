"""Several agents: rows, turns, and what is learnt from them, against numbers worked by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from torch import Tensor

from conftest import MakeConfig
from rl_training import IPPO, MAPPO, PPO
from rl_training.algorithms.returns import gae, gae_of_turns
from rl_training.config import TrainConfig
from rl_training.envs import TeamAdapter, make_adapter
from rl_training.envs.team_env import TeamEnv, TeamOptions
from rl_training.errors import ConfigError, EnvironmentFailure, NonFiniteError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.workflows import resume_training
from rl_training.types import Progress, VectorStep
from state_compare import assert_same_run

pytest.importorskip("pettingzoo")
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

from team_envs import APPEARS, DIES, LENGTH, Duel, Mortals, Relay, SoloCartPole

SPREAD = "pettingzoo:mpe2/simple_spread_v3"
START = Progress(0, 1)


def adapter_of(env_fn: Callable[[], Any], algo: str = "ippo", **settings: Any) -> TeamAdapter:
    config: TrainConfig[Any] = TrainConfig(algo=algo, num_envs=2).with_overrides(**settings)
    adapter = make_adapter(config, env_fn)
    assert isinstance(adapter, TeamAdapter)
    return adapter


def walk(adapter: TeamAdapter, steps: int) -> tuple[list[Any], list[VectorStep]]:
    """The observations that were acted on, and the steps that followed."""
    seen: list[Any] = [adapter.reset()]
    taken = []
    for _ in range(steps):
        mask = seen[-1].get("action_mask") if isinstance(seen[-1], dict) else None
        actions = np.zeros(adapter.num_envs, int) if mask is None else mask.argmax(1)
        taken.append(adapter.step(actions))
        seen.append(taken[-1].obs)
    return seen, taken


# -- rows ------------------------------------------------------------------------------------------


def lives(agent: str, count: int) -> bool:
    """Whether an agent of `Mortals` acts in step ``count``, from 0."""
    return count < min(DIES[agent], LENGTH) and (agent != "c" or count >= APPEARS)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_rows_of_agents_that_die_and_appear(vectorization: str) -> None:
    adapter = adapter_of(Mortals, vectorization=vectorization)
    try:
        seen, taken = walk(adapter, 2 * LENGTH + 3)
    finally:
        adapter.close()
    assert adapter.agents == ("a", "b", "c")
    for t, step in enumerate(taken):
        count = t % LENGTH
        for row in range(6):
            index = row % 3
            agent = "abc"[index]
            acts = lives(agent, count)
            assert step.valid[row] == acts
            if not acts:
                assert step.reward[row] == 0
                assert not step.terminated[row]
                assert not step.truncated[row]
                continue
            np.testing.assert_array_equal(seen[t][row], [index, count])
            assert step.reward[row] == 10 * index + count + 1
            assert step.terminated[row] == (count + 1 == DIES[agent])
            assert step.truncated[row] == (count + 1 == LENGTH)
            np.testing.assert_array_equal(step.final_obs[row], [index, count + 1])  # type: ignore[index]
        ended = [(one.env, one.length) for one in step.episodes]
        assert ended == ([(0, LENGTH), (1, LENGTH)] if count + 1 == LENGTH else [])
    team = sum(
        10 * i + count + 1 for i in range(3) for count in range(LENGTH) if lives("abc"[i], count)
    )
    assert {one.ret for step in taken for one in step.episodes} == {float(team)}


def test_a_wrappers_time_limit_truncates_the_living() -> None:
    limit = {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 4}}
    adapter = adapter_of(Mortals, wrappers=[limit])
    _, taken = walk(adapter, 4)
    adapter.close()
    np.testing.assert_array_equal(taken[1].terminated[:3], [True, False, False])
    np.testing.assert_array_equal(taken[3].truncated[:3], [False, True, True])
    np.testing.assert_array_equal(taken[3].final_obs[1], [1, 4])  # type: ignore[index]
    assert not taken[2].truncated.any()


@pytest.mark.parametrize("limit", [100, 4])
def test_environments_that_reset_in_a_step_of_their_own(limit: int) -> None:
    """Their steps are those of environments that reset at once, and one without valid rows."""

    def made(mode: AutoresetMode) -> TeamAdapter:
        def env() -> Any:
            return TimeLimit(TeamEnv(Mortals(), TeamOptions()), limit)

        return TeamAdapter(SyncVectorEnv([env] * 2, autoreset_mode=mode), seed=1)

    at_once, later = made(AutoresetMode.SAME_STEP), made(AutoresetMode.NEXT_STEP)
    assert later.has_invalid_rows
    length = min(LENGTH, limit)
    _, expected = walk(at_once, 2 * length)
    _, found = walk(later, 2 * length + 1)
    reset = found.pop(length)
    assert not any(part.any() for part in (reset.valid, reset.reward, reset.truncated))
    np.testing.assert_array_equal(reset.obs, expected[length - 1].obs)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("reward", "terminated", "truncated", "valid", "final_obs"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_masks_come_from_the_infos() -> None:
    """`Mortals` raises an error where the illegal action is taken."""
    adapter = adapter_of(functools.partial(Mortals, masks=True))
    seen, _ = walk(adapter, 3 * LENGTH)
    adapter.close()
    np.testing.assert_array_equal(seen[1]["action_mask"][0], [True, False, True])
    assert seen[4]["action_mask"][0].all()  # a is dead: a policy evaluates its row all the same


def test_turns() -> None:
    adapter = adapter_of(Duel)
    seen, taken = walk(adapter, 12)
    adapter.close()
    for t, step in enumerate(taken):
        turn = t % 5
        acts = turn % 2
        np.testing.assert_array_equal(step.valid, [acts == 0, acts == 1] * 2)
        np.testing.assert_array_equal(seen[t]["observation"][acts], [acts, turn])
        assert step.reward[acts] == 1.0
        assert step.reward[1 - acts] == -0.25
        assert step.terminated.all() == (turn == 4)
        assert step.waiting is not None
        following = (turn + 1) % 5 % 2
        np.testing.assert_array_equal(step.waiting, [following != 0, following != 1] * 2)


def test_a_game_of_turns_loses_the_checks_of_every_call() -> None:
    wrapped = OrderEnforcingWrapper(AssertOutOfBoundsWrapper(Duel()))
    plain, checked = (TeamEnv(env, TeamOptions()) for env in (Duel(), wrapped))
    assert type(checked._env) is Duel
    np.testing.assert_array_equal(checked.reset(seed=1)[0], plain.reset(seed=1)[0])
    for _ in range(5):
        ours, theirs = (env.step(np.zeros(2)) for env in (checked, plain))
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]


def test_a_wrappers_time_limit_truncates_agents_that_wait_too() -> None:
    limit = {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 3}}
    adapter = adapter_of(Duel, wrappers=[limit])
    _, taken = walk(adapter, 3)
    adapter.close()
    step = taken[2]
    np.testing.assert_array_equal(step.truncated, [True] * 4)
    np.testing.assert_array_equal(step.final_obs["observation"][:2], [[0, 3], [1, 3]])


def test_agents_leave_a_game_of_turns(make_config: MakeConfig) -> None:
    """Turns of p, q, r, q, r, r; the returns of each, without discount within a turn."""
    trainer = rollout_of(Relay, make_config)
    buffer = trainer.buffer
    order = [0, 1, 2, 1, 2, 2]
    valid = [[row == order[t % 6] for row in range(3)] for t in range(11)]
    assert buffer.valid[:, :3].tolist() == valid
    # p acts once: a tenth of 1, and leaves.
    assert float(buffer.returns[0, 0]) == pytest.approx(100.1, abs=1e-4)
    # q acts in turn 2: 0.2; r gives it 3. It acts in turn 4, 0.4, and leaves.
    assert float(buffer.returns[3, 1]) == pytest.approx(100.4, abs=1e-4)
    assert float(buffer.returns[1, 1]) == pytest.approx(3.2 + 0.5 * 100.4, abs=1e-4)
    # r: 0.3 and 4 of q; 0.5 and, alone, 5 of its own; 0.6 and 6 of its own.
    assert float(buffer.returns[5, 2]) == pytest.approx(106.6, abs=1e-4)
    assert float(buffer.returns[4, 2]) == pytest.approx(5.5 + 0.5 * 106.6, abs=1e-4)
    assert float(buffer.returns[2, 2]) == pytest.approx(4.3 + 0.5 * (5.5 + 0.5 * 106.6), abs=1e-4)
    np.testing.assert_array_equal(buffer.obs["inner.turn"][1, 1], [1.0])
    np.testing.assert_array_equal(buffer.obs["who"][1, 1], [0, 1, 0])
    trainer.close()


def test_dict_observations_are_joined_for_the_critic() -> None:
    adapter = adapter_of(Relay, "mappo")
    seen, _ = walk(adapter, 3)
    adapter.close()
    # Turn and number of p, which left, then those of q and r, as they last saw them.
    own = {name: seen[2][name][2] for name in ("who", "inner.turn")}
    np.testing.assert_array_equal(own["who"], [0, 0, 1])
    assert own["inner.turn"] == [2]
    state = seen[2]["team_state"][2]
    assert state.shape == (12,)
    assert not state[:4].any()
    assert sorted(state[4:8].tolist()) == [0, 0, 1, 1]
    assert sorted(state[8:].tolist()) == [0, 0, 1, 2]


def test_state_and_agent_ids() -> None:
    adapter = adapter_of(Mortals, "mappo", agent_id=True)
    seen, _ = walk(adapter, 4)
    adapter.close()
    np.testing.assert_array_equal(seen[0]["agent"][:2], [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(seen[2]["team_state"][1], [2, 1, 0.5, 7])
    joined = adapter_of(functools.partial(Duel, length=9), "mappo")
    seen, _ = walk(joined, 3)
    joined.close()
    np.testing.assert_array_equal(seen[2]["team_state"][0], [0, 2, 1, 1])  # what each saw last


# -- returns of turns ------------------------------------------------------------------------------


def by_hand(
    rewards: Any, values: Any, dones: Any, bootstrap: Any, last: float, acted: Any, waiting: bool,
    gamma: float, lam: float,
) -> tuple[list[float], list[float], list[bool]]:  # fmt: skip
    """One column, transition by transition, without any array."""
    turns: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None
    for t in range(len(rewards)):
        if acted[t]:
            current = {"t": t, "reward": 0.0, "done": False, "boot": 0.0, "value": values[t]}
            turns.append(current)
        if current is None:
            continue
        current["reward"] += rewards[t]
        if dones[t]:
            current["done"], current["boot"] = True, bootstrap[t]
            current = None  # what follows belongs to the next episode
    following = last
    if turns and waiting and not turns[-1]["done"]:
        following = turns.pop()["value"]
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    learnt = [False] * len(rewards)
    advantage = 0.0
    for turn in reversed(turns):
        goes_on = 0.0 if turn["done"] else 1.0
        delta = turn["reward"] + gamma * (goes_on * following + turn["boot"]) - turn["value"]
        advantage = delta + gamma * lam * goes_on * advantage
        advantages[turn["t"]], returns[turn["t"]] = advantage, advantage + turn["value"]
        learnt[turn["t"]] = True
        following = turn["value"]
    return advantages, returns, learnt


@pytest.mark.parametrize("seed", range(5))
def test_returns_of_turns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, rows = 24, 40
    acted = rng.random((steps, rows)) < rng.choice([0.1, 0.4, 0.9], rows)
    dones = (rng.random((steps, rows)) < 0.15).astype(np.float64)
    rewards, values, bootstrap = rng.normal(size=(3, steps, rows))
    bootstrap *= dones * (rng.random((steps, rows)) < 0.5)
    last, waiting = rng.normal(size=rows), rng.random(rows) < 0.5
    arrays = (rewards, values, dones, bootstrap, last, acted, waiting)
    tensors: Any = [torch.from_numpy(x) for x in arrays]
    found = gae_of_turns(*tensors, gamma=0.9, gae_lambda=0.8)
    for row in range(rows):
        columns = [x[:, row] for x in (rewards, values, dones, bootstrap)]
        arguments = (*columns, last[row], acted[:, row], bool(waiting[row]), 0.9, 0.8)
        expected = by_hand(*arguments)
        pairs: Any = zip(found, expected, strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours[:, row].numpy(), theirs, atol=1e-12)


def test_without_turns_they_are_those_of_gae() -> None:
    torch.manual_seed(1)
    rewards, values = torch.randn(2, 9, 4, dtype=torch.float64)
    dones = (torch.rand(9, 4) < 0.3).double()
    bootstrap = torch.randn(9, 4, dtype=torch.float64) * dones
    arguments = (rewards, values, dones, bootstrap, torch.randn(4, dtype=torch.float64))
    plain = gae(*arguments, gamma=0.9, gae_lambda=0.7)
    always = torch.ones(9, 4, dtype=torch.bool)
    turns = gae_of_turns(*arguments, always, ~always[0], gamma=0.9, gae_lambda=0.7)
    torch.testing.assert_close(turns[:2], plain, rtol=0, atol=1e-12)
    assert turns[2].all()


# -- rollouts --------------------------------------------------------------------------------------


def of_memory(memory: str, sequence_length: int) -> dict[str, Any]:
    """Settings of runs with a memory, or without."""
    return {} if memory == "none" else {"memory": memory, "sequence_length": sequence_length}


def rollout_of(
    env_fn: Callable[[], Any], make_config: MakeConfig, algo: str = "ippo", **settings: Any
) -> Any:
    """A trainer that has collected one rollout of 11 steps and prepared it for learning."""
    config = make_config(
        algo=algo, num_envs=2, num_steps=11, num_minibatches=1, gamma=0.5, gae_lambda=1.0,
        **settings,
    )  # fmt: skip
    trainer: Any = ExperimentManager.setup(config, env_fn=env_fn, run_dir=None)
    trainer.source.collect(trainer.buffer, 11, START)
    trainer.learner.prepare(trainer.buffer, START)
    return trainer


def test_a_rollout_of_mortals(make_config: MakeConfig) -> None:
    trainer = rollout_of(Mortals, make_config)
    buffer = trainer.buffer
    value = torch.no_grad()(trainer.learner.model.value)
    valid = [[lives(agent, t % LENGTH) for agent in "abc"] * 2 for t in range(11)]
    assert buffer.valid.tolist() == valid
    # Agent a lives for two steps: 1 + 0.5 * 2, and nothing of the time after its death.
    assert float(buffer.returns[0, 0]) == pytest.approx(1 + 0.5 * 2, abs=1e-5)
    assert float(buffer.returns[LENGTH, 0]) == pytest.approx(2.0, abs=1e-5)
    # Agent c appears after 3 steps, receives 24 to 27, and is truncated: 2 (agent), 7 (step).
    after = float(value(torch.tensor([[2.0, 7.0]])))
    expected = 24 + 0.5 * (25 + 0.5 * (26 + 0.5 * (27 + 0.5 * after)))
    assert float(buffer.returns[3, 2]) == pytest.approx(expected, abs=1e-4)
    trainer.close()


def test_a_rollout_of_turns(make_config: MakeConfig) -> None:
    """11 steps: two episodes of five turns, and one turn of the third."""
    trainer = rollout_of(Duel, make_config)
    buffer = trainer.buffer
    # x acts in turns 0, 2, 4 and gets 1 - 0.25, 1 - 0.25, 1; y in 1 and 3: 1 - 0.25 twice.
    x = [0.75 + 0.5 * (0.75 + 0.5 * 1), 0.75 + 0.5, 1.0]
    assert buffer.returns[[0, 2, 4], 0].tolist() == pytest.approx(x, abs=1e-5)
    assert buffer.returns[[1, 3], 1].tolist() == pytest.approx([0.75 + 0.5 * 0.75, 0.75], abs=1e-5)
    assert buffer.returns[[5, 7, 9], 0].tolist() == pytest.approx(x, abs=1e-5)
    learnt = buffer.learnt[:, :2].T.tolist()
    assert [t for t in range(11) if learnt[0][t]] == [0, 2, 4, 5, 7, 9]  # turn 10 is not complete
    assert [t for t in range(11) if learnt[1][t]] == [1, 3, 6, 8]
    trainer.close()


def test_a_truncated_game_bootstraps(make_config: MakeConfig) -> None:
    trainer = rollout_of(functools.partial(Duel, cut=True), make_config)
    buffer, value = trainer.buffer, torch.no_grad()(trainer.learner.model.value)
    for row, turn in ((0, 4), (1, 3)):
        final = {"observation": torch.tensor([[float(row), 5.0]]), "action_mask": None}
        reward = 1.0 if row == 0 else 0.75
        expected = reward + 0.5 * float(value({"observation": final["observation"]}))
        assert float(buffer.returns[turn, row]) == pytest.approx(expected, abs=1e-5)
    trainer.close()


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("env_fn", [Mortals, Duel])
@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_rows_that_did_not_act_reach_no_loss(
    algo: str, env_fn: Callable[[], Any], memory: str, make_config: MakeConfig
) -> None:
    def gradient(poison: float) -> Tensor:
        trainer = rollout_of(env_fn, make_config, algo, **of_memory(memory, 11))
        buffer, learner = trainer.buffer, trainer.learner
        outside = ~buffer.learnt
        assert outside.any()
        for name in ("logprobs", "values", "advantages", "returns"):
            getattr(buffer, name)[outside] = poison
        leaves = buffer.obs.values() if isinstance(buffer.obs, dict) else [buffer.obs]
        for leaf in leaves:
            if leaf.dtype == torch.float32:
                leaf[outside] = poison
        (batch,) = next(iter(learner.epoch([buffer], 1)))
        parameters = list(learner.module.parameters())
        loss = learner.loss(batch)["loss"]
        parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        found = torch.cat([part.flatten() for part in parts if part is not None])
        trainer.close()
        return found

    torch.testing.assert_close(gradient(0.0), gradient(50.0), rtol=0, atol=1e-6)


# -- whole runs ------------------------------------------------------------------------------------


def test_one_agent_is_ppo_bit_for_bit() -> None:
    settings: dict[str, Any] = {"seed": 5, "num_envs": 4, "num_steps": 32, "progress": False}
    team = IPPO(env_fn=SoloCartPole, **settings)
    team.learn(1024, run_dir=None)
    alone = PPO("CartPole-v1", **settings)
    alone.learn(1024, run_dir=None)
    ours, theirs = team.policy.module.state_dict(), alone.policy.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("algo", "env_id", "memory"),
    [
        ("mappo", SPREAD, "none"),
        ("ippo", "pettingzoo:classic/tictactoe_v3", "none"),
        ("mappo", SPREAD, "lstm"),
        ("ippo", "pettingzoo:classic/tictactoe_v3", "lstm"),
    ],
)
def test_it_resumes_exactly(
    algo: str, env_id: str, memory: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Stopped within a rollout; with turns, values and rewards that are under way too."""
    from rl_training.runtime.callbacks import Callback

    class Interrupt(Callback):
        def on_step(self, trainer: Any, event: Any) -> None:
            if event.step >= 300:
                trainer.stopping.signals.received = "SIGTERM"

    extra: dict[str, Any] = {"normalize_values": True} if algo == "mappo" else {}
    extra |= of_memory(memory, 8)
    config = make_config(
        algo=algo, env_id=env_id, total_timesteps=800, normalize_obs=True, normalize_reward=True,
        **extra,
    )  # fmt: skip
    whole = ExperimentManager.setup(config).train()
    part = config.with_overrides(output_dir=tmp_path / "part")
    stopped = ExperimentManager.setup(part, callbacks=[Interrupt()]).train()
    assert stopped.interrupted
    resume_training(stopped.run_dir)
    assert_same_run(whole.run_dir, stopped.run_dir)


def test_normalised_values_by_hand(make_config: MakeConfig) -> None:
    """Statistics are those of the returns; the loss is in their scale, advantages are not."""
    trainer = rollout_of(Mortals, make_config, "mappo", normalize_values=True, norm_adv=False)
    buffer, learner = trainer.buffer, trainer.learner
    returns = buffer.returns[buffer.learnt]
    mean, deviation = returns.mean(), returns.std(correction=0)
    norm = learner.model.value_norm
    torch.testing.assert_close(norm.shift, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(1 / norm.scale, deviation, rtol=1e-3, atol=1e-3)
    # The returns were computed with values of the network as it was: in the scale of rewards.
    torch.testing.assert_close(buffer.returns, buffer.advantages + buffer.values)
    (batch,) = next(iter(learner.epoch([buffer], 1)))
    with torch.no_grad():
        loss = float(learner.loss(batch)["value_loss"])
        raw = learner.model.critic(learner.model._critics(batch["obs"])).squeeze(-1)
    targets = (batch["returns"] - mean) / deviation
    squared = ((raw - targets).square() * batch["mask"]).sum() / batch["mask"].sum()
    assert loss == pytest.approx(0.5 * float(squared), rel=1e-3)
    trainer.close()


def test_metrics_of_the_team_and_of_each_agent(make_config: MakeConfig) -> None:
    config = make_config(algo="ippo", num_steps=LENGTH, num_minibatches=1, total_timesteps=42)
    metrics = ExperimentManager.setup(config, env_fn=Mortals, run_dir=None).train().metrics
    each = {"a": 1 + 2, "b": sum(10 + t for t in range(1, 6)), "c": 24 + 25 + 26 + 27}
    for agent, value in each.items():
        assert metrics[f"rollout/return_{agent}_mean"] == value
        assert metrics[f"eval/return_{agent}_mean"] == value
    assert metrics["eval/return_mean"] == metrics["rollout/return_mean"] == sum(each.values())
    limit = {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 4}}
    cut = config.with_overrides(wrappers=[limit])
    metrics_of_cut = ExperimentManager.setup(cut, env_fn=Mortals, run_dir=None).train().metrics
    assert metrics_of_cut["eval/return_b_mean"] == 11 + 12 + 13 + 14
    living = sum(lives(agent, t) for agent in "abc" for t in range(LENGTH))
    assert metrics["global_step"] % (2 * living) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPO(SPREAD).learn(10), "ppo trains one agent, and .* has several: use ippo"),
        (lambda: PPO(env_fn=Mortals).learn(10), "ppo trains one agent, and .*Mortals.* has"),
        (lambda: IPPO("CartPole-v1").learn(10), "ippo trains several agents, and CartPole-v1 has"),
        (lambda: IPPO("pettingzoo:mpe/simple_v3").learn(10), "Did you mean 'mpe2'"),
        (lambda: IPPO("pettingzoo:mpe2/simple_spred_v3").learn(10), "no environment .* in mpe2"),
        (
            lambda: IPPO("pettingzoo:mpe2/simple_speaker_listener_v4").learn(10),
            "need equal spaces: observation_space of speaker_0 .*policies: separate",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def lacking(what: int) -> type[Mortals]:
    """`Mortals` whose third step gives agent b no observation (0), reward (1), ..."""

    class Lacking(Mortals):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            if self.count == 3:
                del result[what]["b"]
            return result

    return Lacking


class Stranger(Mortals):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset()
        self.agents = ["a", "b", "z"]
        return dict.fromkeys(self.agents, np.zeros(2, np.float32)), {}


class Grows(Mortals):
    def _obs(self, agents: Any) -> Any:
        return dict.fromkeys(agents, np.zeros(2 + self.count, np.float32))


class Nobody(Mortals):
    possible_agents: list[str] = []


@pytest.mark.parametrize(
    ("env_fn", "message"),
    [
        (
            lacking(0),
            "environment 0 .Lacking. failed in step 3 .* returned no observation of agent b",
        ),
        (lacking(1), "returned no reward of agent b"),
        (lacking(2), "returned no termination of agent b"),
        (lacking(3), "returned no truncation of agent b"),
        (Stranger, "its agents contain 'z', which is not in possible_agents"),
        (Grows, "the observation of agent a has another shape"),
        (Nobody, "Nobody has no agents: its possible_agents are empty"),
    ],
)
def test_environments_that_break_their_interface(
    env_fn: type[Mortals], message: str, make_config: MakeConfig
) -> None:
    config = make_config(algo="ippo", num_envs=1, num_steps=8, num_minibatches=1)
    with pytest.raises((ConfigError, EnvironmentFailure), match=message):
        ExperimentManager.setup(config, env_fn=env_fn, run_dir=None).train()


def test_a_policy_of_an_agent_needs_no_state(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(algo="mappo", total_timesteps=192, agent_id=True)
    run = ExperimentManager.setup(config).train().run_dir
    model = MAPPO.load(run)
    obs = {"observation": np.zeros((2, 18), np.float32), "agent": np.array([0, 2])}
    assert model.act(obs).shape == (2,)
    assert model.evaluate(2).mean_return < 0


# -- groups ----------------------------------------------------------------------------------------

SPEAKER = "pettingzoo:mpe2/simple_speaker_listener_v4"


@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_agents_with_different_spaces_have_policies_of_their_own(
    algo: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        algo=algo, env_id=SPEAKER, policies="separate", total_timesteps=384, normalize_obs=True
    )
    whole = ExperimentManager.setup(config).train()
    assert np.isfinite(whole.metrics["losses/speaker_0/policy_loss"])
    assert np.isfinite(whole.metrics["losses/listener_0/policy_loss"])
    part = config.with_overrides(output_dir=tmp_path / "part", total_timesteps=128)
    stopped = ExperimentManager.setup(part).train()
    resume_training(stopped.run_dir, total_timesteps=384, horizon="keep")
    model = (IPPO if algo == "ippo" else MAPPO).load(whole.run_dir)
    obs = {"speaker_0": np.zeros(3, np.float32), "listener_0": np.zeros((2, 11), np.float32)}
    chosen = model.act(obs)
    assert np.shape(chosen["speaker_0"]) == ()
    assert np.shape(chosen["listener_0"]) == (2,)
    assert model.evaluate(2).mean_return < 0


def test_groups_act_with_noise_of_their_own_and_learn_their_own_rows(
    make_config: MakeConfig,
) -> None:
    """Groups of `Mortals` collect what one shared policy's rows would hold."""
    config = make_config(
        algo="ippo", num_envs=2, num_steps=LENGTH, num_minibatches=1,
        groups={"pair": ["c", "a"], "solo": ["b"]},
    )  # fmt: skip
    trainer: Any = ExperimentManager.setup(config, env_fn=Mortals, run_dir=None)
    trainer.source.collect(trainer.buffer, LENGTH, START)
    pair, solo = (trainer.buffer.groups[name] for name in ("pair", "solo"))
    assert pair.obs.shape == (LENGTH, 4, 2)
    assert solo.obs[:5, 0].tolist() == [[1.0, t] for t in range(DIES["b"])]
    assert pair.valid[:, :2].tolist() == [[lives("c", t), lives("a", t)] for t in range(LENGTH)]
    assert pair.rewards[3, 0] == 24
    trainer.close()


def test_resuming_groups_is_exact(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        algo="mappo", env_id=SPEAKER, policies="separate", total_timesteps=512, anneal_lr=False,
        normalize_values=True, eval_episodes=0, eval_interval=100,
    )  # fmt: skip
    whole = ExperimentManager.setup(config).train()
    part = config.with_overrides(output_dir=tmp_path / "part", total_timesteps=256)
    stopped = ExperimentManager.setup(part).train()
    resume_training(stopped.run_dir, total_timesteps=512)
    assert_same_run(whole.run_dir, stopped.run_dir)


def test_groups_must_list_every_agent_once() -> None:
    with pytest.raises(ConfigError, match=r"must list every agent once: a, b, c; got a, b$"):
        adapter_of(Mortals, groups={"one": ["a", "b"]})
    with pytest.raises(ConfigError, match=r"policies' must be unset where there are groups"):
        adapter_of(Mortals, groups={"one": ["a", "b", "c"]}, policies="separate")


@pytest.mark.parametrize("policies", ["shared", "separate"])
def test_a_nan_names_the_environment_and_the_agent(policies: str, make_config: MakeConfig) -> None:
    class Broken(Mortals):
        def step(self, actions: Any) -> Any:
            observations, *rest = super().step(actions)
            if self.count == 4:
                observations["b"] = np.array([np.nan, 0], np.float32)
            return observations, *rest

    config = make_config(algo="ippo", num_envs=2, num_steps=8, num_minibatches=1, policies=policies)
    trainer = ExperimentManager.setup(config, env_fn=Broken, run_dir=None)
    with pytest.raises(NonFiniteError, match=r"environment 0, agent b, returned a non-finite obs"):
        trainer.train()
