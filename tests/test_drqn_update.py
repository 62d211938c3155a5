"""DRQN's update: targets on numbers worked by hand, padding that counts for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import MakeConfig
from rl_training.algorithms.drqn import DRQN, DRQNConfig, drqn_loss
from rl_training.algorithms.sequence_replay import sequence_targets
from rl_training.errors import ConfigError
from rl_training.models.recurrent import LSTMQNetwork
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, ObsSpec

VECTOR = ObsSpec({"": ArraySpec((2,), "float32")})
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))


def column(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def learner(**knobs: Any) -> DRQN:
    torch.manual_seed(0)
    model = LSTMQNetwork(VECTOR, DISCRETE, hidden_sizes=(8,), activation="tanh", lstm_size=8)
    return DRQN(model, DRQNConfig(**knobs))


def batch(length: int = 4, rows: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "obs": torch.randn(length + 1, rows, 2, generator=generator),
        "actions": torch.randint(3, (length, rows), generator=generator),
        "rewards": torch.randn(length, rows, generator=generator),
        "discounts": torch.full((length, rows), 0.9),
        "mask": torch.ones(length, rows),
        "state": torch.randn(rows, 16, generator=generator),
    }


def test_the_loss_of_numbers_worked_by_hand() -> None:
    found = drqn_loss(
        {
            "q_values": column(1.0, 2.0, 50.0),
            "targets": column(3.0, 1.0, -50.0),
            "mask": column(1.0, 1.0, 0.0),
        }
    )
    assert {name: float(value) for name, value in found.items()} == {
        "loss": pytest.approx(0.5 * (4 + 1) / 3),
        "q_mean": 1.5,
        "td_error": 1.5,
    }


def test_a_step_has_the_same_weight_whatever_is_drawn_with_it() -> None:
    weights = []
    for others in (0, 1, 4):
        q_values = torch.zeros(4, 2, requires_grad=True)
        mask = torch.zeros(4, 2)
        mask[0, 0] = 1.0
        mask[:others, 1] = 1.0
        drqn_loss({"q_values": q_values, "targets": torch.ones(4, 2), "mask": mask})[
            "loss"
        ].backward()  # type: ignore[no-untyped-call]
        assert q_values.grad is not None
        weights.append(float(q_values.grad[0, 0]))
    assert weights == [-1 / 8] * 3


def test_illegal_actions_in_padding_are_not_learnt_from() -> None:
    """Padding shows the final observation, whose mask may forbid the action before it."""
    least = torch.finfo(torch.float32).min
    q_values = torch.tensor([[1.0], [2.0], [least]], requires_grad=True)
    found = drqn_loss(
        {
            "q_values": q_values,
            "targets": column(3.0, 1.0, -least),
            "mask": column(1.0, 1.0, 0.0),
        }
    )
    assert float(found["loss"].detach()) == pytest.approx(0.5 * (4 + 1) / 3)
    assert (float(found["q_mean"]), float(found["td_error"])) == (1.5, 1.5)
    found["loss"].backward()  # type: ignore[no-untyped-call]
    assert q_values.grad is not None
    assert q_values.grad[:, 0].tolist() == pytest.approx([-2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("double", [False, True])
def test_the_best_action_of_a_target_is_a_legal_one(double: bool) -> None:
    masked = ObsSpec({"seen": VECTOR.leaves[""], ACTION_MASK: ArraySpec((3,), "bool")})
    shared: dict[str, Any] = {"hidden_sizes": (8,), "activation": "tanh", "lstm_size": 8}
    torch.manual_seed(0)
    plain, agent = (
        DRQN(LSTMQNetwork(spec, DISCRETE, **shared), DRQNConfig(double=double))
        for spec in (VECTOR, masked)
    )
    agent.load_weights(plain.module.state_dict())
    data = batch()
    model: Any = plain.model
    with torch.no_grad():
        values = model.q_values_sequence(data["obs"], data["state"])
    legal = values < values.amax(-1, keepdim=True)  # all but the best
    legal[-1, 0] = False  # no action follows a final observation
    legal.scatter_(-1, data["actions"].new_zeros(5, 3, 1), True)
    data["actions"] = torch.where(legal[:-1, :, 2], 2, 0)
    legal[-1, 0] = False
    found = agent.loss({**data, "obs": {"seen": data["obs"], ACTION_MASK: legal}})
    best = torch.where(legal, values, -torch.inf).amax(-1)
    best[-1, 0] = values[-1, 0].amax()  # where nothing is legal the mask is ignored
    targets = data["rewards"] + data["discounts"] * best[1:]
    chosen = values[:-1].gather(-1, data["actions"].unsqueeze(-1)).squeeze(-1)
    expected = 0.5 * (targets - chosen).square().mean()
    torch.testing.assert_close(found["loss"].detach(), expected)
    assert not torch.allclose(found["loss"], plain.loss(data)["loss"])


@pytest.mark.parametrize(
    ("n_step", "expected"),
    [
        # r + d b, with d = 0 after the termination at the end.
        (1, [1 + 0.5 * 10, 2 + 0.5 * 20, 3 + 0.5 * 30, 4.0]),
        (2, [1 + 0.5 * 12, 2 + 0.5 * 18, 3 + 0.5 * 4, 4.0]),
        (3, [1 + 0.5 * 11, 2 + 0.5 * 5, 3 + 0.5 * 4, 4.0]),
        (9, [1 + 0.5 * 4.5, 2 + 0.5 * 5, 3 + 0.5 * 4, 4.0]),
    ],
)
def test_targets_of_numbers_worked_by_hand(n_step: int, expected: list[float]) -> None:
    data = {
        "rewards": column(1.0, 2.0, 3.0, 4.0),
        "discounts": column(0.5, 0.5, 0.5, 0.0),
        "mask": torch.ones(4, 1),
    }
    best = column(10.0, 20.0, 30.0, 40.0)
    assert sequence_targets(data, best, n_step)[:, 0].tolist() == expected


def test_rewards_are_not_summed_past_the_end_of_a_sequence() -> None:
    # Truncated after two steps: what follows the second is valued, not what padding says.
    data = {
        "rewards": column(1.0, 2.0, 100.0),
        "discounts": column(0.5, 0.5, 0.5),
        "mask": column(1.0, 1.0, 0.0),
    }
    targets = sequence_targets(data, column(10.0, 20.0, 999.0), 3)
    assert targets[:2, 0].tolist() == [1 + 0.5 * (2 + 0.5 * 20), 2 + 0.5 * 20]


@pytest.mark.parametrize("double", [False, True])
def test_the_loss_is_that_of_a_walk_step_by_step(double: bool) -> None:
    agent, data = learner(double=double, gamma=0.9), batch()
    with torch.no_grad():
        for parameter in agent.target.module.parameters():
            parameter.add_(0.1)
    online: Any = agent.model
    target = agent.target.module
    errors = []
    with torch.no_grad():
        for b in range(3):
            state = data["state"][b : b + 1]
            values: list[Tensor] = []
            ahead: list[Tensor] = []
            for network, said in ((online, values), (target, ahead)):
                memory = state
                for t in range(5):
                    seen = data["obs"][t : t + 1, b : b + 1]
                    said.append(network.q_values_sequence(seen, memory)[0, 0])
                    memory = network.act(seen[0], memory)[1]
            for t in range(4):
                choice = (values if double else ahead)[t + 1].argmax()
                wanted = data["rewards"][t, b] + 0.9 * ahead[t + 1][choice]
                errors.append(float(values[t][data["actions"][t, b]] - wanted))
    expected = 0.5 * sum(e * e for e in errors) / len(errors)
    assert float(agent.loss(data)["loss"].detach()) == pytest.approx(expected, rel=1e-5)


def test_what_padding_holds_moves_nothing() -> None:
    gradients = []
    for junk in (0.0, 7.0):
        agent, data = learner(), batch()
        data["mask"][2:, 1] = 0
        data["rewards"][2:, 1] = junk
        data["obs"][4:, 1] = junk
        loss = agent.loss(data)["loss"]
        gradients.append(torch.autograd.grad(loss, list(agent.module.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_an_update_moves_the_network_and_not_its_target() -> None:
    agent, data = learner(learning_rate=1e-2), batch()
    before = [p.clone() for p in agent.target.module.parameters()]
    losses = [float(agent.update(data)["loss"]) for _ in range(100)]
    assert losses[-1] < 0.5 * losses[0]
    for was, now in zip(before, agent.target.module.parameters(), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lstm_size": 0}, "lstm_size' must be at least 1"),
        ({"sequence_length": 0}, "sequence_length' must be at least 1"),
        ({"burn_in": 16}, "burn_in' must be 0 to sequence_length - 1 = 15"),
        ({"burn_in": -1}, "burn_in' must be 0 to"),
        ({"replay_device": "accelerator"}, "replay_device' must be cpu"),
        ({"buffer_size": 63}, r"buffer_size' must be at least .* = 2 \* 2 \* 16"),
        ({"n_step": 17}, "n_step' must be at most sequence_length = 16"),
        ({"acceleration": "compile"}, "'acceleration' must be eager for drqn"),
        ({"normalize_reward": True}, "'normalize_reward' must be false .* TransformReward"),
    ],
)
def test_impossible_settings_name_their_field(
    knobs: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(algo="drqn", **knobs)
