"""Discrete SAC's losses on numbers worked by hand and against torch.distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from rl_training.algorithms.sac import SACModel
from rl_training.algorithms.sac_discrete import (
    SACDiscrete,
    SACDiscreteConfig,
    discrete_sac_targets,
    entropies,
    soft_values,
)
from rl_training.errors import ConfigError
from rl_training.models.action_heads import CategoricalHead
from rl_training.models.mlp_continuous import ActorCritics, MLPActor, MLPCritics
from rl_training.runtime.actors import ExploringActor
from rl_training.types import ACTION_MASK, ArraySpec, ObsSpec, Progress

ROWS = 16
PLAIN = ObsSpec({"": ArraySpec((4,), "float32")})
MASKED = ObsSpec({"a": ArraySpec((4,), "float32"), ACTION_MASK: ArraySpec((3,), "bool")})
LEGAL = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])


def make(spec: ObsSpec = PLAIN, **knobs: Any) -> SACDiscrete:
    torch.manual_seed(0)
    config = SACDiscreteConfig(hidden_sizes=(16, 16), batch_size=ROWS, **knobs)
    shape: dict[str, Any] = {"hidden_sizes": (16, 16), "activation": "relu"}
    networks = ActorCritics(
        MLPActor(spec, CategoricalHead((3,), ()), **shape),
        MLPCritics(spec, 1, num_critics=2, num_actions=3, **shape),
    )
    return SACDiscrete(SACModel(networks, config), config)


def batch(*, masked: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def obs() -> Any:
        drawn = torch.randn(ROWS, 4, generator=generator)
        legal = LEGAL[torch.arange(ROWS) % 3]
        return {"a": drawn, ACTION_MASK: legal} if masked else drawn

    return {
        "obs": obs(),
        "next_obs": obs(),
        "actions": torch.ones(ROWS, dtype=torch.int64),
        "rewards": torch.randn(ROWS, generator=generator),
        "discounts": torch.full((ROWS,), 0.9),
    }


def logarithms(*rows: tuple[float, ...]) -> Tensor:
    """Logarithms of probabilities, with the least float for 0 as heads return it."""
    return torch.tensor(rows).log().clamp(min=torch.finfo(torch.float32).min)


# -- pure losses -----------------------------------------------------------------------------------


def test_values_by_hand() -> None:
    logprobs = logarithms((0.25, 0.75), (1.0, 0.0))
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert entropies(logprobs).tolist() == pytest.approx([entropy, 0.0])
    q = torch.tensor([[[4.0, 8.0], [3.0, 100.0]], [[5.0, 2.0], [7.0, -100.0]]])
    # 0.25 min(4, 5) + 0.75 min(8, 2); then min(3, 7) of the only action.
    found = soft_values(q, logprobs, ent_coef=torch.tensor(2.0))
    assert found.tolist() == pytest.approx([2.5 + 2 * entropy, 3.0])
    given = {
        "rewards": torch.tensor([1.0, 1.0]),
        "discounts": torch.tensor([0.5, 0.0]),
        "next_q": q,
        "next_logprobs": logprobs,
    }
    targets = discrete_sac_targets(given, ent_coef=torch.tensor(2.0))
    assert targets.tolist() == pytest.approx([1 + 0.5 * (2.5 + 2 * entropy), 1.0])


def test_illegal_actions_leave_gradients_finite() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    logprobs = CategoricalHead((3,), ()).distribution(logits, mask)
    q = torch.tensor([[1.0, 50.0, 3.0], [1.0, 2.0, 3.0]]).expand(2, 2, 3)
    value = soft_values(q, logprobs, ent_coef=torch.tensor(1e3))
    assert value.tolist() == pytest.approx([2 + 1e3 * math.log(2), 2.0])
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([-0.5, 0.0, 0.5])
    assert gradient[1].tolist() == [0.0, 0.0, 0.0]


# -- the learner -----------------------------------------------------------------------------------


def second_opinion(learner: SACDiscrete, data: dict[str, Any]) -> dict[str, Tensor]:
    """The losses of a batch, row by row with `Categorical` over the legal actions alone."""
    alpha = float(learner.model.temperature.log_ent_coef.detach().exp())
    terms: dict[str, list[Tensor]] = {"critic_loss": [], "actor_loss": [], "temperature": []}
    for row in range(ROWS):
        now, after = ({"a": data[k]["a"][row]} for k in ("obs", "next_obs"))
        legal, legal_next = (data[k][ACTION_MASK][row] for k in ("obs", "next_obs"))

        def of_row(network: Any, seen: Any, which: Tensor) -> Any:
            one = {"a": seen["a"][None], ACTION_MASK: which[None]}
            if network is learner.model.actor:
                return network.policy(one)[0][0][which]
            return network.of_all(one)[:, 0][:, which]

        with torch.no_grad():
            policy = Categorical(logits=of_row(learner.model.actor, after, legal_next))
            least = of_row(learner.target.module, after, legal_next).min(0).values
            following = (policy.probs * (least - alpha * policy.logits)).sum()
            target = data["rewards"][row] + data["discounts"][row] * following
            q = of_row(learner.model.critics, now, torch.ones(3, dtype=torch.bool))
            errors = q[:, data["actions"][row]] - target
            terms["critic_loss"].append(0.5 * errors.square().sum())
            policy = Categorical(logits=of_row(learner.model.actor, now, legal))
            least = of_row(learner.model.critics, now, legal).min(0).values
            terms["actor_loss"].append((policy.probs * (alpha * policy.logits - least)).sum())
            keep = 0.89 * math.log(int(legal.sum()))
            terms["temperature"].append(-(policy.probs * policy.logits).sum() - keep)
    return {name: torch.stack(rows).mean() for name, rows in terms.items()}


def test_losses_equal_a_second_implementation_with_masks() -> None:
    learner, data = make(MASKED, ent_coef_init=0.3), batch(masked=True)
    expected = second_opinion(learner, data)
    critic, actor = learner.critic_loss(data), learner.actor_loss(data)
    torch.testing.assert_close(critic["loss"], expected["critic_loss"])
    torch.testing.assert_close(actor["actor_loss"], expected["actor_loss"])
    temperature = actor["loss"] - actor["actor_loss"]
    # loss = log_ent_coef mean( H - target ), which raises the weight where the entropy is too low
    torch.testing.assert_close(temperature, math.log(0.3) * expected["temperature"])


def test_the_entropy_to_keep_is_given_or_that_of_legal_actions() -> None:
    assert make()._entropy_to_keep(None) == pytest.approx(0.89 * math.log(3))
    assert make(target_entropy_scale=0.5)._entropy_to_keep(None) == pytest.approx(0.5 * math.log(3))
    rows = make()._entropy_to_keep(LEGAL)
    assert isinstance(rows, Tensor)
    assert rows.tolist() == pytest.approx([0.89 * math.log(n) for n in (3, 2, 1)])
    assert make(target_entropy=0.1)._entropy_to_keep(LEGAL) == 0.1


@pytest.mark.parametrize(("scale", "sign"), [(0.05, -1), (1.0, 1)])
def test_the_temperature_moves_towards_the_entropy_to_keep(scale: float, sign: int) -> None:
    learner = make(target_entropy_scale=scale)
    last: Any = learner.model.actor.net.layers[-1]
    with torch.no_grad():  # neither uniform nor certain
        last.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    for _ in range(3):
        learner.update(batch())
    assert float(learner.model.temperature.log_ent_coef.detach()) * sign > 0


def test_an_update_draws_no_noise() -> None:
    assert make().noise_shape is None


def test_the_first_steps_take_every_legal_action_alike() -> None:
    model: Any = make(MASKED).model.actor
    generator = torch.Generator().manual_seed(2)
    actor = ExploringActor(model, 10, generator, torch.device("cpu"))
    rows = np.arange(6000) % 3
    obs = {"a": np.ones((6000, 4), np.float32), ACTION_MASK: LEGAL.numpy()[rows]}
    actions, _ = actor.act(obs, Progress(9, 100))
    for row, expected in enumerate(([1 / 3] * 3, [0.5, 0, 0.5], [0, 1, 0])):
        counts = np.bincount(actions[rows == row], minlength=3) / 2000
        assert counts == pytest.approx(expected, abs=0.04)
    with torch.no_grad():
        model.net.layers[-1].bias.copy_(torch.tensor([50.0, 0.0, 0.0]))
    actions, _ = actor.act(obs, Progress(10, 100))
    assert set(actions[rows == 0]) == {0}, "the policy's, from there on"


def test_a_scale_beside_a_given_entropy_is_refused() -> None:
    with pytest.raises(ConfigError, match="target_entropy_scale"):
        SACDiscreteConfig(target_entropy=0.3, target_entropy_scale=0.5)
