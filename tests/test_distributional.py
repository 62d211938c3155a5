"""QR-DQN, C51 and IQN: losses on numbers worked by hand and against other implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.c51 import C51, C51Config, cross_entropy, projected
from rl_training.algorithms.dqn import DQN, DQNConfig
from rl_training.algorithms.iqn import IQN, IQNConfig
from rl_training.algorithms.qrdqn import QRDQN, QRDQNConfig, quantile_huber_loss
from rl_training.algorithms.random_shift import random_shift
from rl_training.algorithms.update_noise import uniform_of
from rl_training.algorithms.vdn import VDNConfig
from rl_training.errors import ConfigError
from rl_training.models.custom import CustomQNetwork
from rl_training.models.encoders import EncoderConfig
from rl_training.models.iqn_network import IQNNetwork
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.noisy_mlp import NoisyMLP
from rl_training.models.user_class import UserClass
from rl_training.models.value_distributions import Atoms, Quantiles
from rl_training.runtime.actors import EpsilonGreedyActor
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress

OBS = ObsSpec({"": ArraySpec((2,), "float32")})
ACTION = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))
SIZES: dict[str, Any] = {"hidden_sizes": (8,), "activation": "relu"}
KINDS = ("qrdqn", "c51", "iqn")


def network(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    if kind == "iqn":
        own = {"num_policy_quantiles": 5, "embedding_size": 4}
        return IQNNetwork(OBS, ACTION, **own, **SIZES, **settings)
    distribution = Quantiles(4) if kind == "qrdqn" else Atoms(-2.0, 2.0, 5)
    return MLPQNetwork(OBS, ACTION, distribution=distribution, **SIZES, **settings)


def learner(kind: str, **knobs: Any) -> Any:
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qrdqn": (QRDQNConfig, QRDQN, {"num_quantiles": 4}),
        "c51": (C51Config, C51, {"v_min": -2.0, "v_max": 2.0, "num_atoms": 5}),
        "iqn": (IQNConfig, IQN, {"num_quantiles": 3, "num_target_quantiles": 6}),
    }
    config, cls, own = kinds[kind]
    settings = config(hidden_sizes=(8,), batch_size=2, **own, **knobs)
    model = network(kind, dueling=settings.dueling, noisy=settings.noisy)
    made: Any = cls(model, settings)
    with torch.no_grad():
        for parameter in made.target.module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return made


def batch_for(made: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "obs": torch.randn(2, 2, generator=generator),
        "next_obs": torch.randn(2, 2, generator=generator),
        "actions": torch.tensor([0, 2]),
        "weights": torch.tensor([1.0, 0.5]),
        "rewards": torch.tensor([0.5, -1.0]),
        "discounts": torch.tensor([0.9, 0.0]),
    }
    if made.noise_shape is not None:
        batch["noise"] = torch.randn(made.noise_shape, generator=generator)
    return batch


# -- losses ----------------------------------------------------------------------------------------


def test_quantile_huber_loss_by_hand() -> None:
    quantiles, targets = torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 2.0]])
    loss = quantile_huber_loss(quantiles, targets, torch.tensor([0.25, 0.75]))
    # 0 has errors of 0.5 and 2, with weight 0.25 and Huber losses of 0.125 and 1.5; 3 has errors of
    # -2.5 and -1, with weight 0.25 as well and Huber losses of 2 and 0.5.
    assert loss.tolist() == pytest.approx([0.203125 + 0.3125])


def test_quantile_huber_loss_equals_that_of_sb3_contrib() -> None:
    """The sum over own quantiles and the mean over targets; values and gradients."""
    theirs = pytest.importorskip("sb3_contrib.common.utils").quantile_huber_loss
    generator = torch.Generator().manual_seed(0)
    targets = 2 * torch.randn(6, 7, generator=generator)
    fractions = (torch.arange(5) + 0.5) / 5
    found: list[Any] = []
    expected: list[Any] = []
    for results, loss in (
        (found, lambda q: quantile_huber_loss(q, targets, fractions).mean()),
        (expected, lambda q: theirs(q, targets, sum_over_quantiles=True)),
    ):
        quantiles = torch.linspace(-3, 3, 30).view(6, 5).requires_grad_()
        value = loss(quantiles)
        value.backward()
        results += [value.detach(), quantiles.grad]
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other)


def test_quantiles_that_minimise_the_loss_are_those_of_the_target() -> None:
    """Of returns 0 ... 99, with errors much larger than the Huber loss's square part."""
    targets = torch.arange(100.0).expand(1, -1)
    quantiles = torch.zeros(1, 4, requires_grad=True)
    fractions = (torch.arange(4) + 0.5) / 4
    optimizer = torch.optim.Adam([quantiles], lr=0.5)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber_loss(quantiles, targets, fractions).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert quantiles[0].tolist() == pytest.approx([12, 37, 62, 87], abs=1.5)


def numpy_projection(
    probabilities: np.ndarray[Any, Any], returns: np.ndarray[Any, Any], low: float, high: float
) -> np.ndarray[Any, Any]:
    """Algorithm 1 of the paper, one number at a time; an exact hit keeps its probability."""
    rows, atoms = probabilities.shape
    result = np.zeros((rows, atoms))
    for row in range(rows):
        for p, g in zip(probabilities[row], returns[row], strict=True):
            place = (min(max(g, low), high) - low) / (high - low) * (atoms - 1)
            below, above = int(np.floor(place)), int(np.ceil(place))
            if below == above:
                result[row, below] += p
            else:
                result[row, below] += p * (above - place)
                result[row, above] += p * (place - below)
    return result


def test_projection_by_hand() -> None:
    support = torch.tensor([-1.0, 0.0, 1.0])
    likely = torch.tensor([[0.2, 0.3, 0.5]])
    # -1 is hit exactly, 0.25 is shared between 0 and 1, and 7 counts as 1.
    moved = projected(likely, torch.tensor([[-1.0, 0.25, 7.0]]), support)
    assert moved[0].tolist() == pytest.approx([0.2, 0.225, 0.575])


def test_projection_equals_the_papers_and_loses_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    support = torch.linspace(-10, 10, 51, dtype=torch.float64)
    likely = torch.softmax(torch.randn(6, 51, generator=generator, dtype=torch.float64), -1)
    rewards = torch.tensor([0.0, 0.4, 1.0, -3.3, 30.0, -0.017], dtype=torch.float64)
    discounts = torch.tensor([1.0, 1.0, 0.0, 0.99, 0.5, 0.9], dtype=torch.float64)
    returns = rewards[:, None] + discounts[:, None] * support
    found = projected(likely, returns, support)
    expected = numpy_projection(likely.numpy(), returns.numpy(), -10, 10)
    torch.testing.assert_close(found, torch.from_numpy(expected))
    torch.testing.assert_close(found.sum(-1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(found[0], likely[0])  # every atom is hit exactly


def test_cross_entropy_by_hand() -> None:
    loss = cross_entropy(torch.tensor([[0.0, np.log(3.0)]]), torch.tensor([[0.5, 0.5]]))
    assert loss.tolist() == pytest.approx([-0.5 * np.log(0.25) - 0.5 * np.log(0.75)])


# -- learners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_of_a_batch_by_hand(kind: str, double: bool) -> None:
    """The target's action is best by the mean of Q_target, or with ``double`` of Q."""
    made = learner(kind, double=double)
    batch = batch_for(made)
    target, support = made.target.module, torch.linspace(-2, 2, 5)
    fractions: dict[str, Tensor] = {}
    if kind == "iqn":
        first, second = torch.split(uniform_of(batch["noise"]), [6, 12])
        fractions = {"online": first.view(2, 3), "target": second.view(2, 6)}

    def numbers(model: Any, obs: Tensor, name: str) -> Tensor:
        if kind == "iqn":
            quantiles: Tensor = model.quantiles(obs, fractions[name])[0]
            return quantiles
        outputs: Tensor = model.outputs(obs)[0]
        return outputs

    chooser = made.module if double else target
    best = chooser.q_values(batch["next_obs"]).argmax(-1)
    expected = []
    for row in range(2):
        now = numbers(made.module, batch["obs"], "online")[row, batch["actions"][row]].detach()
        after = numbers(target, batch["next_obs"], "target")[row, best[row]].detach()
        reward, discount = batch["rewards"][row], batch["discounts"][row]
        if kind == "c51":
            moved = numpy_projection(
                torch.softmax(after, -1)[None].numpy(),
                (reward + discount * support)[None].numpy(),
                -2,
                2,
            )[0]
            expected.append(float(-(moved * torch.log_softmax(now, -1).numpy()).sum()))
            continue
        t = fractions["online"][row] if kind == "iqn" else (torch.arange(4) + 0.5) / 4
        total = 0.0
        for i in range(len(now)):
            errors = [float(reward + discount * y - now[i]) for y in after]
            huber = [e * e / 2 if abs(e) < 1 else abs(e) - 0.5 for e in errors]
            weight = [float(1 - t[i] if e < 0 else t[i]) for e in errors]
            total += float(np.mean(np.multiply(weight, huber)))
        expected.append(total)
    found = made.loss(batch)
    assert found["td_errors"].tolist() == pytest.approx(expected, rel=1e-5)
    assert found["loss"].item() == pytest.approx((expected[0] + 0.5 * expected[1]) / 2, rel=1e-5)


@pytest.mark.parametrize("switches", [{}, {"dueling": True}, {"noisy": True, "dueling": True}])
@pytest.mark.parametrize("kind", [*KINDS, "dqn"])
def test_networks_act_alike_in_numpy_and_torch(kind: str, switches: dict[str, Any]) -> None:
    model = MLPQNetwork(OBS, ACTION, **SIZES, **switches) if kind == "dqn" else None
    model = model or network(kind, **switches)
    obs = torch.randn(64, 2, generator=torch.Generator().manual_seed(3))
    noises: list[Any] = [None]
    if switches.get("noisy"):
        generator = torch.Generator().manual_seed(4)
        noises += [torch.randn(64, model.noise_size, generator=generator)]
    act: Any = model.numpy_actor()
    actions = []
    for noise in noises:
        values = model.policy(obs, noise)[0]
        chosen = act(obs.numpy(), None if noise is None else noise.numpy())
        assert chosen.tolist() == values.argmax(-1).tolist()
        actions.append(chosen.tolist())
    if len(actions) == 2:
        assert actions[0] != actions[1]


def test_values_of_iqn_are_means_at_fixed_fractions() -> None:
    model = network("iqn", dueling=True, noisy=True)
    obs, noise = torch.randn(2, 2), torch.randn(2, model.noise_size)
    middles = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).expand(2, 5)
    quantiles, values = model.quantiles(obs, middles, noise)
    torch.testing.assert_close(quantiles.mean(-1), values)
    torch.testing.assert_close(model.q_values(obs, noise), values)
    alone = model.quantiles(obs[1:], middles[1:], noise[1:])[0]  # each row has its own noise
    torch.testing.assert_close(alone, quantiles[1:])


def test_dueling_adds_state_value_and_centred_advantages_of_each_number() -> None:
    model = network("c51", dueling=True)
    obs = torch.randn(2, 2)
    advantages = model.advantage(obs).view(2, 3, 5)
    expected = model.state_value(obs)[:, None] + advantages - advantages.mean(1, keepdim=True)
    torch.testing.assert_close(model.outputs(obs)[0], expected)
    values = (torch.softmax(expected, -1) * torch.linspace(-2, 2, 5)).sum(-1)
    torch.testing.assert_close(model.q_values(obs), values)


# -- noise -----------------------------------------------------------------------------------------


def test_noisy_layers_equal_noise_in_the_weights() -> None:
    torch.manual_seed(0)
    net = NoisyMLP((3, 4, 2), "tanh")
    assert net.noise_size == 3 + 4 + 4 + 2
    x, noise = torch.randn(5, 3), torch.randn(13)
    scaled = noise.sign() * noise.abs().sqrt()
    parts = torch.split(scaled, [3, 4, 4, 2])
    expected: Any = x
    layers: Any = zip(net.layers, net.scales, strict=True)
    for i, (mean, scale) in enumerate(layers):
        assert scale.weight.unique().tolist() == pytest.approx([0.5 / mean.in_features**0.5])
        inner, outer = parts[2 * i : 2 * i + 2]
        weight = mean.weight + scale.weight * torch.outer(outer, inner)
        expected = expected @ weight.T + mean.bias + scale.bias * outer
        expected = torch.tanh(expected) if i == 0 else expected
    torch.testing.assert_close(net(x, noise), expected)
    torch.testing.assert_close(net(x, noise.expand(5, -1)), expected)
    assert not torch.allclose(net(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_each_network_of_an_update_has_noise_of_its_own(kind: str) -> None:
    made = learner(kind, double=True, noisy=True, dueling=True)
    batch = batch_for(made)
    with torch.no_grad():  # so that every part of the noise can change which action is best
        for model in (made.module, made.target.module):
            for name, parameter in model.named_parameters():
                if "scales" in name:
                    parameter.fill_(2.0)
    losses = [made.loss(batch)["loss"].item()]
    for name in ("online", "target", "chooser"):
        for seed in range(20):
            changed = {**batch, "noise": batch["noise"].clone()}
            torch.manual_seed(seed)
            part = made.noise.of(changed)[name]
            part.copy_(torch.randn_like(part))
            losses.append(made.loss(changed)["loss"].item())
            if losses[-1] != losses[0]:
                break
        assert losses[-1] != losses[0], name
    assert made.loss(batch)["loss"].item() == losses[0]


# -- random shifts ---------------------------------------------------------------------------------


def test_shifted_images_are_windows_of_the_padded_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (40, 3, 6, 7), generator=generator, dtype=torch.uint8)
    normal = torch.randn(40, 2, generator=generator)
    shifted = random_shift(images, normal, 2)
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="replicate")
    edges = torch.floor(torch.special.ndtr(normal) * 5).int()
    assert {tuple(edge) for edge in edges[:, 0:1].tolist()} == {(i,) for i in range(5)}
    for row, (top, left) in enumerate(edges.tolist()):
        window = padded[row, :, top : top + 6, left : left + 7]
        assert torch.equal(shifted[row].float(), window), row
    assert shifted.dtype == torch.uint8
    far = random_shift(images, torch.full((40, 2), 9.0), 2)  # the probability rounds to 1
    assert torch.equal(far[:, :, :-2, :-2], images[:, :, 2:, 2:])


def test_shifts_need_images() -> None:
    with pytest.raises(ConfigError, match=r"random_shift.*have none"):
        learner("c51", random_shift=4)


@pytest.mark.parametrize("double", [False, True])
def test_updates_learn_from_shifted_images_alone(double: bool) -> None:
    """Those before and after a transition move independently; vectors and masks stay."""
    leaves = {"camera": ArraySpec((2, 36, 36), "uint8"), "x": ArraySpec((3,), "float32")}
    torch.manual_seed(0)
    encoder = EncoderConfig(feature_size=8)
    model = MLPQNetwork(ObsSpec(leaves), ACTION, **SIZES, encoder=encoder)
    config = DQNConfig(batch_size=2, double=double, random_shift=3)
    shifting, plain = DQN(model, config), DQN(model, dataclasses.replace(config, random_shift=0))
    batch = batch_for(shifting)
    assert plain.noise_shape is None
    before, after = batch["noise"].view(2, 2, 2)
    moved = dict(batch)
    for name, normal in (("obs", before), ("next_obs", after)):
        images = torch.randint(0, 255, (2, 2, 36, 36), dtype=torch.uint8)
        vectors = torch.randn(2, 3)
        batch[name] = {"camera": images, "x": vectors}
        moved[name] = {"camera": random_shift(images, normal, 3), "x": vectors}
    found, expected, unmoved = shifting.loss(batch), plain.loss(moved), plain.loss(batch)
    assert torch.equal(found["td_errors"], expected["td_errors"])
    assert not torch.equal(found["td_errors"], unmoved["td_errors"])


def test_noise_explores_in_place_of_epsilon_and_not_in_evaluation() -> None:
    config = C51Config(noisy=True, learning_starts=10)
    assert [config.exploration(Progress(step, 100)) for step in (9, 10, 99)] == [1.0, 0.0, 0.0]
    model = network("c51", noisy=True, dueling=True)
    obs = torch.randn(200, 2).numpy()
    cpu = torch.device("cpu")

    def actions(seed: int, *, perturbed: bool) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        actor = EpsilonGreedyActor(model, lambda _: 0.0, generator, cpu, perturbed=perturbed)
        return [actor.act(obs, Progress(0, 1))[0].tolist() for _ in range(2)]

    greedy = model.q_values(torch.from_numpy(obs)).argmax(-1).tolist()
    assert actions(0, perturbed=False) == [greedy, greedy]
    first, second = actions(0, perturbed=True)
    assert first != second  # every step has noise of its own
    assert [first, second] == actions(0, perturbed=True)
    assert first not in (greedy, actions(1, perturbed=True)[0])
    rows = EpsilonGreedyActor(model, lambda _: 0.0, torch.Generator(), cpu)
    same_obs = np.repeat(obs[:1], 400, 0)
    assert len({*rows.act(same_obs, Progress(0, 1))[0].tolist()}) > 1  # and so has every row


# -- what else is supported ------------------------------------------------------------------------


class OwnNetwork(torch.nn.Module):
    """A network of the user's own."""

    def __init__(self, obs_spec: ObsSpec, num_outputs: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(obs_spec.leaves[""].size, num_outputs)

    def forward(self, obs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(obs)
        return outputs


def test_a_network_of_the_users_own_computes_the_numbers_of_each_action_in_turn() -> None:
    own = UserClass(OwnNetwork, {}, "algo_kwargs.network")
    model = CustomQNetwork(OBS, ACTION, own, distribution=Quantiles(4))
    obs = torch.randn(5, 2)
    expected = model.network(obs).view(5, 3, 4)
    torch.testing.assert_close(model.returns(obs)[0], expected)
    torch.testing.assert_close(model.q_values(obs), expected.mean(-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IQNConfig(network="module:Class"), "network.*take an 'encoder' instead"),
        (lambda: C51Config(network="module:Class", noisy=True), "noisy.*has no effect"),
        (lambda: VDNConfig(noisy=True), "noisy.*idqn has it"),
        (lambda: VDNConfig(random_shift=4), "random_shift.*idqn has it"),
        (lambda: C51Config(v_min=1.0, v_max=1.0), "v_max.*above v_min"),
        (lambda: C51Config(num_atoms=1), "num_atoms.*at least 2"),
        (lambda: QRDQNConfig(num_quantiles=0), "num_quantiles.*at least 1"),
        (lambda: IQNConfig(num_target_quantiles=0), "num_target_quantiles.*at least 1"),
        (lambda: DQNConfig(random_shift=-1), "random_shift.*zero or more"),
    ],
)
def test_settings_without_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
