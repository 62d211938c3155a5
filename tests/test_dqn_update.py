"""DQN's loss and update on numbers worked by hand; each switch changes what it should."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.dqn import DQN, DQNConfig, dqn_loss
from rl_training.checkpointing import to_storable
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep
from state_compare import differences

OBS = ObsSpec({"": ArraySpec((2,), "float32")})
MASKED = ObsSpec({"x": ArraySpec((2,), "float32"), "action_mask": ArraySpec((3,), "bool")})
ACTION = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))
START = Progress(0, 1000)


def make(seed: int = 0, obs: ObsSpec = OBS, **knobs: Any) -> DQN:
    torch.manual_seed(seed)
    config = DQNConfig(hidden_sizes=(8,), batch_size=16, **knobs)
    model = MLPQNetwork(obs, ACTION, hidden_sizes=(8,), activation="relu", dueling=config.dueling)
    return DQN(model, config, generator=torch.Generator().manual_seed(seed))


def replay(**options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(64, 2, OBS, ACTION, **{"gamma": 0.9, **options})
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2, 2)).astype(np.float32)
    for t in range(40):
        following = rng.normal(size=(2, 2)).astype(np.float32)
        ended = np.array([t % 7 == 6, t % 5 == 4])
        none = np.zeros(2, bool)
        reward = obs[:, 0]
        step = VectorStep(following, following, reward, ended, none, ~none, ())
        buffer.add(obs, rng.integers(3, size=2), {}, step)
        obs = following
    return buffer


def batch_of(**tensors: Any) -> dict[str, Any]:
    rows = {"obs": torch.randn(2, 2), "actions": torch.tensor([0, 2]), "weights": torch.ones(2)}
    rows |= {"rewards": torch.tensor([1.0, 2.0]), "next_obs": torch.randn(2, 2)}
    rows |= {"discounts": torch.tensor([0.9, 0.0])}
    return {**rows, **tensors}


def test_loss_by_hand() -> None:
    losses = dqn_loss(
        {
            "q_values": torch.tensor([1.0, 0.0, 2.0]),
            "targets": torch.tensor([1.5, 3.0, 2.0]),
            "weights": torch.tensor([1.0, 0.5, 1.0]),
        }
    )
    # Errors 0.5, 3, 0: Huber 0.125, 2.5, 0.
    assert float(losses["loss"]) == pytest.approx((0.125 + 0.5 * 2.5) / 3)
    assert losses["td_errors"].tolist() == [0.5, 3.0, 0.0]
    assert float(losses["td_error"]) == pytest.approx(3.5 / 3)
    assert float(losses["q_mean"]) == 1.0


@pytest.mark.parametrize("double", [False, True])
def test_target_by_hand(double: bool) -> None:
    dqn: Any = make(double=double)
    with torch.no_grad():
        for parameter in dqn.target.module.parameters():
            parameter.add_(torch.randn_like(parameter))
    batch = batch_of()
    online, slow = (
        dqn.module.policy(batch["next_obs"])[0],
        dqn.target.module.q_values(batch["next_obs"]),
    )
    choice = int(online[0].argmax()) if double else int(slow[0].argmax())
    target = torch.tensor([1.0 + 0.9 * float(slow[0, choice]), 2.0])
    values = dqn.model.q_values(batch["obs"])
    chosen = torch.stack([values[0, 0], values[1, 2]])
    assert torch.allclose(dqn.loss(batch)["td_errors"], target - chosen, atol=1e-6)


def test_masked_actions_never_make_a_target() -> None:
    dqn = make(obs=MASKED)
    x = torch.randn(2, 2)
    free = {"x": x, "action_mask": torch.ones(2, 3, dtype=torch.bool)}
    best = dqn.target.module.q_values(free)[0].argmax()
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[0, best] = False
    mask[1] = False  # an ended episode may allow nothing
    values = dqn.target.module.q_values({"x": x, "action_mask": mask})
    assert int(values[0].argmax()) != int(best)
    batch = batch_of(obs=free, next_obs={"x": x, "action_mask": mask})
    losses = dqn.loss(batch)
    assert torch.isfinite(losses["td_errors"]).all()
    expected = 1.0 + 0.9 * float(values[0].max()) - float(dqn.model.q_values(free)[0, 0].detach())
    assert float(losses["td_errors"][0]) == pytest.approx(expected, abs=1e-5)


def test_a_truncated_end_without_legal_actions_bootstraps_from_all() -> None:
    dqn = make(obs=MASKED)
    x = torch.randn(2, 2)
    free = {"x": x, "action_mask": torch.ones(2, 3, dtype=torch.bool)}
    nothing = {"x": x, "action_mask": torch.zeros(2, 3, dtype=torch.bool)}
    batch = batch_of(obs=free, next_obs=nothing, discounts=torch.tensor([0.9, 0.9]))
    open_batch = {**batch, "next_obs": free}
    assert torch.equal(dqn.loss(batch)["td_errors"], dqn.loss(open_batch)["td_errors"])


def test_dueling_separates_state_value_and_advantage() -> None:
    dqn: Any = make(dueling=True)
    obs = torch.randn(5, 2)
    advantage, value = dqn.module.advantage(obs), dqn.module.state_value(obs)
    expected = value + advantage - advantage.mean(-1, keepdim=True)
    assert torch.allclose(dqn.model.q_values(obs), expected)
    assert torch.allclose(dqn.model.q_values(obs).mean(-1), value.squeeze(-1), atol=1e-6)
    greedy = dqn.module.numpy_actor()(obs.numpy(), None)
    assert greedy.tolist() == dqn.model.q_values(obs).argmax(-1).tolist()


@pytest.mark.parametrize(("tau", "moved"), [(1.0, 1.0), (0.25, 0.25)])
def test_target_moves_at_crossings_of_its_interval(tau: float, moved: float) -> None:
    dqn = make(target_update_interval_steps=100, tau=tau)
    buffer = replay()
    start = [p.clone() for p in dqn.target.module.parameters()]
    dqn.learn(buffer, Progress(99, 1000), updates=3)
    assert all(
        torch.equal(a, b) for a, b in zip(start, dqn.target.module.parameters(), strict=True)
    )
    dqn.learn(buffer, Progress(101, 1000), updates=3)
    triples = zip(start, dqn.module.parameters(), dqn.target.module.parameters(), strict=True)
    for before, online, slow in triples:
        assert torch.allclose(slow, before + moved * (online - before), atol=1e-7)


def test_prioritized_learning_writes_priorities_back() -> None:
    dqn = make(prioritized=True)
    buffer = replay(prioritization=dqn.config.prioritization())
    before = buffer.ring_state()["priorities"].copy()
    dqn.learn(buffer, START, updates=4)
    assert (buffer.ring_state()["priorities"] != before).sum() > 10


def mean_loss(dqn: DQN, buffer: ReplayBuffer) -> float:
    dqn.pop_metrics()
    dqn.learn(buffer, START, updates=20)
    return dqn.pop_metrics()["losses/loss"]


def test_learning_fits_a_fixed_target() -> None:
    dqn = make(learning_rate=1e-2, target_update_interval_steps=10**9)
    buffer = replay(gamma=0.0)  # the reward, which the observation holds, is all there is
    first = mean_loss(dqn, buffer)
    dqn.learn(buffer, START, updates=1500)
    assert mean_loss(dqn, buffer) < 0.05 * first


def test_state_survives_and_continues_alike() -> None:
    a, b = make(), make(seed=5)
    buffer = replay()
    a.learn(buffer, Progress(600, 1000), updates=5)
    # A copy, as a file would be: torch's optimizers keep the very tensors they are given.
    b.load_state_dict(copy.deepcopy(to_storable(a.state_dict())))
    for dqn in (a, b):
        dqn.learn(buffer, Progress(1200, 2000), updates=5)
    assert differences(to_storable(a.state_dict()), to_storable(b.state_dict())) == []


def test_the_learning_rate_falls_only_where_asked() -> None:
    for anneal, rate in ((False, 1e-2), (True, 2.5e-3)):
        dqn = make(learning_rate=1e-2, anneal_lr=anneal)
        assert dqn.learn(replay(), Progress(750, 1000)) == 1
        assert dqn.step.learning_rate == pytest.approx(rate)


def test_epsilon_falls_in_a_line_and_stays() -> None:
    config = DQNConfig(
        exploration_fraction=0.5, exploration_initial_eps=1.0, exploration_final_eps=0.1
    )
    found = [config.epsilon(Progress(step, 100)) for step in (0, 25, 50, 100)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tau", 0.0),
        ("gradient_steps", 0.0),
        ("gradient_steps", -2.0),
        ("batch_size", 0),
        ("exploration_fraction", 0.0),
        ("priority_alpha", 1.5),
        ("n_step", 0),
        ("learning_rate", float("inf")),
        ("target_update_interval_steps", 0),
        ("lr_schedule", "step"),
        ("lr_warmup_fraction", 1.0),
        ("optimizer", "sgd"),
        ("optimizer_betas", (0.9,)),
        ("optimizer_betas", (0.9, 1.0)),
        ("optimizer_eps", 0.0),
        ("weight_decay", -0.1),
    ],
)
def test_impossible_knobs_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"algo_kwargs.{knob}"):
        DQNConfig(**{knob: value})


def test_metric_sums_survive_between_two_reports() -> None:
    a, b = make(), make()
    buffer = replay()
    a.learn(buffer, START, updates=3)
    b.learn(buffer, START, updates=3)
    saved = copy.deepcopy(to_storable(a.metric_sums()))
    assert saved["names"] == ["loss", "q_mean", "td_error"]
    assert saved["updates"] == 3
    b.pop_metrics()
    b.load_metric_sums(saved)
    for dqn in (a, b):
        dqn.learn(buffer, START, updates=2)
    assert a.pop_metrics() == b.pop_metrics()
    assert a.pop_metrics() == {}


def test_a_moved_network_is_refused_when_it_learns() -> None:
    dqn = make()
    dqn.module.double()
    with pytest.raises(RuntimeError, match="moved after its GradientStep was built"):
        dqn.learn(replay(), START, updates=0)  # before the updates, which may be a graph's
