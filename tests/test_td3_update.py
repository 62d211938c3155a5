"""TD3's losses and update on numbers worked by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from continuous_batches import BOX, OBS, make_batch, replay
from rl_training.algorithms.td3 import (
    TD3,
    TD3Config,
    smoothed_actions,
    td3_actor_loss,
    td3_targets,
)
from rl_training.checkpointing import to_storable
from rl_training.errors import ConfigError
from rl_training.models.action_heads import TanhHead
from rl_training.models.mlp_continuous import ActorCritics, MLPActor, MLPCritics
from rl_training.types import Progress
from state_compare import differences

START = Progress(0, 1000)


def make(seed: int = 0, **knobs: Any) -> TD3:
    torch.manual_seed(seed)
    config = TD3Config(hidden_sizes=(16, 16), batch_size=8, **knobs)
    shape: dict[str, Any] = {"hidden_sizes": (16, 16), "activation": "relu"}
    networks = ActorCritics(
        MLPActor(OBS, TanhHead(BOX.shape, config.exploration_noise), **shape),
        MLPCritics(OBS, BOX.size, num_critics=config.num_critics, **shape),
    )
    return TD3(networks, config, generator=torch.Generator().manual_seed(seed))


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def test_smoothing_by_hand() -> None:
    actions = torch.tensor([0.0, 0.0, 0.9, -0.9])
    noise = torch.tensor([1.0, -10.0, 2.0, -0.1])
    # 0.2 noise, within 0.5, and the action within 1.
    found = smoothed_actions(actions, noise, deviation=0.2, clip=0.5)
    assert found.tolist() == pytest.approx([0.2, -0.5, 1.0, -0.92])


def test_targets_by_hand() -> None:
    batch = {
        "rewards": torch.tensor([1.0, 2.0]),
        "discounts": torch.tensor([0.5, 0.0]),
        "next_q": torch.tensor([[4.0, 9.0], [3.0, 7.0]]),
    }
    assert td3_targets(batch).tolist() == [2.5, 2.0]


def test_actor_loss_by_hand() -> None:
    assert float(td3_actor_loss(torch.tensor([[1.0, 4.0]]))) == -2.5


def test_the_critics_loss_by_parts() -> None:
    td3 = make(target_policy_noise=0.3, target_noise_clip=0.4)
    with torch.no_grad():
        for parameter in (*td3.target_actor.module.parameters(),):
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = make_batch(td3.noise_shape)
    with torch.no_grad():
        params, _ = td3.target_actor.module.policy(batch["next_obs"])
        actions = (params.tanh() + (0.3 * batch["noise"]).clamp(-0.4, 0.4)).clamp(-1, 1)
        next_q = td3.target_critics.module(batch["next_obs"], actions)
        target = batch["rewards"] + batch["discounts"] * torch.minimum(next_q[0], next_q[1])
        q = td3.model.critics(batch["obs"], batch["actions"])
        expected = 0.5 * ((q - target) ** 2).mean(1).sum()
    assert float(td3.critic_loss(batch)["loss"].detach()) == pytest.approx(float(expected))


def test_the_policy_follows_the_first_critic_alone() -> None:
    td3 = make()
    batch = make_batch(td3.noise_shape)
    actions = td3.model.actor.actions(batch["obs"])
    first = td3.model.critics(batch["obs"], actions)[0]
    assert float(td3.actor_loss(batch)["loss"].detach()) == pytest.approx(
        -float(first.detach().mean())
    )


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_the_policy_and_the_targets_wait(delay: int) -> None:
    td3 = make(policy_delay=delay)
    buffer = replay()
    moved = []
    for _ in range(6):
        before = [
            flat(m)
            for m in (
                td3.model.critics,
                td3.model.actor,
                td3.target_critics.module,
                td3.target_actor.module,
            )
        ]
        td3.learn(buffer, START, updates=1)
        after = [
            flat(m)
            for m in (
                td3.model.critics,
                td3.model.actor,
                td3.target_critics.module,
                td3.target_actor.module,
            )
        ]
        moved.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    delayed = [(i + 1) % delay == 0 for i in range(6)]
    assert moved == [[True, d, d, d] for d in delayed]


def test_targets_move_by_tau() -> None:
    td3 = make(tau=0.25)
    before = flat(td3.target_critics.module), flat(td3.target_actor.module)
    td3.update(make_batch(td3.noise_shape), delayed=True)
    now = flat(td3.model.critics), flat(td3.model.actor)
    after = flat(td3.target_critics.module), flat(td3.target_actor.module)
    for old, online, slow in zip(before, now, after, strict=True):
        assert torch.allclose(slow, old + 0.25 * (online - old), atol=1e-7)


def test_the_policy_step_leaves_the_critics_alone() -> None:
    td3 = make()
    critics = flat(td3.model.critics)
    td3.actor_step(make_batch(td3.noise_shape))
    assert torch.equal(flat(td3.model.critics), critics)


def test_the_last_actor_loss_is_returned_between_its_updates() -> None:
    td3 = make(policy_delay=2)
    batch = make_batch(td3.noise_shape)
    assert float(td3.update(batch, delayed=False)["actor_loss"]) == 0.0
    last = float(td3.update(batch, delayed=True)["actor_loss"])
    assert last != 0.0
    assert float(td3.update(batch, delayed=False)["actor_loss"]) == last


def test_exploration_noise_stays_within_bounds() -> None:
    head = TanhHead((2,), 0.5)
    params, noise = torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, -1.0]])
    expected = [[1.0, -0.5]]
    assert head.sample(params, noise, None).tolist() == expected
    choose = head.numpy_choice()
    assert choose is not None
    assert choose(params.numpy(), noise.numpy()).tolist() == expected
    assert choose(params.numpy(), None) == pytest.approx(params.tanh().numpy())


def test_state_survives_in_the_middle_of_a_delay() -> None:
    a, b = make(policy_delay=3), make(seed=5, policy_delay=3)
    buffer = replay()
    a.learn(buffer, START, updates=4)
    a.pop_metrics()
    b.load_state_dict(copy.deepcopy(to_storable(a.state_dict())))
    for td3 in (a, b):
        td3.learn(buffer, START, updates=4)
    assert differences(to_storable(a.state_dict()), to_storable(b.state_dict())) == []
    assert a.pop_metrics() == b.pop_metrics()


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tau", 1.5),
        ("policy_delay", 0),
        ("num_critics", 0),
        ("exploration_noise", -0.1),
        ("target_policy_noise", -0.1),
        ("target_noise_clip", float("inf")),
    ],
)
def test_impossible_knobs_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"algo_kwargs.{knob}"):
        TD3Config(**{knob: value})


def test_a_schedule_reaches_both_steps() -> None:
    td3 = make(learning_rate=1e-2, lr_schedule="linear")
    td3.learn(replay(), Progress(750, 1000), updates=2)
    assert [step.learning_rate for step in td3.gradient_steps] == [2.5e-3, 2.5e-3]
