"""SAC's losses, update and head on numbers worked by hand and against plain torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from continuous_batches import BOX, OBS, make_batch, replay
from rl_training.algorithms.off_policy import ensemble_td_loss
from rl_training.algorithms.optimizers import Optimizer
from rl_training.algorithms.sac import (
    SAC,
    SACConfig,
    SACModel,
    sac_actor_loss,
    sac_targets,
    sac_temperature_loss,
)
from rl_training.checkpointing import to_storable
from rl_training.errors import ConfigError
from rl_training.models.action_heads import SquashedGaussianHead
from rl_training.models.mlp_continuous import ActorCritics, EnsembleMLP, MLPActor, MLPCritics
from rl_training.types import Progress
from state_compare import differences

START = Progress(0, 1000)


def make(seed: int = 0, **knobs: Any) -> SAC:
    torch.manual_seed(seed)
    config = SACConfig(hidden_sizes=(16, 16), batch_size=8, **knobs)
    shape: dict[str, Any] = {"hidden_sizes": (16, 16), "activation": "relu"}
    networks = ActorCritics(
        MLPActor(OBS, SquashedGaussianHead(BOX.shape), **shape),
        MLPCritics(OBS, BOX.size, num_critics=config.num_critics, **shape),
    )
    return SAC(SACModel(networks, config), config, generator=torch.Generator().manual_seed(seed))


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


# -- pure losses -----------------------------------------------------------------------------------


def test_targets_by_hand() -> None:
    batch = {
        "rewards": torch.tensor([1.0, 2.0]),
        "discounts": torch.tensor([0.5, 0.0]),
        "next_q": torch.tensor([[4.0, 9.0], [3.0, 7.0], [8.0, 8.0]]),
        "next_logprobs": torch.tensor([-2.0, 5.0]),
    }
    # 1 + 0.5 (min(4, 3, 8) - 0.1 (-2)); the second row ended.
    targets = sac_targets(batch, ent_coef=torch.tensor(0.1))
    assert targets.tolist() == pytest.approx([2.6, 2.0])


def test_actor_loss_by_hand() -> None:
    batch = {"logprobs": torch.tensor([1.0, -1.0]), "q": torch.tensor([[2.0, 0.5], [1.0, 3.0]])}
    loss = sac_actor_loss(batch, ent_coef=torch.tensor(0.2))
    assert float(loss) == pytest.approx(((0.2 - 1.0) + (-0.2 - 0.5)) / 2)


@pytest.mark.parametrize(("entropy", "sign"), [(-3.0, 1), (-1.0, -1)])
def test_temperature_rises_below_the_target_entropy_and_falls_above(
    entropy: float, sign: int
) -> None:
    log_ent_coef = torch.tensor(0.3, requires_grad=True)
    logprobs = torch.full((4,), -entropy, requires_grad=True)
    loss = sac_temperature_loss(logprobs, log_ent_coef, target_entropy=-2.0)
    assert float(loss.detach()) == pytest.approx(-0.3 * (-entropy - 2.0))
    torch.autograd.backward(loss)
    assert log_ent_coef.grad is not None
    assert math.copysign(1, -float(log_ent_coef.grad)) == sign
    assert logprobs.grad is None


def test_ensemble_loss_by_hand() -> None:
    q_values = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    # Critic 1: (0 + 4) / 2, critic 2: (1 + 0) / 2; halved and summed.
    assert float(ensemble_td_loss(q_values, torch.tensor([1.0, 4.0]))) == pytest.approx(1.25)


# -- the head --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_logprob_agrees_with_torch_distributions(shape: tuple[int, ...]) -> None:
    head = SquashedGaussianHead(shape)
    size = math.prod(shape)
    params = 0.4 * torch.randn(64, 2 * size, dtype=torch.float64)
    noise = torch.randn(64, *shape, dtype=torch.float64)
    actions, logprob = head.sample_logprob(params, noise)
    mean, log_std = params.reshape(64, 2, size).unbind(1)
    base: Any = Independent(Normal(mean, log_std.exp()), 1)
    squashed: Any = TransformedDistribution(base, [TanhTransform()])
    u = mean + log_std.exp() * noise.reshape(64, size)
    assert torch.allclose(actions.reshape(64, size), u.tanh())
    assert torch.allclose(logprob, squashed.log_prob(u.tanh()), atol=1e-6)


def test_logprob_and_gradient_stay_finite_far_out() -> None:
    head = SquashedGaussianHead((1,))
    params = torch.tensor([[60.0, 1.0], [-60.0, 5.0], [0.0, -50.0]], requires_grad=True)
    actions, logprob = head.sample_logprob(params, torch.ones(3, 1))
    torch.autograd.backward(logprob.sum())
    assert torch.isfinite(logprob).all()
    assert params.grad is not None
    assert torch.isfinite(params.grad).all()
    assert (actions.abs() <= 1).all()


def test_numpy_choice_equals_torch() -> None:
    head = SquashedGaussianHead((2, 3))
    choose = head.numpy_choice()
    assert choose is not None
    params, noise = 3 * torch.randn(5, 12), torch.randn(5, 2, 3)
    for given, expected in (
        (noise.numpy(), head.sample(params, noise, None)),
        (None, head.mode(params, None)),
    ):
        assert torch.allclose(torch.from_numpy(choose(params.numpy(), given)), expected, atol=1e-6)


# -- the ensemble ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_ensemble_is_so_many_networks_apart(size: int) -> None:
    net = EnsembleMLP(size, (3, 8, 8, 1), "relu")
    rows = torch.randn(6, 3)
    together = net(rows)
    assert together.shape == (size, 6, 1)
    for member in range(size):
        x = rows
        for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
            x = x @ weight[member] + bias[member]
            x = x if i == 2 else torch.relu(x)
        assert torch.allclose(together[member], x, atol=1e-6)
    assert torch.allclose(net(rows, members=1), together[:1])
    assert len({float(w[m, 0, 0].detach()) for w in net.weights for m in range(size)}) == 3 * size


# -- the update ------------------------------------------------------------------------------------


def test_critics_move_before_the_policy_and_targets_after() -> None:
    """The policy's loss must be that of critics already moved, with the temperature of before."""
    sac = make(tau=0.5)
    batch = make_batch(sac.noise_shape)
    twin = make(tau=0.5)
    critic = twin.critic_step(batch)
    expected = {name: value.detach() for name, value in twin.actor_loss(batch).items()}
    before = flat(sac.target.module)
    metrics = sac.update(batch)
    assert float(metrics["critic_loss"]) == pytest.approx(float(critic["loss"]))
    assert float(metrics["actor_loss"]) == pytest.approx(float(expected["actor_loss"]), rel=1e-5)
    assert float(metrics["ent_coef"]) == 1.0
    moved = before + 0.5 * (flat(sac.model.critics) - before)
    assert torch.allclose(flat(sac.target.module), moved, atol=1e-7)


@pytest.mark.parametrize("num_critics", [1, 2, 4])
def test_the_critics_loss_by_parts(num_critics: int) -> None:
    sac = make(num_critics=num_critics)
    batch = make_batch(sac.noise_shape)
    with torch.no_grad():
        for parameter in sac.target.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        params, _ = sac.model.actor.policy(batch["next_obs"])
        head: Any = sac.model.actor.head
        actions, logprobs = head.sample_logprob(params, batch["noise"][0])
        next_q = sac.target.module(batch["next_obs"], actions).amin(0)
        target = batch["rewards"] + batch["discounts"] * (next_q - logprobs)
        q = sac.model.critics(batch["obs"], batch["actions"])
        expected = 0.5 * ((q - target) ** 2).mean(1).sum()
    assert float(sac.critic_loss(batch)["loss"].detach()) == pytest.approx(float(expected))


def test_the_policy_step_leaves_the_critics_alone() -> None:
    sac = make()
    critics = flat(sac.model.critics)
    sac.actor_step(make_batch(sac.noise_shape))
    assert torch.equal(flat(sac.model.critics), critics)


@pytest.mark.parametrize("ent_coef", [None, 0.2, 0.0])
def test_only_an_unset_temperature_is_learnt(ent_coef: float | None) -> None:
    sac = make(ent_coef=ent_coef)
    for _ in range(3):
        metrics = sac.update(make_batch(sac.noise_shape))
    now = float(sac.model.temperature.log_ent_coef.detach().exp())
    if ent_coef is None:
        assert now != 1.0
    else:
        assert now == pytest.approx(ent_coef)
        assert float(metrics["ent_coef"]) == pytest.approx(ent_coef)


def test_targets_follow_at_their_interval() -> None:
    sac = make(target_update_interval_updates=3, tau=1.0)
    buffer = replay()
    start = flat(sac.target.module)
    sac.learn(buffer, START, updates=2)
    assert torch.equal(flat(sac.target.module), start)
    sac.learn(buffer, START, updates=1)
    assert torch.equal(flat(sac.target.module), flat(sac.model.critics))


def test_the_target_entropy_defaults_to_minus_the_action_size() -> None:
    assert make().target_entropy == -2.0
    assert make(target_entropy=-0.5).target_entropy == -0.5


def test_state_survives_and_continues_alike() -> None:
    a, b = make(), make(seed=5)
    buffer = replay()
    a.learn(buffer, START, updates=5)
    b.load_state_dict(copy.deepcopy(to_storable(a.state_dict())))
    for sac in (a, b):
        sac.learn(buffer, START, updates=5)
    assert differences(to_storable(a.state_dict()), to_storable(b.state_dict())) == []


def test_other_weights_reach_the_targets_too() -> None:
    a, b = make(), make(seed=5)
    b.load_weights(a.module.state_dict())
    assert torch.equal(flat(b.target.module), flat(a.model.critics))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tau", 0.0),
        ("num_critics", 0),
        ("target_update_interval_updates", 0),
        ("ent_coef", -1.0),
        ("ent_coef_init", 0.0),
        ("target_entropy", math.inf),
        ("hidden_sizes", (0,)),
    ],
)
def test_impossible_knobs_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"algo_kwargs.{knob}"):
        SACConfig(**{knob: value})


def test_a_schedule_reaches_both_steps() -> None:
    sac = make(learning_rate=1e-2, lr_schedule="cosine", lr_warmup_fraction=0.5)
    for done, rate in ((250, 5e-3), (500, 1e-2), (750, 5e-3), (1000, 0.0)):
        sac.learn(replay(), Progress(done, 1000))
        assert sac.critic_step.learning_rate == pytest.approx(rate)
        assert sac.actor_step.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_weight_decay_spares_the_temperature(optimizer: str) -> None:
    """From the same batch the temperature moves alike with and without decay; weights do not."""
    plain, decayed = (
        make(optimizer=optimizer, weight_decay=decay, ent_coef_init=0.5) for decay in (0.0, 10.0)
    )
    for sac in (plain, decayed):
        sac.actor_step(make_batch(sac.noise_shape))
    assert torch.equal(flat(plain.model.temperature), flat(decayed.model.temperature))
    assert not torch.equal(flat(plain.model.actor), flat(decayed.model.actor))


def test_the_optimizer_of_the_settings_is_used_by_both_steps() -> None:
    sac = make(optimizer="rmsprop", optimizer_betas=(0.0, 0.9), optimizer_eps=1e-6)
    for step in sac.gradient_steps:
        assert step.optimizer == Optimizer("rmsprop", (0.0, 0.9), 1e-6)
    assert len(sac.gradient_steps) == 2
