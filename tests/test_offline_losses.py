"""Losses, weights and networks of learners from datasets, on numbers worked by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from continuous_batches import BATCH, BOX, OBS, make_batch, replay
from rl_training.algorithms.advantage_weighted import weighted_cloning_loss
from rl_training.algorithms.awac import AWAC, AWACConfig, awac_weights
from rl_training.algorithms.bc import BC, BCConfig, BCModel, action_distance, cloning_loss
from rl_training.algorithms.cql import (
    CQL,
    CQLConfig,
    DiscreteCQL,
    LearntWeight,
    conservative_gap,
)
from rl_training.algorithms.iql import IQL, IQLConfig, IQLModel, expectile_loss, iql_weights
from rl_training.algorithms.off_policy import ensemble_td_loss
from rl_training.algorithms.rebrac import (
    ReBRAC,
    ReBRACConfig,
    rebrac_actor_loss,
    rebrac_targets,
)
from rl_training.algorithms.sac import SACModel
from rl_training.algorithms.td3 import smoothed_actions
from rl_training.algorithms.td3_bc import (
    TD3BC,
    TD3BCConfig,
    normalized_value_loss,
    td3_bc_actor_loss,
)
from rl_training.errors import ConfigError
from rl_training.models.action_heads import (
    CategoricalHead,
    ReplayHead,
    SquashedGaussianHead,
    TanhGaussianHead,
    TanhHead,
)
from rl_training.models.mlp_continuous import (
    ActorCritics,
    EnsembleLayerNorm,
    MLPActor,
    MLPCritics,
    MLPValue,
)
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, ObsSpec, Progress

THREE = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))
SHAPE: dict[str, Any] = {"hidden_sizes": (16, 16), "activation": "relu"}
QUICK: dict[str, Any] = {"hidden_sizes": (16, 16), "batch_size": BATCH}


def networks(head: ReplayHead, *, critics: int = 2, num_actions: int = 0) -> ActorCritics:
    return ActorCritics(
        MLPActor(OBS, head, **SHAPE),
        MLPCritics(OBS, BOX.size, num_critics=critics, num_actions=num_actions, **SHAPE),
    )


def make_bc(discrete: bool = False, **knobs: Any) -> BC:
    torch.manual_seed(0)
    head: ReplayHead = CategoricalHead(THREE.nvec, ()) if discrete else TanhHead(BOX.shape, 0.0)
    return BC(BCModel(MLPActor(OBS, head, **SHAPE)), BCConfig(**QUICK, **knobs))


def make_td3_bc(**knobs: Any) -> TD3BC:
    torch.manual_seed(0)
    return TD3BC(networks(TanhHead(BOX.shape, 0.0)), TD3BCConfig(**QUICK, **knobs))


def make_rebrac(**knobs: Any) -> ReBRAC:
    torch.manual_seed(0)
    return ReBRAC(networks(TanhHead(BOX.shape, 0.0)), ReBRACConfig(**{**QUICK, **knobs}))


def make_iql(discrete: bool = False, **knobs: Any) -> IQL:
    torch.manual_seed(0)
    config = IQLConfig(**QUICK, **knobs)
    both = (
        networks(CategoricalHead(THREE.nvec, ()), num_actions=3)
        if discrete
        else networks(TanhGaussianHead(BOX.shape, config.log_std_init))
    )
    return IQL(IQLModel(both, MLPValue(OBS, **SHAPE)), config)


def make_awac(**knobs: Any) -> AWAC:
    torch.manual_seed(0)
    config = AWACConfig(**{**QUICK, **knobs})
    return AWAC(networks(TanhGaussianHead(BOX.shape, config.log_std_init)), config)


def make_cql(**knobs: Any) -> CQL:
    torch.manual_seed(0)
    config = CQLConfig(**QUICK, **knobs)
    return CQL(SACModel(networks(SquashedGaussianHead(BOX.shape)), config), config)


def make_discrete_cql(**knobs: Any) -> DiscreteCQL:
    torch.manual_seed(0)
    return DiscreteCQL(MLPQNetwork(OBS, THREE, **SHAPE), CQLConfig(**QUICK, **knobs))


WITH_ACTOR: dict[str, Callable[..., Any]] = {
    "td3_bc": make_td3_bc,
    "rebrac": make_rebrac,
    "iql": make_iql,
    "awac": make_awac,
    "cql": make_cql,
}


def move(module: nn.Module, seed: int = 1) -> None:
    """Make a target network differ from its network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def plain_batch(discrete: bool = False) -> dict[str, Any]:
    batch = make_batch((1,))
    batch["weights"] = torch.ones(BATCH)
    if discrete:
        batch["actions"] = torch.arange(BATCH) % 3
    return batch


def normal_distribution(mean: Any, deviation: Any) -> Any:
    return torch.distributions.Normal(mean, deviation)


def number(value: Tensor) -> float:
    return float(value.detach())


def gradient_of(loss: Tensor, module: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


# -- pure functions --------------------------------------------------------------------------------


def test_distances_of_actions_by_hand() -> None:
    actions = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    recorded = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    # Squares 1 0 and 1 4: rows of 1 and 5, four components with a sum of 6.
    assert number(action_distance(actions, recorded)) == 3.0
    assert number(cloning_loss(actions, recorded)) == 1.5
    # Any shape of action: the components of a row are added.
    assert number(action_distance(actions.view(1, 2, 2), recorded.view(1, 2, 2))) == 6.0


def test_normalized_values_by_hand() -> None:
    q_values = torch.tensor([1.0, -3.0], requires_grad=True)
    loss = normalized_value_loss(q_values)
    # mean -1, mean magnitude 2
    assert number(loss) == 0.5
    # -1/2 for each value, divided by 2: the denominator is a constant.
    (gradient,) = torch.autograd.grad(loss, q_values)
    assert gradient.tolist() == [-0.25, -0.25]


def test_td3_bc_loss_by_hand() -> None:
    q_values = torch.tensor([[1.0, -3.0]])
    actions = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    recorded = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    # 2.5 x 0.5 + 1.5
    assert number(td3_bc_actor_loss(q_values, actions, recorded, alpha=2.5)) == 2.75
    # Without values it is cloning.
    assert number(td3_bc_actor_loss(q_values, actions, recorded, alpha=0.0)) == 1.5


def test_rebrac_loss_by_hand() -> None:
    q_values = torch.tensor([[1.0, -3.0], [2.0, -5.0]])
    actions = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    recorded = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    # Smallest values 1 and -5: mean -2, mean magnitude 3; distance 3.
    found = rebrac_actor_loss(q_values, actions, recorded, penalty=0.1)
    assert number(found) == pytest.approx(2 / 3 + 0.3)


def test_rebrac_targets_by_hand() -> None:
    batch = {
        "rewards": torch.tensor([1.0, 1.0, 1.0]),
        "discounts": torch.tensor([0.5, 0.5, 0.0]),
        "next_q": torch.tensor([[4.0, 4.0, 9.0], [6.0, 3.0, 8.0]]),
        "next_actions": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
        "next_recorded": torch.tensor([1.0, 0.0, 0.0]),
    }
    actions = torch.tensor([[1.0, -1.0], [1.0, 1.0], [1.0, 1.0]])
    # 1 + 0.5 (4 - 0.1 x (1 + 4)); truncated: 1 + 0.5 x 3, no penalty; terminated: 1.
    found = rebrac_targets(batch, actions, penalty=0.1)
    assert found.tolist() == pytest.approx([2.75, 2.5, 1.0])


def test_expectile_loss_by_hand() -> None:
    difference = torch.tensor([2.0, -3.0, 0.0])
    # 0.7 x 4 + 0.3 x 9 = 5.5, over three rows
    assert number(expectile_loss(difference, 0.7)) == pytest.approx(5.5 / 3)
    # At 0.5 it is half of the mean squared error.
    assert number(expectile_loss(difference, 0.5)) == pytest.approx(6.5 / 3)


@pytest.mark.parametrize(("expectile", "value"), [(0.5, 2.0), (0.75, 3.0), (0.9, 3.6)])
def test_the_minimum_of_the_loss_is_the_expectile(expectile: float, value: float) -> None:
    # Of 0 and 4: expectile (4 - v) = (1 - expectile) v, so v = 4 expectile.
    v = torch.tensor(value, requires_grad=True)
    (slope,) = torch.autograd.grad(expectile_loss(torch.tensor([0.0, 4.0]) - v, expectile), v)
    assert float(slope) == pytest.approx(0, abs=1e-6)


def test_iql_weights_by_hand() -> None:
    advantages = torch.tensor([0.0, 1.0, -1.0, 10.0])
    found = iql_weights(advantages, inverse_temperature=2.0, max_weight=5.0)
    assert found.tolist() == pytest.approx([1.0, 5.0, math.exp(-2), 5.0])
    free = iql_weights(advantages[:2], inverse_temperature=2.0, max_weight=100.0)
    assert free.tolist() == pytest.approx([1.0, math.exp(2)])


def test_awac_weights_by_hand() -> None:
    # exp(A / 2) is 1, 2 and 5: of 8 in all, times 3 rows.
    advantages = torch.tensor([0.0, 2 * math.log(2), 2 * math.log(5)])
    found = awac_weights(advantages, temperature=2.0)
    assert found.tolist() == pytest.approx([3 / 8, 6 / 8, 15 / 8])
    # Only differences count, and large ones stay finite.
    far = awac_weights(advantages + 1e4, temperature=2.0)
    assert far.tolist() == pytest.approx([3 / 8, 6 / 8, 15 / 8], rel=1e-3)


def test_weighted_cloning_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = weighted_cloning_loss(logprobs, torch.tensor([3.0, 0.5]))
    assert number(loss) == 2.0  # (3 + 1) / 2
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [-1.5, -0.25]


def test_the_td_loss_by_hand() -> None:
    q_values = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    # Errors 0 1 and 2 -1 : half of 0.5 plus half of 2.5
    assert number(ensemble_td_loss(q_values, torch.tensor([1.0, 1.0]))) == 1.5


def test_the_conservative_gap_by_hand() -> None:
    # Two critics, two samples, two rows.
    q_samples = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[2.0, 0.0], [2.0, 0.0]]])
    logprobs = torch.log(torch.tensor([[0.5, 1.0], [0.25, 0.5]]))
    q_data = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    # Sums of exp(q) / p: row 1: 2 + 4 = 6 times exp(q); row 2: 1 + 2 = 3 times exp(q).
    first = (math.log(6) + 0 - 1 + math.log(3) + 1 - 0) / 2
    second = (math.log(6) + 2 - 0 + math.log(3) + 0 - 0) / 2
    found = conservative_gap(q_samples, logprobs, q_data)
    assert found.tolist() == pytest.approx([first, second])


def test_the_learnt_weight() -> None:
    weight = LearntWeight()
    assert number(weight()) == 1.0
    with torch.no_grad():
        weight.logarithm.fill_(math.log(3))
    assert number(weight()) == pytest.approx(3.0)
    with torch.no_grad():
        weight.logarithm.fill_(100.0)
    limit = weight()
    assert number(limit) == pytest.approx(1e6, rel=1e-5)
    limit.backward()  # beyond the limit it can still decrease
    assert weight.logarithm.grad is not None
    assert number(weight.logarithm.grad) == pytest.approx(1e6, rel=1e-5)


# -- losses of learners, by parts ------------------------------------------------------------------


def test_cloning_of_box_actions() -> None:
    bc, batch = make_bc(), plain_batch()
    with torch.no_grad():
        chosen = bc.model.actor.net(batch["obs"]).tanh()
        error = (chosen - batch["actions"]) ** 2
    metrics = bc.loss(batch)
    assert number(metrics["loss"]) == pytest.approx(float(error.mean()))
    assert number(metrics["action_distance"]) == pytest.approx(float(error.sum(1).mean()))


def test_cloning_of_discrete_actions() -> None:
    bc, batch = make_bc(discrete=True), plain_batch(discrete=True)
    with torch.no_grad():
        logits = bc.model.actor.net(batch["obs"])
    metrics = bc.loss(batch)
    expected = nn.functional.cross_entropy(logits, batch["actions"])
    assert number(metrics["loss"]) == pytest.approx(float(expected))
    matches = (logits.argmax(1) == batch["actions"]).float().mean()
    assert number(metrics["action_match"]) == float(matches)


def masked_batch() -> tuple[ObsSpec, dict[str, Any]]:
    """Of three actions the recorded one and the next are legal; after it, the last two."""
    spec = ObsSpec({"seen": OBS.leaves[""], ACTION_MASK: ArraySpec((3,), "bool")})
    batch = plain_batch(discrete=True)
    legal = torch.zeros(BATCH, 3, dtype=torch.bool)
    rows = torch.arange(BATCH)
    legal[rows, batch["actions"]] = legal[rows, (batch["actions"] + 1) % 3] = True
    after = torch.tensor([False, True, True]).expand(BATCH, 3)
    obs = {"seen": batch["obs"], ACTION_MASK: legal}
    return spec, {**batch, "obs": obs, "next_obs": {"seen": batch["next_obs"], ACTION_MASK: after}}


def test_only_legal_actions_have_a_probability_in_cloning() -> None:
    spec, batch = masked_batch()
    torch.manual_seed(0)
    actor = MLPActor(spec, CategoricalHead(THREE.nvec, ()), **SHAPE)
    legal, actions = batch["obs"][ACTION_MASK], batch["actions"]
    with torch.no_grad():
        powers = actor.net(batch["obs"]["seen"]).exp() * legal
    expected = -(powers[torch.arange(BATCH), actions] / powers.sum(1)).log().mean()
    metrics = BC(BCModel(actor), BCConfig(**QUICK)).loss(batch)
    assert number(metrics["loss"]) == pytest.approx(float(expected))
    matches = (powers.argmax(1) == actions).float().mean()
    assert number(metrics["action_match"]) == float(matches)
    both = ActorCritics(actor, MLPCritics(spec, 1, num_critics=2, num_actions=3, **SHAPE))
    iql = IQL(IQLModel(both, MLPValue(spec, **SHAPE)), IQLConfig(**QUICK))
    iql.weights = lambda batch: torch.ones(BATCH)  # type: ignore[method-assign]
    assert number(iql.actor_loss(batch)["loss"]) == pytest.approx(float(expected))


def test_cqls_maximum_and_logsumexp_are_over_legal_actions() -> None:
    spec, batch = masked_batch()
    torch.manual_seed(0)
    cql = DiscreteCQL(MLPQNetwork(spec, THREE, **SHAPE), CQLConfig(**QUICK))
    net: Any = cql.model.advantage
    target: Any = cql.target.module
    move(target)
    with torch.no_grad():
        values, following = net(batch["obs"]["seen"]), net(batch["next_obs"]["seen"])
        of_target = target.advantage(batch["next_obs"]["seen"])
    best = torch.where(following[:, 1] >= following[:, 2], of_target[:, 1], of_target[:, 2])
    error = batch["rewards"] + batch["discounts"] * best
    chosen = values.gather(1, batch["actions"][:, None])[:, 0]
    td = nn.functional.smooth_l1_loss(chosen, error)
    gap = ((values.exp() * batch["obs"][ACTION_MASK]).sum(1).log() - chosen).mean()
    found = cql.loss(batch)
    assert number(found["td_loss"]) == pytest.approx(float(td), rel=1e-5)
    assert number(found["conservative_loss"]) == pytest.approx(float(gap), rel=1e-5)


@pytest.mark.parametrize("discrete", [False, True])
def test_cloning_learns_the_recorded_actions(discrete: bool) -> None:
    bc, batch = make_bc(discrete, learning_rate=0.01), plain_batch(discrete)
    for _ in range(200):
        bc.update(batch)
    chosen = bc.model.actor.actions(batch["obs"]).detach()
    assert float((chosen - batch["actions"]).abs().max()) < (0.5 if discrete else 0.1)


def test_td3_bc_by_parts() -> None:
    learner, batch = make_td3_bc(alpha=1.5), plain_batch()
    with torch.no_grad():
        actions = learner.model.actor.net(batch["obs"]).tanh()
        q = learner.model.critics(batch["obs"], actions)[0]  # by the first critic
        error = (actions - batch["actions"]) ** 2
        expected = -1.5 * q.mean() / q.abs().mean() + error.mean()
    metrics = learner.actor_loss(batch)
    assert number(metrics["loss"]) == pytest.approx(float(expected))
    assert number(metrics["action_distance"]) == pytest.approx(float(error.sum(1).mean()))


def test_rebrac_by_parts() -> None:
    learner = make_rebrac(actor_penalty=0.3, critic_penalty=0.2)
    move(learner.target_actor.module)
    move(learner.target_critics.module, 2)
    batch = {
        **make_batch(learner.noise_shape),
        "next_actions": torch.rand(BATCH, 2),
        "next_recorded": (torch.arange(BATCH) % 3 > 0).float(),
    }
    with torch.no_grad():
        own = learner.target_actor.module.net(batch["next_obs"]).tanh()
        smoothed = smoothed_actions(own, batch["noise"], deviation=0.2, clip=0.5)
        next_q = learner.target_critics.module(batch["next_obs"], smoothed)
        targets = torch.tensor(
            [
                float(batch["rewards"][i])
                + float(batch["discounts"][i])
                * (
                    min(float(next_q[0, i]), float(next_q[1, i]))
                    - 0.2
                    * float(batch["next_recorded"][i])
                    * float(((smoothed[i] - batch["next_actions"][i]) ** 2).sum())
                )
                for i in range(BATCH)
            ]
        )
        q = learner.model.critics(batch["obs"], batch["actions"])
        critic = 0.5 * ((q - targets) ** 2).mean(1).sum()
        actions = learner.model.actor.net(batch["obs"]).tanh()
        least = learner.model.critics(batch["obs"], actions).min(0).values
        distance = ((actions - batch["actions"]) ** 2).sum(1).mean()
        actor = -least.mean() / least.abs().mean() + 0.3 * distance
    assert number(learner.critic_loss(batch)["loss"]) == pytest.approx(float(critic))
    assert number(learner.actor_loss(batch)["loss"]) == pytest.approx(float(actor))


@pytest.mark.parametrize("discrete", [False, True])
def test_iql_by_parts(discrete: bool) -> None:
    iql = make_iql(discrete, expectile=0.8, inverse_temperature=2.0, max_weight=1.01)
    move(iql.target.module)
    batch = plain_batch(discrete)
    with torch.no_grad():
        target_q = iql.target.module(batch["obs"], batch["actions"]).min(0).values
        bias = list(iql.model.value.parameters())[-1]  # half of the advantages become negative
        bias.add_((target_q - iql.model.value(batch["obs"])).median())
        value, next_value = iql.model.value(batch["obs"]), iql.model.value(batch["next_obs"])
        targets = batch["rewards"] + batch["discounts"] * next_value
        q = iql.model.critics(batch["obs"], batch["actions"])
        u = target_q - value
        value_loss = (torch.where(u < 0, 0.2, 0.8) * u**2).mean()
        critic = 0.5 * ((q - targets) ** 2).mean(1).sum() + value_loss
        weights = torch.clamp(torch.exp(2 * u), max=1.01)
        params = iql.model.actor.net(batch["obs"])
        if discrete:
            logprobs = -nn.functional.cross_entropy(params, batch["actions"], reduction="none")
        else:
            normal = normal_distribution(params.tanh(), math.exp(-1))
            logprobs = normal.log_prob(batch["actions"]).sum(1)
    assert 0 < int((weights == weights.max()).sum()) < BATCH - 1
    assert 0 < int((u < 0).sum()) < BATCH - 1
    batch["target_q"] = target_q
    found = iql.critic_loss(batch)
    assert number(found["loss"]) == pytest.approx(float(critic))
    assert number(found["value_loss"]) == pytest.approx(float(value_loss))
    policy = iql.actor_loss(batch)
    assert number(policy["loss"]) == pytest.approx(float(-(weights * logprobs).mean()))
    assert number(policy["advantage_weight"]) == pytest.approx(float(weights.mean()))
    metrics = iql.update({k: v for k, v in batch.items() if k != "target_q"})
    assert number(metrics["critic_loss"]) == pytest.approx(float(critic - value_loss))
    assert number(metrics["value_loss"]) == pytest.approx(float(value_loss))


def test_iqls_targets_have_no_gradient() -> None:
    iql, batch = make_iql(), plain_batch()
    batch["target_q"] = torch.zeros(BATCH)
    batch["next_obs"] = batch["obs"]
    loss = iql.critic_loss(batch)["loss"]
    with torch.no_grad():
        values = iql.model.value(batch["obs"])
    # The value's gradient is that of the expectile loss alone.
    own = expectile_loss(batch["target_q"] - iql.model.value(batch["obs"]), iql.config.expectile)
    assert torch.equal(gradient_of(loss, iql.model.value), gradient_of(own, iql.model.value))
    assert float(values.abs().max()) > 0


@pytest.mark.parametrize("make", [make_iql, make_awac])
def test_the_policys_loss_moves_only_the_policy(make: Callable[..., Any]) -> None:
    learner = make()
    batch = make_batch(learner.noise_shape or (1,))
    batch["target_q"] = torch.ones(BATCH)
    loss, model = learner.actor_loss(batch)["loss"], learner.model
    values = nn.ModuleList(part for name, part in model.named_children() if name != "actor")
    own, others = list(model.actor.parameters()), list(values.parameters())
    found = torch.autograd.grad(loss, (*own, *others), allow_unused=True)
    assert all(gradient is not None for gradient in found[: len(own)])
    assert all(gradient is None for gradient in found[len(own) :])


def test_awac_by_parts() -> None:
    awac = make_awac(temperature=0.5)
    move(awac.target.module)
    batch = make_batch(awac.noise_shape)
    assert batch["noise"].shape == (2, BATCH, 2)
    with torch.no_grad():
        std = math.exp(-1)
        following = awac.model.actor.net(batch["next_obs"]).tanh() + std * batch["noise"][0]
        next_q = awac.target.module(batch["next_obs"], following.clamp(-1, 1)).min(0).values
        targets = batch["rewards"] + batch["discounts"] * next_q
        q = awac.model.critics(batch["obs"], batch["actions"])
        critic = 0.5 * ((q - targets) ** 2).mean(1).sum()
        mean = awac.model.actor.net(batch["obs"]).tanh()
        own = (mean + std * batch["noise"][1]).clamp(-1, 1)
        advantages = q.min(0).values - awac.model.critics(batch["obs"], own).min(0).values
        weights = BATCH * torch.softmax(advantages / 0.5, 0)
        logprobs = normal_distribution(mean, std).log_prob(batch["actions"]).sum(1)
    assert number(awac.critic_loss(batch)["loss"]) == pytest.approx(float(critic))
    policy = awac.actor_loss(batch)
    assert number(policy["loss"]) == pytest.approx(float(-(weights * logprobs).mean()))
    assert number(policy["advantage_weight"]) == pytest.approx(1.0)


def sampled_by_hand(cql: CQL, batch: dict[str, Any], samples: int) -> tuple[Tensor, Tensor]:
    """Actions and log-probabilities of CQL's three distributions, one after the other."""
    noise = batch["noise"][2:]
    actions, logprobs = [], []
    for k, obs in enumerate(("obs", "next_obs")):
        params = cql.model.actor.net(batch[obs]).view(BATCH, 2, 2)
        normal = normal_distribution(params[:, 0], params[:, 1].clamp(-20, 2).exp())
        for i in range(samples):
            u = normal.mean + normal.stddev * noise[k * samples + i]
            actions.append(u.tanh())
            logprobs.append((normal.log_prob(u) - torch.log(1 - u.tanh() ** 2)).sum(1))
    standard = normal_distribution(0.0, 1.0)
    for i in range(samples):
        actions.append(2 * standard.cdf(noise[2 * samples + i]) - 1)
        logprobs.append(torch.full((BATCH,), math.log(0.25)))  # two components, each density 1/2
    return torch.stack(actions), torch.stack(logprobs)


@pytest.mark.parametrize("soft", [False, True])
def test_cql_by_parts(soft: bool) -> None:
    cql = make_cql(conservative_weight=0.7, num_action_samples=3, soft_backup=soft, ent_coef=0.3)
    move(cql.target.module)
    assert cql.noise_shape == (11, BATCH, 2)
    batch = make_batch(cql.noise_shape)
    with torch.no_grad():
        samples, logprobs = sampled_by_hand(cql, batch, 3)
        q = cql.model.critics(batch["obs"], batch["actions"])
        of_samples = torch.stack([cql.model.critics(batch["obs"], one) for one in samples], 1)
        gaps = torch.stack(
            [(torch.logsumexp(of_samples[i] - logprobs, 0) - q[i]).mean() for i in range(2)]
        )
        params = cql.model.actor.net(batch["next_obs"])
        if soft:
            head: Any = cql.model.actor.head
            action, logprob = head.sample_logprob(params, batch["noise"][0])
            following = cql.target.module(batch["next_obs"], action).min(0).values - 0.3 * logprob
        else:
            mode = params[:, :2].tanh()
            following = cql.target.module(batch["next_obs"], mode).min(0).values
        targets = batch["rewards"] + batch["discounts"] * following
        td = ((q - targets) ** 2).mean(1).sum()
    found = cql.critic_loss(batch)
    assert number(found["conservative_loss"]) == pytest.approx(float(gaps.mean()), rel=1e-5)
    assert number(found["td_loss"]) == pytest.approx(float(td), rel=1e-5)
    expected = float(td) + 0.7 * float(gaps.sum())
    assert number(found["loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_default_weight_depends_on_the_actions() -> None:
    assert make_cql().conservative_weight == 5.0
    assert make_discrete_cql().conservative_weight == 1.0


def test_the_conservative_loss_with_a_threshold() -> None:
    cql = make_cql(conservative_weight=2.0, conservative_threshold=1.0)
    assert cql.learnt_weight is not None
    with torch.no_grad():
        cql.learnt_weight.logarithm.fill_(math.log(3))
    gaps = torch.tensor([4.0, 0.5], requires_grad=True)
    loss, metrics = cql._weighted(gaps)
    # excess 2 (3 - 0.5) = 5, factor 3; gradient of a gap: 3 x 2; of the logarithm: -3 x 5.
    assert number(metrics["learnt_weight"]) == pytest.approx(3.0)
    of_gaps, of_weight = torch.autograd.grad(loss, (gaps, cql.learnt_weight.logarithm))
    assert of_gaps.tolist() == pytest.approx([6.0, 6.0])
    assert float(of_weight) == pytest.approx(-15.0)


@pytest.mark.parametrize(("threshold", "rises"), [(-1000.0, True), (1000.0, False)])
def test_the_learnt_weight_rises_above_the_threshold(threshold: float, rises: bool) -> None:
    cql = make_cql(conservative_threshold=threshold)
    before = [p.detach().clone() for p in cql.target.module.parameters()]
    cql.update(make_batch(cql.noise_shape))
    assert cql.learnt_weight is not None
    assert (number(cql.learnt_weight()) > 1) is rises
    # The target critics follow the critics, not the weight that is stored beside them.
    after = list(cql.target.module.parameters())
    critics = list(cql.model.critics.parameters())
    for old, new, now in zip(before, after, critics, strict=True):
        torch.testing.assert_close(new.detach(), old + 0.005 * (now.detach() - old))


def test_discrete_cql_by_parts() -> None:
    cql, batch = make_discrete_cql(conservative_weight=0.4), plain_batch(discrete=True)
    move(cql.target.module)
    with torch.no_grad():
        values, following = cql.model.q_values(batch["obs"]), cql.model.q_values(batch["next_obs"])
        of_target = cql.target.module.q_values(batch["next_obs"])
    td, gap = 0.0, 0.0
    for i in range(BATCH):
        best = int(following[i].argmax())  # by the network, valued by the target
        target = float(batch["rewards"][i]) + float(batch["discounts"][i] * of_target[i, best])
        chosen = float(values[i, int(batch["actions"][i])])
        error = abs(target - chosen)
        td += (error**2 / 2 if error < 1 else error - 0.5) / BATCH
        gap += (math.log(sum(math.exp(float(v)) for v in values[i])) - chosen) / BATCH
    found = cql.loss(batch)
    assert number(found["td_loss"]) == pytest.approx(td, rel=1e-5)
    assert number(found["conservative_loss"]) == pytest.approx(gap, rel=1e-5)
    assert number(found["loss"]) == pytest.approx(td + 0.4 * gap, rel=1e-5)
    matches = (values.argmax(1) == batch["actions"]).float().mean()
    assert number(found["action_match"]) == pytest.approx(float(matches))


@pytest.mark.parametrize("make", [make_iql, make_awac])
def test_the_target_critics_move_every_update(make: Callable[..., Any]) -> None:
    learner = make(tau=0.25)
    for _ in range(2):
        before = copy.deepcopy(learner.target.module)
        learner.update(make_batch(learner.noise_shape or (1,)))
        pairs = zip(
            before.parameters(),
            learner.target.module.parameters(),
            learner.model.critics.parameters(),
            strict=True,
        )
        for old, new, now in pairs:
            torch.testing.assert_close(new.detach(), 0.75 * old.detach() + 0.25 * now.detach())


def test_bad_settings_are_refused() -> None:
    bad: list[tuple[type[Any], str, float]] = [
        (BCConfig, "top_fraction", 0.0),
        (BCConfig, "top_fraction", 1.5),
        (TD3BCConfig, "alpha", -1.0),
        (ReBRACConfig, "actor_penalty", -0.1),
        (ReBRACConfig, "critic_penalty", math.inf),
        (IQLConfig, "expectile", 1.0),
        (IQLConfig, "inverse_temperature", 0.0),
        (IQLConfig, "max_weight", math.inf),
        (AWACConfig, "temperature", 0.0),
        (CQLConfig, "num_action_samples", 0),
        (CQLConfig, "conservative_weight", -1.0),
        (CQLConfig, "conservative_threshold", math.inf),
        (CQLConfig, "actor_learning_rate", 0.0),
    ]
    for config, name, value in bad:
        with pytest.raises(ConfigError, match=rf"algo_kwargs\.{name}"):
            config(**{name: value})


# -- learning rates --------------------------------------------------------------------------------


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def largest_move(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max())


@pytest.mark.parametrize("name", WITH_ACTOR)
def test_the_policy_has_a_learning_rate_of_its_own(name: str) -> None:
    learner = WITH_ACTOR[name](learning_rate=0.01, actor_learning_rate=0.0025)
    batch = make_batch(learner.noise_shape or (1,))
    batch |= {"next_actions": batch["actions"], "next_recorded": torch.ones(BATCH)}
    actor, critics = learner.model.actor, learner.model.critics
    before = flat(actor), flat(critics)
    learner.update(batch, delayed=True)
    # The first step of Adam changes every parameter with a gradient by its learning rate.
    assert largest_move(before[0], flat(actor)) == pytest.approx(0.0025, rel=1e-3)
    assert largest_move(before[1], flat(critics)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", WITH_ACTOR)
def test_both_rates_have_the_same_schedule(name: str) -> None:
    learner = WITH_ACTOR[name](learning_rate=0.01, actor_learning_rate=0.0025, lr_schedule="linear")
    data = replay()
    data._next_actions = True
    for done, share in ((0, 1.0), (500, 0.5), (750, 0.25)):
        learner.learn(data, Progress(done, 1000))
        assert learner.critic_step.learning_rate == pytest.approx(0.01 * share)
        assert learner.actor_step.learning_rate == pytest.approx(0.0025 * share)


@pytest.mark.parametrize("name", WITH_ACTOR)
def test_one_rate_where_the_policys_is_unset(name: str) -> None:
    learner = WITH_ACTOR[name](learning_rate=0.01, actor_learning_rate=None)
    assert learner.actor_step.learning_rate == learner.critic_step.learning_rate == 0.01


# -- the Gaussian head of IQL and AWAC -------------------------------------------------------------


def head_and_params(shape: tuple[int, ...]) -> tuple[TanhGaussianHead, Tensor]:
    head = TanhGaussianHead(shape, -1.0)
    with torch.no_grad():
        head.log_std.copy_(torch.linspace(-2, 1, head.param_size))
    return head, torch.randn(5, head.param_size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_log_probabilities_are_those_of_a_normal(shape: tuple[int, ...]) -> None:
    head, params = head_and_params(shape)
    actions = (2 * torch.rand(5, *shape) - 1).round(decimals=1)
    normal = normal_distribution(params.tanh(), head.log_std.exp())
    expected = normal.log_prob(actions.reshape(5, -1)).sum(1)
    torch.testing.assert_close(head.logprob(params, actions, None), expected)


def test_log_probabilities_by_hand() -> None:
    head = TanhGaussianHead((1,), 0.0)
    found = head.logprob(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]]), None)
    constant = -0.5 * math.log(2 * math.pi)
    assert found.tolist() == pytest.approx([constant, constant - 0.5])


def test_recorded_actions_at_the_bounds_have_finite_gradients() -> None:
    head = TanhGaussianHead((2,), -1.0)
    params = torch.tensor([[50.0, -50.0]], requires_grad=True)
    logprob = head.logprob(params, torch.tensor([[1.0, 1.0]]), None).sum()
    of_params, of_log_std = torch.autograd.grad(logprob, (params, head.log_std))
    assert bool(torch.isfinite(of_params).all())
    # d/d log_std = z^2 - 1, with z = 0 and z = 2 e
    assert of_log_std.tolist() == pytest.approx([-1.0, (2 * math.e) ** 2 - 1])


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_samples_are_a_clipped_gaussian_around_the_mode(shape: tuple[int, ...]) -> None:
    head, params = head_and_params(shape)
    noise = torch.randn(5, *shape, generator=torch.Generator().manual_seed(4))
    mode = params.tanh().reshape(5, *shape)
    torch.testing.assert_close(head.mode(params, None), mode)
    expected = (mode + head.log_std.exp().reshape(shape) * noise).clamp(-1, 1)
    found = head.sample(params, noise, None)
    torch.testing.assert_close(found, expected)
    assert bool((found.abs() == 1).any())
    assert bool((found.abs() < 1).any())


@pytest.mark.parametrize(("log_std", "used"), [(-9.0, -5.0), (7.0, 2.0), (0.5, 0.5)])
def test_the_deviation_is_bounded(log_std: float, used: float) -> None:
    head, same = TanhGaussianHead((1,), log_std), TanhGaussianHead((1,), used)
    params, noise = torch.zeros(1, 1), torch.full((1, 1), 0.1)
    assert torch.equal(head.sample(params, noise, None), same.sample(params, noise, None))
    action = torch.full((1, 1), 0.01)
    assert torch.equal(head.logprob(params, action, None), same.logprob(params, action, None))
    choose = head.numpy_choice()
    assert choose is not None
    found = choose(params.numpy(), noise.numpy())
    assert float(found[0, 0]) == pytest.approx(min(1.0, 0.1 * math.exp(used)))


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_numpy_chooses_the_same_actions(shape: tuple[int, ...]) -> None:
    head, params = head_and_params(shape)
    choose = head.numpy_choice()
    assert choose is not None
    noise = torch.randn(5, *shape, generator=torch.Generator().manual_seed(4))
    for _ in range(2):
        sampled = head.sample(params, noise, None).detach().numpy()
        np.testing.assert_allclose(choose(params.numpy(), noise.numpy()), sampled, atol=1e-6)
        np.testing.assert_allclose(
            choose(params.numpy(), None), head.mode(params, None).numpy(), atol=1e-6
        )
        with torch.no_grad():  # the deviation is learnt: NumPy reads the current one
            head.log_std.sub_(0.7)


# -- critics ---------------------------------------------------------------------------------------


def test_layer_normalisation_of_an_ensemble() -> None:
    norm = EnsembleLayerNorm(3, 6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    x = 3 + 2 * torch.randn(3, 5, 6)
    for members in (1, 2, 3):
        found = norm(x[:members])
        for i in range(members):
            single = nn.LayerNorm(6)
            single.load_state_dict({"weight": norm.weight[i, 0], "bias": norm.bias[i, 0]})
            torch.testing.assert_close(found[i], single(x[i]))


def test_critics_with_layer_normalisation() -> None:
    critics = MLPCritics(OBS, 2, num_critics=2, layer_norm=True, **SHAPE)
    assert critics.net.norms is not None
    with torch.no_grad():
        for parameter in critics.net.norms.parameters():
            parameter.add_(torch.rand_like(parameter))
    obs, actions = 5 * torch.randn(7, 3), torch.rand(7, 2)
    found = critics(obs, actions)
    first = critics(obs, actions, members=1)
    for i in range(2):
        x = torch.cat([obs, actions], 1)
        for layer in range(3):
            x = x @ critics.net.weights[layer][i] + critics.net.biases[layer][i]
            if layer < 2:  # before the activation, and not after the last layer
                norm: Any = critics.net.norms[layer]
                x = nn.functional.layer_norm(x, (16,), norm.weight[i, 0], norm.bias[i, 0]).relu()
        torch.testing.assert_close(found[i], x[:, 0])
    torch.testing.assert_close(first[0], found[0])


def test_without_layer_normalisation_critics_have_the_same_parameters_as_before() -> None:
    names = set(MLPCritics(OBS, 2, num_critics=2, **SHAPE).state_dict())
    assert names == {f"net.{kind}.{i}" for kind in ("weights", "biases") for i in range(3)}


def test_critics_of_discrete_actions() -> None:
    critics = MLPCritics(OBS, 1, num_critics=3, num_actions=4, **SHAPE)
    obs, actions = torch.randn(6, 3), torch.tensor([0, 3, 1, 2, 2, 0])
    with torch.no_grad():
        every = critics.net(obs)
    assert every.shape == (3, 6, 4)
    for members in (None, 1, 2):
        found = critics(obs, actions, members).detach()
        assert found.shape == (members or 3, 6)
        for critic in range(len(found)):
            for row, action in enumerate(actions.tolist()):
                assert float(found[critic, row]) == pytest.approx(float(every[critic, row, action]))


def test_critics_of_nested_observations() -> None:
    spec = ObsSpec({"a": ArraySpec((2,), "float32"), "b": ArraySpec((1,), "float32")})
    critics = MLPCritics(spec, 2, num_critics=2, **SHAPE)
    flat_critics = MLPCritics(OBS, 2, num_critics=2, **SHAPE)
    flat_critics.load_state_dict(critics.state_dict())
    rows, actions = torch.randn(4, 3), torch.rand(4, 2)
    found = critics({"a": rows[:, :2], "b": rows[:, 2:]}, actions)
    torch.testing.assert_close(found, flat_critics(rows, actions))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("rows_in_cache", [1, 64, 10**6])
def test_values_of_many_actions_equal_those_of_each(
    layer_norm: bool, rows_in_cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated in pieces, network by network, or at once: values and gradients are the same."""
    from rl_training.models import mlp_continuous

    monkeypatch.setattr(mlp_continuous, "_ROWS_IN_CACHE", rows_in_cache)
    torch.manual_seed(3)
    net = mlp_continuous.EnsembleMLP(3, (7, 16, 16, 1), "relu", layer_norm).double()
    if net.norms is not None:
        for parameter in net.norms.parameters():
            parameter.data += torch.randn_like(parameter)
    x, others = torch.randn(8, 5).double(), torch.randn(11, 8, 2).double()
    beside = torch.cat([x.expand(11, 8, 5), others], 2)
    expected = net(beside.flatten(0, 1)).view(3, 11, 8)
    parameters = list(net.parameters())
    for found in (net.of_pairs(x, others), net._pairs(x, others, slice(None))):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        weights = torch.arange(found.numel()).view_as(found) / 100
        wanted = torch.autograd.grad((expected * weights).sum(), parameters, retain_graph=True)
        gradients = torch.autograd.grad((found * weights).sum(), parameters)
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
