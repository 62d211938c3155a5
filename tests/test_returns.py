"""Returns and advantages: numbers worked by hand, and sums of floats from the definitions."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_training.algorithms.returns import gae, lambda_returns, n_step_returns, vtrace
from rl_training.data.rollout_buffer import RolloutBuffer


def column(numbers: list[float]) -> Tensor:
    """One environment's numbers, (T, 1)."""
    return torch.tensor(numbers)[:, None]


def rollout(
    rewards: list[float],
    values: list[float],
    last_value: float,
    dones: list[float] | None = None,
    bootstrap: list[float] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One environment's rollout, as the functions take it."""
    nothing = [0.0] * len(rewards)
    grids = (rewards, values, dones or nothing, bootstrap or nothing)
    first, second, third, fourth = (column(numbers) for numbers in grids)
    return first, second, third, fourth, torch.tensor([last_value])


def random_rollout(
    steps: int, envs: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random numbers; a third of the steps end an episode, half of these by truncation."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand((steps, envs), generator=generator)

    dones = (uniform() < 1 / 3).float()
    bootstrap = dones * (uniform() < 0.5) * (4 * uniform() - 2)
    last_value = torch.randn(envs, generator=generator)
    return 2 * uniform() - 1, 4 * uniform() - 2, dones, bootstrap, last_value


# -- numbers worked by hand ------------------------------------------------------------------------

# Two steps and a truncation (value of its final observation: 10), a reset-only row, one step and a
# termination, a reset-only row, and one step of an episode that the rollout's end cuts (value of
# the observation after it: 16). Values of the reset-only rows are 100 and must reach no other row.
KINDS = rollout(
    rewards=[1.0, 2.0, 0.0, 3.0, 0.0, 4.0],
    values=[2.0, 4.0, 100.0, 6.0, 100.0, 8.0],
    last_value=16.0,
    dones=[0, 1, 0, 1, 0, 0],
    bootstrap=[0.0, 10.0, 0.0, 0.0, 0.0, 0.0],
)
VALID = [0, 1, 3, 5]

# An episode longer than the rollout.
LONG = rollout([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], last_value=16.0)


def of_valid(tensor: Tensor) -> list[float]:
    kept: list[float] = tensor[VALID, 0].tolist()
    return kept


def test_gae_by_hand() -> None:
    # gamma = lambda = 1/2. TD errors:
    #   1 + 4/2 - 2 = 1     2 + 10/2 - 4 = 3     3 - 6 = -3     4 + 16/2 - 8 = 4
    # Only the first has a successor in its episode: 1 + 3/4.
    advantages, returns = gae(*KINDS, gamma=0.5, gae_lambda=0.5)
    assert of_valid(advantages) == [1.75, 3.0, -3.0, 4.0]
    assert of_valid(returns) == [3.75, 7.0, 3.0, 12.0]


def test_gae_along_an_episode_by_hand() -> None:
    # TD errors: 1 + 2 - 2 = 1, 2 + 3 - 4 = 1, 3 + 4 - 6 = 1, 4 + 8 - 8 = 4; decay 1/4:
    #   4,  1 + 4/4 = 2,  1 + 2/4 = 1.5,  1 + 1.5/4 = 1.375
    advantages, returns = gae(*LONG, gamma=0.5, gae_lambda=0.5)
    assert advantages.flatten().tolist() == [1.375, 1.5, 2.0, 4.0]
    assert returns.flatten().tolist() == [3.375, 5.5, 8.0, 12.0]


def test_n_step_returns_by_hand() -> None:
    # n = 1: the TD targets of the test above. n = 2: the first has two rewards and then the
    # truncation's value, 1 + 2/2 + 10/4 = 4.5; every other episode is one step long.
    assert of_valid(n_step_returns(*KINDS, gamma=0.5, n=1)) == [3.0, 7.0, 3.0, 12.0]
    assert of_valid(n_step_returns(*KINDS, gamma=0.5, n=2)) == [4.5, 7.0, 3.0, 12.0]
    assert of_valid(n_step_returns(*KINDS, gamma=0.5, n=9)) == [4.5, 7.0, 3.0, 12.0]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        # 1 + 4/2, 2 + 6/2, 3 + 8/2, 4 + 16/2
        (1, [3.0, 5.0, 7.0, 12.0]),
        # 1 + 2/2 + 6/4, 2 + 3/2 + 8/4, 3 + 4/2 + 16/4, 4 + 16/2
        (2, [3.5, 5.5, 9.0, 12.0]),
        # 1 + 2/2 + 3/4 + 8/8, 2 + 3/2 + 4/4 + 16/8, and as before
        (3, [3.75, 6.5, 9.0, 12.0]),
        # 1 + 2/2 + 3/4 + 4/8 + 16/16, and as before
        (4, [4.25, 6.5, 9.0, 12.0]),
        (1000, [4.25, 6.5, 9.0, 12.0]),
    ],
)
def test_n_step_returns_along_an_episode_by_hand(n: int, expected: list[float]) -> None:
    assert n_step_returns(*LONG, gamma=0.5, n=n).flatten().tolist() == expected


def test_lambda_returns_by_hand() -> None:
    # Lambda 1/2, the first row: half the 1-step return 3 and half the 2-step return 4.5.
    assert of_valid(lambda_returns(*KINDS, gamma=0.5, gae_lambda=0.5)) == [3.75, 7.0, 3.0, 12.0]
    # The long episode's first row: 3/2 + 3.5/4 + 3.75/8 + 4.25/8 = 3.375, and so on.
    expected = [3.375, 5.5, 8.0, 12.0]
    assert lambda_returns(*LONG, gamma=0.5, gae_lambda=0.5).flatten().tolist() == expected


def logs(numbers: list[float]) -> Tensor:
    """Differences of log-probabilities with these ratios."""
    return column([math.log(number) for number in numbers])


# TD errors with gamma 1/2: 1 + 4/2 - 2 = 1, 2 + 6/2 - 4 = 1, 3 + 8/2 - 6 = 1.
SHORT = rollout([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], last_value=8.0)


@pytest.mark.parametrize(
    ("knobs", "vs", "advantages"),
    [
        # rho = c = 1, 1/2, 1. vs - V from the end: 1,  1/2 + 1/2 * 1/2 * 1 = 0.75,
        #   1 + 1/2 * 1 * 0.75 = 1.375
        # A: 1 (1 + 4.75/2 - 2),  1/2 (2 + 7/2 - 4),  1 (3 + 8/2 - 6)
        ({}, [3.375, 4.75, 7.0], [1.375, 0.75, 1.0]),
        # rho = 2, 1/2, 3 and c = 1, 1/2, 1. vs - V: 3,  1/2 + 1/4 * 3 = 1.25,
        #   2 + 1/2 * 1 * 1.25 = 2.625
        # A: 2 (1 + 5.25/2 - 2),  1/2 (2 + 9/2 - 4),  3 (3 + 8/2 - 6)
        ({"rho_bar": 3.0}, [4.625, 5.25, 9.0], [3.25, 1.25, 3.0]),
        # rho = 2, 1/2, 3 and c = 2, 1/2, 2. vs - V: 3,  1.25,  2 + 1/2 * 2 * 1.25 = 3.25
        ({"rho_bar": 3.0, "c_bar": 2.0}, [5.25, 5.25, 9.0], [3.25, 1.25, 3.0]),
        # rho = 1/4 and c = 1/8 everywhere: below all ratios.
        # vs - V: 1/4,  1/4 + 1/16 * 1/4 = 0.265625,  1/4 + 1/16 * 0.265625 = 0.2666015625
        # A: 1/4 (1 + 4.265625/2 - 2),  1/4 (2 + 6.25/2 - 4),  1/4
        (
            {"rho_bar": 0.25, "c_bar": 0.125},
            [2.2666015625, 4.265625, 6.25],
            [0.283203125, 0.28125, 0.25],
        ),
        # Lambda 1/2, rho = 1, 1/2, 1, c = 1/2, 1/4, 1/2. vs - V: 1,  1/2 + 1/2 * 1/4 * 1 = 0.625,
        #   1 + 1/2 * 1/2 * 0.625 = 1.15625
        # X = (V + vs)/2 is 4.3125 and 6.5 in the last two rows.
        # A: 1 (1 + 4.3125/2 - 2),  1/2 (2 + 6.5/2 - 4),  1 (3 + 8/2 - 6)
        ({"gae_lambda": 0.5}, [3.15625, 4.625, 7.0], [1.15625, 0.625, 1.0]),
    ],
)
def test_vtrace_by_hand(knobs: dict[str, Any], vs: list[float], advantages: list[float]) -> None:
    """Ratios 2, 1/2 and 4: above and below the clips."""
    behaviour = column([-3.0, -1.0, -2.0])
    target = behaviour + logs([2.0, 0.5, 4.0])
    found = vtrace(behaviour, target, *SHORT, gamma=0.5, **knobs)
    assert found[0].flatten().tolist() == pytest.approx(vs, rel=1e-6)
    assert found[1].flatten().tolist() == pytest.approx(advantages, rel=1e-6)


def test_vtrace_at_the_ends_of_episodes_by_hand() -> None:
    # TD errors 1, 3, -3, 4 (as for GAE). Ratios 1/2, 2, 1/2, 1 are clipped to 1/2, 1, 1/2, 1.
    # vs - V: 1/2 + 1/2 * 1/2 * 3 = 1.25,  3,  -1.5,  4
    # A is 1/2 (1 + 7/2 - 2),  1 (2 + 10/2 - 4),  1/2 (3 - 6) and 1 (4 + 16/2 - 8).
    ratios = [0.5, 2.0, 64.0, 0.5, 64.0, 1.0]
    vs, advantages = vtrace(torch.zeros(6, 1), logs(ratios), *KINDS, gamma=0.5)
    assert of_valid(vs) == [3.25, 7.0, 4.5, 12.0]
    assert of_valid(advantages) == [1.25, 3.0, -1.5, 4.0]


# -- against sums written from the definitions -----------------------------------------------------


class Row(NamedTuple):
    """One step of one environment; a reset-only row has kind "reset"."""

    kind: str
    reward: float
    value: float
    final_value: float
    behaviour: float
    target: float

    @property
    def ended(self) -> bool:
        return self.kind in {"terminated", "truncated"}


class Knobs(NamedTuple):
    gamma: float
    gae_lambda: float
    n: int
    rho_bar: float
    c_bar: float


class Expected(NamedTuple):
    """Of one row; also the order of `everything`."""

    advantage: float
    gae_return: float
    n_step: float
    lambda_return: float
    vs: float
    policy_advantage: float


def episodes(rows: list[Row], last_value: float) -> list[tuple[list[Row], float]]:
    """The steps of each episode, and the value of what follows; without reset-only rows."""
    found: list[tuple[list[Row], float]] = []
    steps: list[Row] = []
    for row in rows:
        if row.kind == "reset":
            continue
        steps.append(row)
        if row.ended:
            found.append((steps, row.final_value if row.kind == "truncated" else 0.0))
            steps = []
    return [*found, (steps, last_value)]


def n_step(rewards: list[float], worth: list[float], t: int, n: int, gamma: float) -> float:
    """G_t of n steps; ``worth`` holds the values and that of what follows the episode."""
    n = min(n, len(rewards) - t)
    return sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * worth[t + n]


def oracle(steps: list[Row], following: float, knobs: Knobs) -> list[Expected]:
    """Everything of one episode, each number as the sum it is by definition."""
    gamma, lam, n, rho_bar, c_bar = knobs
    length = len(steps)
    rewards = [row.reward for row in steps]
    worth = [*(row.value for row in steps), following]
    deltas = [rewards[t] + gamma * worth[t + 1] - worth[t] for t in range(length)]
    ratios = [math.exp(row.target - row.behaviour) for row in steps]
    rhos = [min(ratio, rho_bar) for ratio in ratios]
    cs = [lam * min(ratio, c_bar) for ratio in ratios]
    vs = [
        worth[t]
        + sum(gamma ** (k - t) * math.prod(cs[t:k]) * rhos[k] * deltas[k] for k in range(t, length))
        for t in range(length)
    ] + [following]
    found = []
    for t in range(length):
        advantage = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length))
        returns = [n_step(rewards, worth, t, m, gamma) for m in range(1, length - t + 1)]
        mean = sum((1 - lam) * lam**m * g for m, g in enumerate(returns[:-1]))
        mean += lam ** (len(returns) - 1) * returns[-1]
        q = rewards[t] + gamma * ((1 - lam) * worth[t + 1] + lam * vs[t + 1])
        found.append(
            Expected(
                advantage=advantage,
                gae_return=advantage + worth[t],
                n_step=n_step(rewards, worth, t, n, gamma),
                lambda_return=mean,
                vs=vs[t],
                policy_advantage=rhos[t] * (q - worth[t]),
            )
        )
    return found


def everything(columns: list[list[Row]], last_values: list[float], knobs: Knobs) -> Tensor:
    """What the functions return for environments side by side, (6, T, N)."""

    def grid(of: Callable[[Row], float]) -> Tensor:
        return torch.tensor([[of(row) for row in rows] for rows in columns]).T.contiguous()

    gamma, gae_lambda, n, rho_bar, c_bar = knobs
    data = (
        grid(lambda row: 0.0 if row.kind == "reset" else row.reward),
        grid(lambda row: row.value),
        grid(lambda row: row.ended),
        grid(lambda row: row.final_value if row.kind == "truncated" else 0.0),
        torch.tensor(last_values),
    )
    found = (
        *gae(*data, gamma=gamma, gae_lambda=gae_lambda),
        n_step_returns(*data, gamma=gamma, n=n),
        lambda_returns(*data, gamma=gamma, gae_lambda=gae_lambda),
        *vtrace(
            grid(lambda row: row.behaviour),
            grid(lambda row: row.target),
            *data,
            gamma=gamma,
            gae_lambda=gae_lambda,
            rho_bar=rho_bar,
            c_bar=c_bar,
        ),
    )
    assert all(tensor.dtype == torch.float32 for tensor in found)
    return torch.stack(found)


def possible(rows: list[Row]) -> list[Row]:
    """The rows with reset-only ones only where vectors have them: where no episode is under way."""
    found: list[Row] = []
    for row in rows:
        may_reset = not found or found[-1].ended or found[-1].kind == "reset"
        found.append(row._replace(kind="on") if row.kind == "reset" and not may_reset else row)
    return found


numbers = st.floats(-5, 5, width=32)
logprobs = st.floats(-2, 0, width=32)
units = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
# As many resets as ends, which are possible only after them.
kinds = st.sampled_from(["on", "on", "terminated", "truncated", "reset", "reset"])
any_row = st.builds(Row, kinds, numbers, numbers, numbers, logprobs, logprobs)
any_knobs = st.builds(
    Knobs, units, units, st.integers(1, 9), st.floats(0.25, 4.0), st.floats(0.25, 2.0)
)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[list[Row]], list[float]]:
    steps, envs = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    rows = st.lists(any_row, min_size=steps, max_size=steps).map(possible)
    columns = draw(st.lists(rows, min_size=envs, max_size=envs))
    return columns, draw(st.lists(numbers, min_size=envs, max_size=envs))


def valid_rows(rows: list[Row]) -> list[int]:
    return [t for t, row in enumerate(rows) if row.kind != "reset"]


@settings(max_examples=100, deadline=None)
@given(rollouts(), any_knobs)
def test_all_equal_sums_over_whole_episodes(
    made: tuple[list[list[Row]], list[float]], knobs: Knobs
) -> None:
    columns, last_values = made
    found = everything(columns, last_values, knobs)
    for env, rows in enumerate(columns):
        expected = [
            numbers
            for steps, following in episodes(rows, last_values[env])
            for numbers in oracle(steps, following, knobs)
        ]
        actual = found[:, valid_rows(rows), env].T.tolist()
        assert len(actual) == len(expected)
        for some, others in zip(actual, expected, strict=True):
            assert some == pytest.approx(others, rel=1e-4, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(rollouts(), any_knobs)
def test_reset_rows_can_be_removed(made: tuple[list[list[Row]], list[float]], knobs: Knobs) -> None:
    """The functions know nothing of ``valid``: the ``done`` before a reset-only row is enough."""
    columns, last_values = made
    for rows, last_value in zip(columns, last_values, strict=True):
        kept = valid_rows(rows)
        if kept:
            whole = everything([rows], [last_value], knobs)[:, kept]
            removed = everything([[rows[t] for t in kept]], [last_value], knobs)
            # To rounding: exp may round differently at another place of a tensor.
            torch.testing.assert_close(whole, removed, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(rollouts(), any_knobs, numbers, logprobs)
def test_nothing_of_a_reset_row_reaches_another_row(
    made: tuple[list[list[Row]], list[float]], knobs: Knobs, value: float, logprob: float
) -> None:
    """Whatever the network returns for its observation: not one bit changes elsewhere."""
    columns, last_values = made

    def other(row: Row) -> Row:
        return row._replace(value=value, target=logprob) if row.kind == "reset" else row

    changed = [[other(row) for row in rows] for rows in columns]
    before = everything(columns, last_values, knobs)
    after = everything(changed, last_values, knobs)
    for env, rows in enumerate(columns):
        kept = valid_rows(rows)
        assert torch.equal(before[:, kept, env], after[:, kept, env])


# -- one function and another ----------------------------------------------------------------------

SHAPES = [(1, 1), (1, 5), (7, 1), (16, 8), (33, 13)]


def buffer_arithmetic(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """GAE as `RolloutBuffer` computed it before it called `gae`: the same operations in order."""
    going_on = 1.0 - dones
    next_values = torch.cat((values[1:], last_value.reshape(1, -1).to(values)))
    delta = rewards + gamma * (going_on * next_values + bootstrap) - values
    decay = gamma * gae_lambda * going_on
    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(delta[0])
    for t in reversed(range(len(rewards))):
        advantage = torch.addcmul(delta[t], decay[t], advantage, out=advantages[t])
    return advantages, advantages + values


@pytest.mark.parametrize(("steps", "envs"), SHAPES)
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 1.0), (1.0, 0.0)])
def test_gae_keeps_every_bit_of_the_rollout_buffers(
    steps: int, envs: int, gamma: float, gae_lambda: float
) -> None:
    data = random_rollout(steps, envs, seed=steps)
    knobs: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda}
    expected = buffer_arithmetic(*data, **knobs)
    found = gae(*data, **knobs)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])

    buffer = RolloutBuffer(steps, envs, (1,), ())
    names = ("rewards", "values", "dones", "bootstrap")
    for name, tensor in zip(names, data[:4], strict=True):
        getattr(buffer, name).copy_(tensor)
    buffer.compute_returns_and_advantages(last_value=data[4], **knobs)
    assert torch.equal(buffer.advantages, expected[0])
    assert torch.equal(buffer.returns, expected[1])


def test_gae_writes_where_it_is_asked_to() -> None:
    data = random_rollout(16, 5)
    before = [tensor.clone() for tensor in data]
    # What is there before makes no difference.
    out = torch.full((16, 5), torch.nan), torch.full((16, 5), torch.nan)
    addresses = [tensor.data_ptr() for tensor in out]
    found = gae(*data, gamma=0.99, gae_lambda=0.95, out=out)
    assert found[0] is out[0]
    assert found[1] is out[1]
    assert [tensor.data_ptr() for tensor in out] == addresses
    allocated = gae(*data, gamma=0.99, gae_lambda=0.95)
    assert torch.equal(out[0], allocated[0])
    assert torch.equal(out[1], allocated[1])
    assert all(torch.equal(now, was) for now, was in zip(data, before, strict=True))


@pytest.mark.parametrize(("steps", "envs"), SHAPES)
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.3, 0.0])
def test_vtrace_on_policy_equals_lambda_returns_and_gae_bit_for_bit(
    steps: int, envs: int, gae_lambda: float
) -> None:
    data = random_rollout(steps, envs, seed=steps)
    logprobs = -3 * torch.rand(steps, envs, generator=torch.Generator().manual_seed(1))
    knobs: dict[str, Any] = {"gamma": 0.99, "gae_lambda": gae_lambda}
    unclipped: list[dict[str, Any]] = [{}, {"rho_bar": 1.5, "c_bar": 2.0}, {"rho_bar": math.inf}]
    for clips in unclipped:
        vs, advantages = vtrace(logprobs, logprobs.clone(), *data, **(knobs | clips))
        assert torch.equal(vs, lambda_returns(*data, **knobs))
        assert torch.equal(vs, gae(*data, **knobs)[1])
        assert torch.equal(advantages, gae(*data, **knobs)[0])


def test_lambda_1_is_the_whole_return_and_lambda_0_the_one_step_target() -> None:
    data = random_rollout(16, 5)
    for gae_lambda, n in ((1.0, 16), (0.0, 1)):
        torch.testing.assert_close(
            lambda_returns(*data, gamma=0.9, gae_lambda=gae_lambda),
            n_step_returns(*data, gamma=0.9, n=n),
            rtol=1e-5,
            atol=1e-5,
        )


def test_a_ratio_that_overflows_is_clipped() -> None:
    data = random_rollout(4, 2)
    behaviour = torch.full((4, 2), -200.0)
    vs, advantages = vtrace(behaviour, torch.zeros(4, 2), *data, gamma=0.9)
    assert torch.equal(vs, lambda_returns(*data, gamma=0.9, gae_lambda=1.0))
    assert torch.equal(advantages, gae(*data, gamma=0.9, gae_lambda=1.0)[0])


# -- what may be passed ----------------------------------------------------------------------------

CALLS: dict[str, Callable[[Callable[..., Any], tuple[Tensor, ...]], Any]] = {
    "gae": lambda function, data: function(*data, gamma=0.9, gae_lambda=0.8),
    "n_step_returns": lambda function, data: function(*data, gamma=0.9, n=3),
    "lambda_returns": lambda function, data: function(*data, gamma=0.9, gae_lambda=0.8),
    "vtrace": lambda function, data: function(
        torch.zeros_like(data[0]), 0.3 * data[0], *data, gamma=0.9, gae_lambda=0.8
    ),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gae": gae,
    "n_step_returns": n_step_returns,
    "lambda_returns": lambda_returns,
    "vtrace": vtrace,
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def call(name: str, data: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors that a function returns."""
    found = CALLS[name](FUNCTIONS[name], data)
    return list(found) if isinstance(found, tuple) else [found]


@each_function
def test_dones_may_be_bool_and_numbers_may_be_double(name: str) -> None:
    rewards, values, dones, bootstrap, last_value = random_rollout(7, 3)
    expected = call(name, (rewards, values, dones, bootstrap, last_value))
    as_bool = call(name, (rewards, values, dones.bool(), bootstrap, last_value))
    assert all(torch.equal(a, b) for a, b in zip(as_bool, expected, strict=True))
    double = (rewards.double(), values.double(), dones, bootstrap.double(), last_value)
    for found, single in zip(call(name, double), expected, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), single, rtol=1e-5, atol=1e-5)


@each_function
def test_no_gradient_flows_through_a_target(name: str) -> None:
    rewards, values, *rest = random_rollout(7, 3)
    last_value = rest.pop().requires_grad_()
    data = (rewards.requires_grad_(), values.requires_grad_(), *rest, last_value)
    assert not any(tensor.requires_grad for tensor in call(name, data))


@each_function
@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (7,), r"rewards must be \(steps, environments\).*got \(7,\)"),
        (0, (0, 3), r"at least one step; got \(0, 3\)"),
        (1, (7, 1), r"values must have the shape of rewards, \(7, 3\); got \(7, 1\)"),
        (2, (8, 3), r"dones must have the shape of rewards, \(7, 3\); got \(8, 3\)"),
        (3, (3,), r"bootstrap must have the shape of rewards, \(7, 3\); got \(3,\)"),
        (4, (1,), r"last_value must hold one value per environment, \(3,\); got \(1,\)"),
    ],
)
def test_wrong_shapes_are_refused(
    name: str, index: int, shape: tuple[int, ...], message: str
) -> None:
    data: list[Tensor] = list(random_rollout(7, 3))
    data[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        call(name, tuple(data))


def test_other_wrong_arguments_are_refused() -> None:
    data = random_rollout(7, 3)
    wide = torch.zeros(7, 4)
    right = torch.zeros(7, 3)
    with pytest.raises(ValueError, match="n must be at least 1 step; got 0"):
        n_step_returns(*data, gamma=0.9, n=0)
    with pytest.raises(ValueError, match="advantages must have the shape"):
        gae(*data, gamma=0.9, gae_lambda=0.9, out=(wide, right))
    with pytest.raises(ValueError, match="returns must have the shape"):
        gae(*data, gamma=0.9, gae_lambda=0.9, out=(right, wide))
    with pytest.raises(ValueError, match="behaviour_logprobs must have the shape"):
        vtrace(wide, right, *data, gamma=0.9)
    with pytest.raises(ValueError, match="target_logprobs must have the shape"):
        vtrace(right, wide, *data, gamma=0.9)


# -- compiled --------------------------------------------------------------------------------------


@each_function
def test_each_is_one_graph(name: str) -> None:
    """Traced without a break, and with what is written in place made functional."""
    data = random_rollout(4, 3)
    traced = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(CALLS[name](traced, data), CALLS[name](FUNCTIONS[name], data))


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="torch.compile needs a C++ compiler",
)
def test_compiled_equals_eager() -> None:
    data = random_rollout(4, 3)
    compiled = torch.compile(vtrace, fullgraph=True, dynamic=False)
    found, expected = CALLS["vtrace"](compiled, data), CALLS["vtrace"](vtrace, data)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
