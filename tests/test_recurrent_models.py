"""Networks that remember: at once or step by step, in torch or NumPy, each row for itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.models.encoders import EncoderConfig
from rl_training.models.recurrent import LSTMActorCritic, LSTMQNetwork
from rl_training.models.recurrent.gru import GRU
from rl_training.models.recurrent.lstm import LSTM
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, ObsSpec, Remembered, Rows

VECTOR = ObsSpec({"": ArraySpec((3,), "float32")})
IMAGE = ObsSpec({"": ArraySpec((1, 36, 36), "uint8")})
MIXED = ObsSpec({"seen": IMAGE.leaves[""], "felt": ArraySpec((2,), "float32")})
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(4,), start=(0,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
MULTI = ActionSpec("multi_discrete", (2,), "int64", nvec=(2, 3), start=(0, 0))
LENGTH, ROWS = 6, 4

models = pytest.mark.parametrize(
    "kind",
    [{}, {"shared_lstm": True}, {"memory": "gru"}],
    ids=["own", "shared", "gru"],
)
spaces = pytest.mark.parametrize(
    ("obs_spec", "action_spec"),
    [(VECTOR, DISCRETE), (VECTOR, BOX), (VECTOR, MULTI), (IMAGE, DISCRETE), (MIXED, BOX)],
    ids=["vector-discrete", "vector-box", "vector-multi", "image", "mixed"],
)


def observations(spec: ObsSpec, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    leaves = {
        key: torch.randint(0, 256, (*shape, *leaf.shape), generator=generator, dtype=torch.uint8)
        if leaf.is_image
        else torch.randn(*shape, *leaf.shape, generator=generator)
        for key, leaf in spec.leaves.items()
    }
    return leaves if spec.is_dict else leaves[""]


def at(obs: Any, t: int) -> Any:
    return {key: leaf[t] for key, leaf in obs.items()} if isinstance(obs, dict) else obs[t]


def actor_critic(
    obs_spec: ObsSpec = VECTOR, action_spec: ActionSpec = DISCRETE, **kwargs: Any
) -> LSTMActorCritic:
    torch.manual_seed(1)
    encoder = EncoderConfig(feature_size=16, orthogonal=True)
    made = LSTMActorCritic(obs_spec, action_spec, lstm_size=8, encoder=encoder, **kwargs)
    with torch.no_grad():  # the first policy is nearly uniform: make it say something
        made.actor.layers[-1].weight.mul_(100)  # type: ignore[operator]
    return made


def walk(model: LSTMActorCritic, obs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step by step: actions, log-probabilities, values and states before each step."""
    noise = torch.stack([model.head.draw_noise((ROWS,), torch.Generator()) for _ in range(LENGTH)])
    state = model.initial_state(ROWS)
    columns: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for t in range(LENGTH):
            actions, after, said = model.act(at(obs, t), state, noise[t])
            columns.append((actions, said["logprobs"], said["values"], state))
            state = after
    actions, logprobs, values, states = (torch.stack(c) for c in zip(*columns, strict=True))
    return actions, logprobs, values, states


@models
@spaces
def test_a_sequence_at_once_equals_it_step_by_step(
    obs_spec: ObsSpec, action_spec: ActionSpec, kind: dict[str, Any]
) -> None:
    model = actor_critic(obs_spec, action_spec, **kind)
    obs = observations(obs_spec, LENGTH, ROWS)
    actions, logprobs, values, states = walk(model, obs)
    with torch.no_grad():
        whole = model.evaluate({"obs": obs, "actions": actions, "state": states[0]})
        half = {"obs": _from(obs, 3), "actions": actions[3:], "state": states[3]}
        later = model.evaluate(half)
        last = model.value(Remembered(at(obs, LENGTH - 1), states[-1]))
    assert whole.entropy.shape == (LENGTH, ROWS)
    torch.testing.assert_close(whole.logprob, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.value, values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(later.value, values[3:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, values[-1], atol=1e-5, rtol=1e-5)
    # It does remember: the same observations mean something else at the start of an episode.
    with torch.no_grad():
        afresh = model.evaluate({**half, "state": torch.zeros_like(states[3])})
    assert (afresh.value - later.value).abs().max() > 1e-3


def _from(obs: Any, t: int) -> Any:
    return {key: leaf[t:] for key, leaf in obs.items()} if isinstance(obs, dict) else obs[t:]


@spaces
def test_no_environment_is_moved_by_anothers_history(
    obs_spec: ObsSpec, action_spec: ActionSpec
) -> None:
    model = actor_critic(obs_spec, action_spec)
    obs = observations(obs_spec, LENGTH, ROWS)
    actions, _, _, states = walk(model, obs)
    batch = {"obs": obs, "actions": actions, "state": states[2]}

    def perturbed(leaf: Tensor) -> Tensor:
        leaf = leaf.clone()
        leaf[:, 1] = 255 - leaf[:, 1] if leaf.dtype == torch.uint8 else leaf[:, 1] + 1
        return leaf

    other = {key: perturbed(leaf) for key, leaf in obs.items()} if isinstance(obs, dict) else None
    state = states[2].clone()
    state[1] += 1
    with torch.no_grad():
        before = model.evaluate(batch)
        after = model.evaluate(
            {**batch, "obs": other if other is not None else perturbed(obs), "state": state}
        )
    rest = [0, 2, 3]
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[:, rest], now[:, rest])
    assert not torch.equal(before.value[:, 1], after.value[:, 1])


@models
@pytest.mark.parametrize("action_spec", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("normalize", [False, True])
def test_numpy_acts_as_torch_does(
    action_spec: ActionSpec, kind: dict[str, Any], normalize: bool
) -> None:
    model = actor_critic(VECTOR, action_spec, normalize_obs=normalize, **kind)
    obs = observations(VECTOR, LENGTH, ROWS)
    model.update_normalizer(
        Rows(obs.flatten(0, 1) * 3 + 1, torch.ones(LENGTH * ROWS, dtype=torch.bool))
    )
    act = model.numpy_actor()
    assert act is not None
    state, other = model.initial_state(ROWS), np.zeros((ROWS, model.state_size), np.float32)
    generator = torch.Generator().manual_seed(3)
    for t in range(LENGTH):
        noise = model.head.draw_noise((ROWS,), generator) if t % 2 else None
        with torch.no_grad():
            actions, state, _ = model.act(obs[t], state, noise)
        same, following = act(obs[t].numpy(), other, None if noise is None else noise.numpy())
        assert following is not other
        other = following
        np.testing.assert_allclose(same, actions.numpy(), atol=1e-5)
        np.testing.assert_allclose(other, state.numpy(), atol=1e-6)


def test_numpy_follows_the_weights() -> None:
    model = actor_critic()
    act = model.numpy_actor()
    assert act is not None
    obs, state = np.ones((1, 3), np.float32), np.zeros((1, model.state_size), np.float32)
    before = act(obs, state, None)[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        expected = model.act(torch.ones(1, 3), model.initial_state(1))[1]
    after = act(obs, state, None)[1]
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, expected.numpy(), atol=1e-6)


def test_the_cell_is_the_formula() -> None:
    torch.manual_seed(0)
    lstm = LSTM(2, 3).double()
    weights = dict(lstm.layer.named_parameters())
    x, state = torch.randn(1, 1, 2).double(), torch.randn(1, 6).double()
    h, c = state[:, :3], state[:, 3:]
    gates = (
        x[0] @ weights["weight_ih_l0"].T
        + h @ weights["weight_hh_l0"].T
        + weights["bias_ih_l0"]
        + weights["bias_hh_l0"]
    )
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
    outputs, after = lstm(x, state)
    torch.testing.assert_close(outputs[0], o.sigmoid() * cell.tanh(), atol=1e-12, rtol=0)
    torch.testing.assert_close(after, torch.cat((outputs[0], cell), 1), atol=1e-12, rtol=0)


def test_the_gated_unit_is_the_formula() -> None:
    """One step of one cell with all weights 1, worked by hand, in torch and in NumPy.

    With x = 0.5, h = 0.25 and biases 0: r = z = sigmoid(0.75), n = tanh(0.5 + 0.25 r).
    """
    gru = GRU(1, 1)
    for name, parameter in gru.layer.named_parameters():
        torch.nn.init.constant_(parameter, float("weight" in name))
    z = 1 / (1 + math.exp(-0.75))
    new = math.tanh(0.5 + 0.25 * z)
    expected = (1 - z) * new + z * 0.25
    outputs, after = gru(torch.tensor([[[0.5]]]), torch.tensor([[0.25]]))
    assert outputs.item() == after.item() == pytest.approx(expected, abs=1e-6)
    ours, state = gru.numpy_step()(np.array([[0.5]], np.float32), np.array([[0.25]], np.float32))
    assert ours.item() == state.item() == pytest.approx(expected, abs=1e-6)


def q_network(
    obs_spec: ObsSpec = VECTOR, hidden_sizes: tuple[int, ...] = (8,), **kwargs: Any
) -> LSTMQNetwork:
    torch.manual_seed(2)
    kwargs["encoder"] = EncoderConfig(feature_size=16)
    return LSTMQNetwork(
        obs_spec, DISCRETE, hidden_sizes=hidden_sizes, activation="relu", lstm_size=8, **kwargs
    )


@pytest.mark.parametrize("hidden_sizes", [(), (8,)], ids=["no trunk", "trunk"])
@pytest.mark.parametrize("obs_spec", [VECTOR, IMAGE, MIXED], ids=["vector", "image", "mixed"])
def test_q_values_of_any_observation_along_a_sequence(
    obs_spec: ObsSpec, hidden_sizes: tuple[int, ...]
) -> None:
    model = q_network(obs_spec, hidden_sizes)
    assert (model.numpy_actor() is None) != (obs_spec is VECTOR and hidden_sizes != ())
    obs, state = observations(obs_spec, LENGTH, ROWS), model.initial_state(ROWS)
    with torch.no_grad():
        whole = model.q_values_sequence(obs, state)
        assert whole.std(0).min() > 0
        for t in range(LENGTH):
            values, mask, state = model.policy_step(at(obs, t), state)
            assert mask is None
            torch.testing.assert_close(whole[t], values, atol=1e-6, rtol=1e-5)


def test_values_of_illegal_actions_are_the_least_float() -> None:
    spec = ObsSpec({"seen": VECTOR.leaves[""], ACTION_MASK: ArraySpec((4,), "bool")})
    model = q_network(spec, normalize_obs=True)
    seen, state = torch.randn(LENGTH, ROWS, 3), model.initial_state(ROWS)
    legal = torch.rand(LENGTH, ROWS, 4) < 0.6
    legal[1, :, 2] = True
    legal[0, 0] = False
    obs = {"seen": seen, ACTION_MASK: legal}
    with torch.no_grad():
        values = model.q_values_sequence(obs, state)
        actions, _, _ = model.act(at(obs, 1), state)
        drawn, _, _ = model.act(at(obs, 1), state, torch.where(legal[1], 0.0, 1e3))
        raw, mask, _ = model.policy_step(at(obs, 0), state)
    assert mask is not None
    assert torch.equal(values[0, 0], raw[0])  # where nothing is legal the mask is ignored
    rest = legal.clone()
    rest[0, 0] = True
    rest |= ~rest.any(-1, keepdim=True)
    assert ((values == torch.finfo(torch.float32).min) == ~rest).all()
    for chosen in (actions, drawn):
        assert legal[1].gather(-1, chosen.unsqueeze(-1)).all()


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_q_values_along_a_sequence_equal_those_step_by_step(memory: str) -> None:
    model = q_network(memory=memory)
    obs, state = observations(VECTOR, LENGTH, ROWS), model.initial_state(ROWS)
    act, other = model.numpy_actor(), np.zeros((ROWS, model.state_size), np.float32)
    assert act is not None
    with torch.no_grad():
        whole = model.q_values_sequence(obs, state)
        assert whole.shape == (LENGTH, ROWS, 4)
        for t in range(LENGTH):
            one = model.q_values_sequence(obs[t : t + 1], state)[0]
            torch.testing.assert_close(whole[t], one, atol=1e-6, rtol=1e-5)
            actions, state, nothing = model.act(obs[t], state)
            assert actions.tolist() == whole[t].argmax(-1).tolist()
            assert not nothing
            same, other = act(obs[t].numpy(), other, None)
            assert same.tolist() == actions.tolist()
            np.testing.assert_allclose(other, state.numpy(), atol=1e-6)


def test_reset_state_forgets_those_rows_alone() -> None:
    model = q_network()
    state = torch.ones(3, model.state_size)
    kept = model.reset_state(state, torch.tensor([True, False, True]))
    assert kept.sum(1).tolist() == [0.0, float(model.state_size), 0.0]
    assert state.sum() == 3 * model.state_size
    # Whatever an episode left behind: zero times a NaN would be one.
    state[0] = math.nan
    assert torch.equal(model.reset_state(state, torch.tensor([True, False, True])), kept)
