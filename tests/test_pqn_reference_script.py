"""PQN's single-file script runs alone and takes the steps that the package takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference_runs import load_script, printed_twice
from rl_training.algorithms.pqn import PQN, PQNConfig
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress
from test_a2c_reference_script import (
    ITERATIONS,
    NUM_ENVS,
    NUM_STEPS,
    FirstNumber,
    as_package_rollout,
    short_cartpoles,
)
from test_reference_script import ALLOWED, imported_packages

SCRIPT = Path(__file__).parent.parent / "examples" / "pqn_cartpole_reference.py"
ROWS, WIDTHS = NUM_ENVS * NUM_STEPS, (16, 12)


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


def test_it_stands_alone(tmp_path: Path) -> None:
    source = SCRIPT.read_text()
    assert {"torch", "gymnasium"} <= imported_packages(source) <= ALLOWED
    assert "rl_training" not in source
    flags = ["--total-timesteps", "320", "--seed", "3", "--eval-episodes", "2"]
    flags += ["--num-envs", "2", "--num-steps", "80", "--hidden-sizes", "16", "16"]
    lines = printed_twice(SCRIPT, flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == ["160", "320"]
    assert all("return" in line for line in lines[:-1])
    assert lines[-1].startswith("evaluation:")


def paired_parameters(network: nn.Module, model: MLPQNetwork) -> list[tuple[Tensor, Tensor]]:
    assert model.advantage.norms is not None
    theirs: dict[type[nn.Module], list[Any]] = {
        nn.Linear: list(model.advantage.layers),
        nn.LayerNorm: list(model.advantage.norms),
    }
    pairs = []
    for kind, layers in theirs.items():
        ours: list[Any] = [layer for layer in network.modules() if isinstance(layer, kind)]
        for a, b in zip(ours, layers, strict=True):
            pairs += [(a.weight.detach(), b.weight.detach()), (a.bias.detach(), b.bias.detach())]
    return pairs


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-7), (torch.float32, 2e-5)],  # RAdam counts its steps in float32
    ids=str,
)
@pytest.mark.parametrize("flags", [(), ("--q-lambda=0.9", "--gamma=0.9")], ids=len)
def test_script_and_package_take_the_same_steps(
    script: Any, flags: tuple[str, ...], dtype: torch.dtype, tolerance: float
) -> None:
    """The updates of three rollouts from the same start end at the same parameters."""
    shared = ("--max-grad-norm=0.5", "--learning-rate=5e-3", "--hidden-sizes", *map(str, WIDTHS))
    args = script.parse_args([*flags, *shared])
    config = PQNConfig(
        num_steps=NUM_STEPS,
        learning_rate=args.learning_rate,
        gamma=args.gamma,
        q_lambda=args.q_lambda,
        num_minibatches=args.num_minibatches,
        update_epochs=args.update_epochs,
        max_grad_norm=args.max_grad_norm,
    )
    torch.manual_seed(0)
    network = script.make_network(WIDTHS).to(dtype)
    with torch.no_grad():  # so that values matter beside rewards of 1
        network[-1].weight.mul_(20.0)
    optimizer = script.make_optimizer(network, args.learning_rate)
    model = MLPQNetwork(
        ObsSpec({"": ArraySpec((4,), "float32")}),
        ActionSpec("discrete", (), "int64", nvec=(2,)),
        hidden_sizes=WIDTHS,
        activation="relu",
        layer_norm=True,
    ).to(dtype)
    for ours, theirs in paired_parameters(network, model):
        theirs.copy_(ours)
    start = [ours.clone() for ours, _ in paired_parameters(network, model)]
    pqn = PQN(model, config, generator=torch.Generator().manual_seed(5))
    draws = torch.Generator().manual_seed(5)

    envs = short_cartpoles()
    obs, _ = envs.reset(seed=11)
    terminated = truncated = 0
    for iteration in range(ITERATIONS):
        rollout = script.collect(envs, network, obs, NUM_STEPS, 0.9)
        obs = rollout.next_obs.numpy()
        terminated += int(rollout.terminated.sum())
        truncated += int((rollout.truncated & ~rollout.terminated).sum())
        buffer = as_package_rollout(rollout, dtype)
        returns = script.compute_returns(network, rollout, args.gamma, args.q_lambda)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / ITERATIONS)
        orders = [torch.randperm(ROWS, generator=draws) for _ in range(args.update_epochs)]
        losses = script.pqn_update(network, optimizer, rollout, args, orders)

        pqn.learn(buffer, Progress(iteration * ROWS, ITERATIONS * ROWS))
        torch.testing.assert_close(buffer.returns, returns, rtol=0, atol=100 * tolerance)
        metrics = pqn.pop_metrics()
        for name, loss in losses.items():
            assert metrics[f"losses/{name}"] == pytest.approx(loss, abs=1e3 * tolerance)
    envs.close()

    assert terminated
    assert truncated
    for before, (ours, theirs) in zip(start, paired_parameters(network, model), strict=True):
        assert (ours - before).abs().max() > 1e-3
        torch.testing.assert_close(theirs, ours, rtol=0, atol=tolerance)


class FirstNumbers(FirstNumber):
    """Of two actions the second is worth an observation's first number, the first nothing."""

    def forward(self, obs: Tensor) -> Tensor:
        return torch.stack((torch.zeros_like(obs[..., 0]), obs[..., 0]), -1)


def test_script_bootstraps_truncated_episodes_and_not_terminated_ones(script: Any) -> None:
    """By hand, gamma 0.5: steps that terminate, are truncated, do both, and continue twice."""
    rollout = script.Rollout(
        obs=torch.full((5, 1, 4), 6.0),
        actions=torch.zeros(5, 1, dtype=torch.int64),
        rewards=torch.ones(5, 1),
        terminated=torch.tensor([[True], [False], [True], [False], [False]]),
        truncated=torch.tensor([[False], [True], [True], [False], [False]]),
        final_obs=torch.full((5, 1, 4), 100.0),
        next_obs=torch.full((1, 4), 12.0),
    )
    returns = script.compute_returns(FirstNumbers(), rollout, 0.5, 0.25)
    # The last: 1 + 0.5 * 12. The one before: 1 + 0.5 (0.75 * 6 + 0.25 * 7).
    assert returns.flatten().tolist() == [1.0, 51.0, 1.0, 4.125, 7.0]


def test_script_explores_as_the_package_does(script: Any) -> None:
    args = script.parse_args(["--total-timesteps", "1000"])
    config = PQNConfig(
        exploration_fraction=args.exploration_fraction,
        exploration_initial_eps=args.exploration_initial_eps,
        exploration_final_eps=args.exploration_final_eps,
    )
    for step in (0, 40, 100, 200, 999):
        expected = config.exploration(Progress(step, 1000))
        assert script.epsilon(step, args) == pytest.approx(expected)
    assert script.epsilon(100, args) == pytest.approx(0.525)  # halfway from 1 to 0.05
