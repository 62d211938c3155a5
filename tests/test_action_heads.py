"""Action distributions, action specs and normalisers against independent computations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_training.algorithms.ppo import PPO, PPOConfig
from rl_training.envs.spaces import action_spec
from rl_training.models.action_heads import (
    BernoulliHead,
    CategoricalHead,
    GaussianHead,
    make_action_head,
)
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.normalizer import RewardNormalizer, RunningNorm
from rl_training.types import ActionSpec, Array, ArraySpec, ObsSpec, Rows

D: Any = torch.distributions
DRAWS = 200_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64) * scale


def draw(head: Any, params: Tensor, mask: Tensor | None = None, seed: int = 0) -> Tensor:
    """Many actions from one row of parameters."""
    noise = head.draw_noise((DRAWS,), generator(seed))
    sampled: Tensor = head.sample(params.expand(DRAWS, -1), noise, mask)
    return sampled


def assert_frequency(hits: Tensor, probability: float) -> None:
    """Within five standard errors: a right sampler fails about once in two million seeds."""
    error = 5 * math.sqrt(max(probability * (1 - probability), 1e-12) / DRAWS)
    assert hits.double().mean().item() == pytest.approx(probability, abs=error)


# Log-probabilities and entropies.


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_discrete_equals_torch_categorical(scale: float) -> None:
    head = CategoricalHead((5,), ())
    logits = normal(64, 5, scale=scale)
    actions = torch.randint(5, (64,), generator=generator())
    logprob, entropy = head.logprob_entropy(logits, actions, None)
    reference = D.Categorical(logits=logits)
    torch.testing.assert_close(logprob, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4)])
def test_multi_discrete_is_a_product_of_categoricals(shape: tuple[int, ...]) -> None:
    nvec = (2, 3, 4, 5)
    head = CategoricalHead(nvec, shape)
    logits = normal(32, 14)
    columns = [torch.randint(n, (32,), generator=generator(n)) for n in nvec]
    actions = torch.stack(columns, -1).reshape(32, *shape)
    logprob, entropy = head.logprob_entropy(logits, actions, None)
    parts = [D.Categorical(logits=part) for part in torch.split(logits, list(nvec), -1)]
    expected = sum(part.log_prob(column) for part, column in zip(parts, columns, strict=True))
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
def test_multi_binary_is_a_product_of_bernoullis(shape: tuple[int, ...]) -> None:
    head = BernoulliHead(shape)
    logits = normal(32, math.prod(shape), scale=3.0)
    actions = torch.randint(2, (32, *shape), generator=generator())
    logprob, entropy = head.logprob_entropy(logits, actions, None)
    reference = D.Independent(D.Bernoulli(logits=logits), 1)
    torch.testing.assert_close(logprob, reference.log_prob(actions.reshape(32, -1).double()))
    torch.testing.assert_close(entropy, reference.entropy())


def test_multi_binary_stays_finite_for_extreme_logits() -> None:
    logits = torch.tensor([[500.0, -500.0]])
    logprob, entropy = BernoulliHead((2,)).logprob_entropy(logits, torch.tensor([[1, 0]]), None)
    assert (logprob.item(), entropy.item()) == (0.0, 0.0)
    logprob, _ = BernoulliHead((2,)).logprob_entropy(logits, torch.tensor([[0, 0]]), None)
    assert logprob.item() == pytest.approx(-500.0)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("log_std", [-2.0, 0.0, 0.7])
def test_box_is_a_product_of_normals(shape: tuple[int, ...], log_std: float) -> None:
    head = GaussianHead(shape, log_std).double()
    size = math.prod(shape)
    with torch.no_grad():
        head.log_std.add_(normal(size, seed=3, scale=0.3))
    means, actions = normal(32, size), normal(32, *shape, seed=1)
    logprob, entropy = head.logprob_entropy(means, actions, None)
    reference = D.Independent(D.Normal(means, head.log_std.exp().expand(32, size)), 1)
    torch.testing.assert_close(logprob, reference.log_prob(actions.reshape(32, size)))
    torch.testing.assert_close(entropy, reference.entropy())


def test_each_kind_of_action_has_its_head() -> None:
    kinds = {
        ActionSpec("discrete", (), "int64", nvec=(3,)): (CategoricalHead, 3),
        ActionSpec("multi_discrete", (2,), "int64", nvec=(2, 4)): (CategoricalHead, 6),
        ActionSpec("box", (2, 2), "float32", low=(-1.0,) * 4, high=(1.0,) * 4): (GaussianHead, 4),
        ActionSpec("multi_binary", (2, 3), "int8"): (BernoulliHead, 6),
    }
    for spec, (kind, size) in kinds.items():
        head = make_action_head(spec, -0.5)
        assert isinstance(head, kind)
        assert head.param_size == size
        if isinstance(head, GaussianHead):
            assert head.log_std.tolist() == [-0.5] * 4


# Sampling.


def test_discrete_actions_come_as_often_as_their_probabilities_say() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0])
    actions = draw(CategoricalHead((4,), ()), logits)
    assert actions.shape == (DRAWS,)
    assert actions.dtype == torch.int64
    for action, probability in enumerate(torch.softmax(logits, -1).tolist()):
        assert_frequency(actions == action, probability)


def test_multi_discrete_components_are_right_and_independent() -> None:
    logits = torch.tensor([0.5, -0.5, 1.0, 0.0, -1.0])
    actions = draw(CategoricalHead((2, 3), (2,)), logits)
    assert actions.shape == (DRAWS, 2)
    first, second = torch.softmax(logits[:2], -1).tolist(), torch.softmax(logits[2:], -1).tolist()
    for i, j in itertools.product(range(2), range(3)):
        hits = (actions[:, 0] == i) & (actions[:, 1] == j)
        assert_frequency(hits, first[i] * second[j])


def test_multi_binary_coins_are_right_and_independent() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 0.3])
    actions = draw(BernoulliHead((2, 2)), logits)
    assert actions.shape == (DRAWS, 2, 2)
    assert set(actions.flatten().tolist()) == {0, 1}
    p = torch.sigmoid(logits).tolist()
    flat = actions.reshape(DRAWS, 4)
    for i in range(4):
        assert_frequency(flat[:, i] == 1, p[i])
    assert_frequency((flat[:, 0] == 1) & (flat[:, 1] == 1), p[0] * p[1])
    assert_frequency((flat[:, 2] == 1) & (flat[:, 3] == 0), p[2] * (1 - p[3]))


def test_box_actions_have_the_mean_and_deviation_asked_for() -> None:
    head = GaussianHead((2, 1), 0.0)
    with torch.no_grad():
        head.log_std.copy_(torch.tensor([-1.0, 0.5]))
        actions = draw(head, torch.tensor([3.0, -2.0]))
    assert actions.shape == (DRAWS, 2, 1)
    for i, (mean, deviation) in enumerate([(3.0, math.exp(-1.0)), (-2.0, math.exp(0.5))]):
        column = actions[:, i, 0].double()
        error = 5 * deviation / math.sqrt(DRAWS)
        assert column.mean().item() == pytest.approx(mean, abs=error)
        assert column.std().item() == pytest.approx(deviation, abs=error)
    correlation = torch.corrcoef(actions[:, :, 0].T)[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(DRAWS)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (CategoricalHead((4,), ()), (4,)),
        (CategoricalHead((2, 3), (2,)), (5,)),
        (GaussianHead((2, 2), 0.0), (2, 2)),
        (BernoulliHead((3,)), (3,)),
    ],
    ids=["discrete", "multi_discrete", "box", "multi_binary"],
)
def test_noise_is_finite_and_comes_from_the_generator_alone(
    head: Any, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    first = head.draw_noise((300, 7), generator(1))
    torch.manual_seed(99)
    assert first.shape == (300, 7, *shape)
    assert torch.isfinite(first).all()
    assert torch.equal(first, head.draw_noise((300, 7), generator(1)))
    assert not torch.equal(first, head.draw_noise((300, 7), generator(2)))


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
@pytest.mark.parametrize(
    "head", [CategoricalHead((2,), ()), BernoulliHead((2,))], ids=["discrete", "multi_binary"]
)
def test_noise_is_finite_at_the_ends_of_the_uniform_draw(
    head: Any, uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, uniform))
    assert torch.isfinite(head.draw_noise((3,), generator())).all()


@pytest.mark.parametrize(
    ("head", "params", "expected"),
    [
        (CategoricalHead((3,), ()), [1.0, 3.0, 2.0], 1),
        (CategoricalHead((2, 3), (2,)), [1.0, 3.0, 5.0, 0.0, 4.0], [1, 0]),
        (CategoricalHead((2, 3), (1, 2)), [1.0, 0.0, 5.0, 6.0, 4.0], [[0, 1]]),
        (GaussianHead((2, 1), 0.0), [0.25, -4.0], [[0.25], [-4.0]]),
        (BernoulliHead((3,)), [0.1, -0.1, 7.0], [1, 0, 1]),
    ],
)
def test_mode_is_the_most_likely_action(head: Any, params: list[float], expected: Any) -> None:
    assert head.mode(torch.tensor([params]), None).tolist() == [expected]


# Masks.

MASK = torch.tensor([True, False, True, False, True])


def test_a_masked_action_is_never_sampled_nor_the_mode_however_likely() -> None:
    head = CategoricalHead((5,), ())
    logits = torch.tensor([0.0, 1e6, -3.0, 50.0, 1.0])
    actions = draw(head, logits, MASK)
    assert set(actions.flatten().tolist()) == {0, 2, 4}
    legal = torch.softmax(logits[MASK], -1).tolist()
    for action, probability in zip((0, 2, 4), legal, strict=True):
        assert_frequency(actions == action, probability)
    assert head.mode(logits[None], MASK).tolist() == [4]


def test_each_row_has_its_own_mask() -> None:
    head = CategoricalHead((3,), ())
    masks = torch.tensor([[True, False, False], [False, True, False], [False, False, True]])
    logits = torch.zeros(3, 3)
    noise = head.draw_noise((3,), generator())
    assert head.sample(logits, noise, masks).tolist() == [0, 1, 2]
    assert head.mode(logits, masks).tolist() == [0, 1, 2]


def test_masked_actions_have_no_probability_and_add_no_entropy() -> None:
    head = CategoricalHead((5,), ())
    logits = normal(8, 5)
    every = torch.arange(5).expand(8, 5).reshape(-1)
    logprob, entropy = head.logprob_entropy(
        logits.repeat_interleave(5, 0), every, MASK.expand(40, 5)
    )
    probability = logprob.exp().reshape(8, 5)
    assert probability[:, ~MASK].eq(0).all()
    legal = D.Categorical(logits=logits[:, MASK])
    torch.testing.assert_close(probability[:, MASK], legal.probs)
    torch.testing.assert_close(entropy.reshape(8, 5)[:, 0], legal.entropy())


def test_a_single_legal_action_is_certain() -> None:
    head = CategoricalHead((3,), ())
    mask = torch.tensor([[False, True, False]])
    logprob, entropy = head.logprob_entropy(
        torch.tensor([[9.0, -9.0, 9.0]]), torch.tensor([1]), mask
    )
    assert (logprob.item(), entropy.item()) == (0.0, 0.0)


def test_masked_logits_get_no_gradient_and_the_others_a_finite_one() -> None:
    logits = normal(6, 5).requires_grad_()
    actions = torch.tensor([0, 2, 4, 0, 2, 4])
    logprob, entropy = CategoricalHead((5,), ()).logprob_entropy(logits, actions, MASK.expand(6, 5))
    (logprob + entropy).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:, ~MASK].eq(0).all()
    assert logits.grad[:, MASK].abs().min() > 0


def test_a_multi_discrete_mask_runs_over_the_components_in_order() -> None:
    head = CategoricalHead((2, 3), (2,))
    mask = torch.tensor([False, True, True, False, True])
    logits = torch.tensor([5.0, 0.0, 0.0, 9.0, 1.0])
    actions = draw(head, logits, mask)
    assert set(actions[:, 0].tolist()) == {1}
    assert set(actions[:, 1].tolist()) == {0, 2}
    assert_frequency(actions[:, 1] == 2, 1 / (1 + math.exp(-1.0)))
    assert head.mode(logits[None], mask).tolist() == [[1, 2]]
    logprob, entropy = head.logprob_entropy(logits[None], torch.tensor([[1, 2]]), mask[None])
    legal = D.Categorical(logits=torch.tensor([0.0, 1.0]))
    assert logprob.item() == pytest.approx(legal.log_prob(torch.tensor(1)).item())
    assert entropy.item() == pytest.approx(legal.entropy().item())


def test_a_model_splits_the_mask_off_the_observation() -> None:
    spec = ObsSpec({"x": ArraySpec((2,), "float32"), "action_mask": ArraySpec((3,), "bool")})
    model = MLPActorCritic(spec, ActionSpec("discrete", (), "int64", nvec=(3,)))
    mask = torch.tensor([[True, False, True], [False, True, True]])
    obs = {"x": torch.ones(2, 2), "action_mask": mask}
    params, found = model.policy(obs)
    assert found is mask
    said = model.evaluate({"obs": obs, "actions": torch.tensor([1, 0])})
    assert said.logprob.exp().tolist() == [0.0, 0.0]
    legal = D.Categorical(logits=params[0, [0, 2]])
    assert said.entropy[0].item() == pytest.approx(legal.entropy().item())
    said = model.evaluate({"obs": obs, "actions": torch.tensor([2, 2])})
    assert said.logprob[0].item() == pytest.approx(legal.log_prob(torch.tensor(1)).item())


# Policy actions to environment actions.

INF = float("inf")


def box(low: Any, high: Any, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(np.asarray(low, dtype), np.asarray(high, dtype), dtype=dtype)


def to_env(space: spaces.Space[Any], actions: Any, dtype: Any = np.float32) -> Array:
    converted = action_spec(space).to_env(np.asarray(actions, dtype))
    assert all(space.contains(action) for action in converted)
    return converted


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1.0, 1.0), (-20.0, 60.0), (0.0, 1.0), (-3e-6, 1e-6), (1e6, 1e6 + 64), (-2e38, 3e38)],
)
def test_finite_bounds_are_reached_at_one_and_never_passed(low: float, high: float) -> None:
    space = box([low], [high])
    low, high = float(space.low[0]), float(space.high[0])
    actions = to_env(space, [[-1.0], [0.0], [1.0], [-7.0], [7.0], [0.5], [1e30], [-1e30]])
    assert actions.dtype == np.float32
    width = high - low
    expected = [low, low + width / 2, high, low, high, low + 0.75 * width, high, low]
    for action, wanted in zip(actions[:, 0].tolist(), expected, strict=True):
        assert action == pytest.approx(wanted, rel=1e-6, abs=1e-6 * width)


def test_half_infinite_bounds_clip_on_one_side_without_scaling() -> None:
    actions = to_env(box([0.5, -INF], [INF, 3.0]), [[2.5, 2.5], [-9.0, 9.0], [1e9, -1e9]])
    assert actions.tolist() == [[2.5, 2.5], [0.5, 3.0], [1e9, -1e9]]


def test_infinite_bounds_leave_the_action_as_it_is() -> None:
    assert to_env(box([-INF], [INF]), [[123.5], [-0.25]]).tolist() == [[123.5], [-0.25]]


def test_components_have_bounds_of_their_own_whatever_the_shape() -> None:
    space = box([[-2.0, 0.0], [-INF, 10.0]], [[2.0, 1.0], [INF, 30.0]])
    assert to_env(space, np.ones((3, 2, 2))).tolist() == [[[2.0, 1.0], [1.0, 30.0]]] * 3
    assert to_env(space, np.full((1, 2, 2), -0.5)).tolist() == [[[-1.0, 0.25], [-0.5, 15.0]]]
    assert to_env(space, np.full((1, 2, 2), -5.0)).tolist() == [[[-2.0, 0.0], [-5.0, 10.0]]]


def test_double_precision_bounds_stay_double() -> None:
    space = box([-0.1], [0.3], np.float64)
    actions = to_env(space, [[1.0], [-1.0]])
    assert actions.dtype == np.float64
    assert actions[:, 0].tolist() == pytest.approx([0.3, -0.1], abs=1e-15)


@st.composite
def bounds(draw: st.DrawFn) -> tuple[float, float]:
    ordered = st.floats(width=32, allow_nan=False, allow_infinity=False)
    low, high = sorted((draw(ordered), draw(ordered)))
    return (
        draw(st.sampled_from([low, low, -INF])),
        draw(st.sampled_from([high, high, INF])),
    )


@settings(max_examples=200, deadline=None)
@given(bounds(), st.floats(width=32, allow_nan=False, allow_infinity=False))
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_every_action_is_within_the_space(limits: tuple[float, float], action: float) -> None:
    space = box([limits[0]], [limits[1]])
    converted = action_spec(space).to_env(np.array([[action]], np.float32))
    assert space.contains(converted[0])


def test_discrete_counts_from_its_start() -> None:
    space = spaces.Discrete(3, start=-1)
    assert to_env(space, [0, 1, 2], np.int64).tolist() == [-1, 0, 1]
    assert to_env(spaces.Discrete(3), [0, 1, 2], np.int64).tolist() == [0, 1, 2]


def test_multi_discrete_counts_from_its_starts() -> None:
    space = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 10], [-4, 1]]))
    last = to_env(space, [[[1, 2], [3, 4]]], np.int64)
    assert last.tolist() == [[[1, 12], [-1, 5]]]
    assert last.dtype == space.dtype


def test_multi_binary_takes_the_dtype_of_its_space() -> None:
    space = spaces.MultiBinary((2, 2))
    converted = to_env(space, [[[0, 1], [1, 0]]], np.int64)
    assert converted.dtype == space.dtype
    assert converted.tolist() == [[[0, 1], [1, 0]]]


# The NumPy path.

BOX = ActionSpec("box", (2, 1), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(4,))


def vector_model(action: ActionSpec, **kwargs: Any) -> MLPActorCritic:
    torch.manual_seed(0)
    model = MLPActorCritic(
        ObsSpec({"": ArraySpec((3,), "float32")}), action, hidden_sizes=(32, 32), **kwargs
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def assert_numpy_equals_torch(model: MLPActorCritic, spread: float = 1.0) -> Array:
    """Compare both paths, greedy and with noise; return the greedy actions."""
    by_numpy = model.numpy_actor()
    assert by_numpy is not None
    obs = np.random.default_rng(1).normal(scale=spread, size=(64, 3)).astype(np.float32)
    untouched = obs.copy()
    noise = model.head.draw_noise((64,), generator(2))
    with torch.no_grad():
        params, mask = model.policy(torch.from_numpy(obs))
        expected = model.head.mode(params, mask).numpy()
        sampled = model.head.sample(params, noise, mask).numpy()
    greedy = by_numpy(obs, None).copy()
    for actual, wanted in ((greedy, expected), (by_numpy(obs, noise.numpy()), sampled)):
        assert actual.shape == wanted.shape
        assert actual.dtype == wanted.dtype
        # Both sum in float32, in an order that depends on the processor.
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(obs, untouched)
    return greedy


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("action", [BOX, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize("hidden", [(32, 32), ()])
def test_numpy_actor_equals_the_torch_path(
    action: ActionSpec, activation: str, hidden: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    spec = ObsSpec({"": ArraySpec((3,), "float32")})
    model = MLPActorCritic(spec, action, hidden_sizes=hidden, activation=activation)
    with torch.no_grad():
        for parameter in model.actor.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    greedy = assert_numpy_equals_torch(model)
    assert len(np.unique(greedy)) > 1


@pytest.mark.parametrize("action", [BOX, DISCRETE], ids=["box", "discrete"])
def test_numpy_actor_normalizes_observations_as_the_torch_path_does(action: ActionSpec) -> None:
    model = vector_model(action, normalize_obs=True, clip_obs=1.5)
    rows = normal(500, 3, seed=4).float() * torch.tensor([5.0, 0.1, 1.0]) + 2.0
    plain = assert_numpy_equals_torch(model)
    model.update_normalizer(Rows(rows, torch.ones(500, dtype=torch.bool)))
    assert not np.array_equal(assert_numpy_equals_torch(model), plain)
    assert_numpy_equals_torch(model, spread=100.0)  # far beyond the clip


@pytest.mark.parametrize("action", [BOX, DISCRETE], ids=["box", "discrete"])
def test_numpy_actor_sees_weights_and_statistics_as_they_become(action: ActionSpec) -> None:
    model = vector_model(action, normalize_obs=True)
    ppo = PPO(model, PPOConfig(learning_rate=0.1))  # lays the weights out anew
    before = assert_numpy_equals_torch(model)
    batch = {
        "obs": normal(32, 3).float(),
        "actions": torch.randint(4, (32,)) if action is DISCRETE else normal(32, 2, 1).float(),
        "old_logprobs": torch.zeros(32),
        "values": torch.zeros(32),
        "advantages": normal(32).float(),
        "returns": torch.ones(32),
    }
    for _ in range(3):
        ppo.update(batch)
    after = assert_numpy_equals_torch(model)
    assert not np.array_equal(after, before)
    model.update_normalizer(Rows(batch["obs"] * 3, torch.ones(32, dtype=torch.bool)))
    assert not np.array_equal(assert_numpy_equals_torch(model), after)
    model.load_state_dict(vector_model(action, normalize_obs=True).state_dict())
    np.testing.assert_array_equal(assert_numpy_equals_torch(model), before)


def test_no_numpy_actor_where_it_could_not_be_the_same() -> None:
    vector, pair = ArraySpec((3,), "float32"), ArraySpec((2, 2), "float32")
    for obs, action, activation in (
        (ObsSpec({"": vector}), DISCRETE, "gelu"),
        (ObsSpec({"": pair}), DISCRETE, "tanh"),
        (ObsSpec({"": ArraySpec((3,), "uint8")}), DISCRETE, "tanh"),
        (ObsSpec({"a": vector, "b": pair}), DISCRETE, "tanh"),
        (ObsSpec({"a": vector, "action_mask": ArraySpec((4,), "bool")}), DISCRETE, "tanh"),
    ):
        assert MLPActorCritic(obs, action, activation=activation).numpy_actor() is None


# Normalisers.


def test_running_norm_has_the_mean_and_variance_of_all_it_was_shown() -> None:
    rng = np.random.default_rng(0)
    norm = RunningNorm((3,), clip=10.0)
    seen = []
    for size in (1, 5, 0, 300, 2, 1, 64):
        rows = rng.normal([1e6, -3.0, 0.0], [1.0, 20.0, 1e-3], (size, 3)).astype(np.float32)
        norm.update(torch.from_numpy(rows))
        seen.append(rows)
    every = np.concatenate(seen).astype(np.float64)
    assert norm.count.item() == len(every) == 373
    np.testing.assert_allclose(norm.mean.numpy(), every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.m2.numpy() / 373, every.var(0), rtol=1e-9)
    np.testing.assert_allclose(
        norm.scale.numpy(), 1 / np.sqrt(every.var(0) + 1e-8), rtol=1e-6, atol=0
    )


def test_running_norm_standardizes_and_clips() -> None:
    norm = RunningNorm((2,), clip=1.5)
    untouched = torch.tensor([[0.3, -1.2]])
    assert torch.equal(norm(untouched), untouched)
    norm.update(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))  # means 2, 20; deviations 1, 10
    out = norm(torch.tensor([[2.0, 20.0], [3.0, 10.0], [100.0, -100.0]]))
    expected = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1.5, -1.5]])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_running_norm_is_frozen_between_updates_and_travels_in_the_state() -> None:
    norm = RunningNorm((1,), clip=10.0)
    norm.update(torch.tensor([[1.0], [2.0], [6.0]]))
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    norm(torch.full((50, 1), 1000.0))
    norm.update(torch.empty(0, 1))
    other = RunningNorm((1,), clip=10.0)
    other.load_state_dict(norm.state_dict())
    for name, tensor in before.items():
        assert torch.equal(norm.state_dict()[name], tensor)
        assert torch.equal(other.state_dict()[name], tensor)
    for each in (norm, other):
        each.update(torch.tensor([[11.0]]))
    assert other.mean.item() == norm.mean.item() == 5.0


def test_running_norm_takes_pixels() -> None:
    norm = RunningNorm((2,), clip=10.0)
    norm.update(torch.tensor([[0, 255], [255, 255]], dtype=torch.uint8))
    assert norm.mean.tolist() == [127.5, 255.0]
    assert norm(torch.tensor([[255, 255]], dtype=torch.uint8))[0].tolist() == pytest.approx([1, 0])


def random_rewards(steps: int = 200, envs: int = 3) -> list[tuple[Array, Array, Array]]:
    """Rewards, dones and valid marks; as with next-step resets, a row after a done is invalid."""
    rng = np.random.default_rng(5)
    rows = []
    before = np.zeros(envs, bool)
    for _ in range(steps):
        valid = ~before
        reward = np.where(valid, rng.normal(0.5, 3.0, envs), 0.0)
        done = valid & (rng.random(envs) < 0.1)
        rows.append((reward, done, valid))
        before = done
    return rows


def test_reward_normalizer_divides_by_the_deviation_of_all_discounted_returns() -> None:
    gamma = 0.9
    normalizer = RewardNormalizer(3, gamma, clip=1.25)
    returns = [0.0, 0.0, 0.0]
    seen: list[float] = []
    clipped = 0
    for reward, done, valid in random_rewards():
        given_back = normalizer(reward.copy(), done, valid)
        for env in range(3):
            returns[env] = gamma * returns[env] + float(reward[env])
            if valid[env]:
                seen.append(returns[env])
            if done[env]:
                returns[env] = 0.0
        scaled = reward / math.sqrt(float(np.var(seen)) + 1e-8)
        clipped += int((np.abs(scaled) > 1.25).sum())
        np.testing.assert_allclose(given_back, np.clip(scaled, -1.25, 1.25), rtol=1e-9)
    assert len(seen) < 600
    assert clipped > 5


def test_reward_normalizer_state_goes_on_as_if_never_stopped() -> None:
    rows = random_rewards(40)
    whole, first, second = (RewardNormalizer(3, 0.99, clip=5.0) for _ in range(3))
    expected = [whole(*row) for row in rows]
    for row in rows[:25]:
        first(*row)
    state = first.state_dict()
    first(*rows[25])  # the state must not move with the normaliser
    second.load_state_dict(state)
    for row, wanted in zip(rows[25:], expected[25:], strict=True):
        np.testing.assert_array_equal(second(*row), wanted)


# -- divergences -----------------------------------------------------------------------------------


def test_divergences_by_hand() -> None:
    """Of a coin from 1/2 to 1/4: ln(4/3)/2; of a normal whose mean moves by one deviation: 1/2."""
    coin = 0.5 * math.log(4 / 3)
    pair = CategoricalHead((2,), ())
    even, uneven = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert pair.kl(even, uneven).item() == pytest.approx(coin)
    two = CategoricalHead((2, 2), (2,))
    both = two.kl(torch.cat((even, even), -1), torch.cat((uneven, even), -1))
    assert both.item() == pytest.approx(coin)
    switch = BernoulliHead((2,))
    logits = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(1 / 3), 0.0]])
    assert switch.kl(*logits).item() == pytest.approx(coin)
    box = GaussianHead((1,), 0.0)
    log2 = math.log(2)
    moved = box.kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    wider = box.kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, log2]]))
    assert moved.item() == pytest.approx(0.5)
    assert wider.item() == pytest.approx(log2 + 1 / 8 - 1 / 2)


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_divergences_are_those_of_torch(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    head: Any = {
        "discrete": CategoricalHead((4,), ()),
        "multi_discrete": CategoricalHead((2, 3), (2,)),
        "multi_binary": BernoulliHead((2, 2)),
        "box": GaussianHead((2, 2), -0.3),
    }[kind]
    first, second = torch.randn(2, 50, head.param_size, generator=generator)

    def theirs(params: Tensor) -> list[Any]:
        if kind == "box":
            return [D.Normal(params, head.log_std.exp())]
        if kind == "multi_binary":
            return [D.Bernoulli(logits=params)]
        return [
            D.Categorical(logits=part).expand([1, 50])
            for part in torch.split(params, head.nvec, -1)
        ]

    with torch.no_grad():
        before = head.distribution(first, None)
        pairs = theirs(first)
        if kind == "box":
            head.log_std.add_(torch.tensor([0.2, -0.5, 0.0, 1.0]))
        found = head.kl(before, head.distribution(second, None))
        expected = sum(D.kl_divergence(p, q) for p, q in zip(pairs, theirs(second), strict=True))
        assert isinstance(expected, Tensor)
        expected = expected.sum(-1) if expected.ndim == 2 and len(expected) == 50 else expected[0]
    torch.testing.assert_close(found, expected)
    assert (head.kl(before, before) == 0).all()


def test_a_divergence_of_masked_choices_is_that_of_the_legal_ones() -> None:
    head, mask = CategoricalHead((3,), ()), torch.tensor([[True, False, True]])
    first, second = torch.tensor([[1.0, 9.0, 0.0]]), torch.tensor([[0.0, -9.0, 2.0]])
    found = head.kl(head.distribution(first, mask), head.distribution(second, mask))
    plain = CategoricalHead((2,), ())
    pair = [plain.distribution(params[:, [0, 2]], None) for params in (first, second)]
    torch.testing.assert_close(found, plain.kl(*pair))
