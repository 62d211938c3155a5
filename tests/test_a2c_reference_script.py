"""A2C's single-file script runs alone and takes the steps that the package takes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from reference_runs import load_script, printed_twice
from rl_training.algorithms.a2c import A2C, A2CConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep

SCRIPT = Path(__file__).parent.parent / "examples" / "a2c_cartpole_reference.py"
ALLOWED = {"torch", "gymnasium", "numpy"} | set(sys.stdlib_module_names)
NUM_ENVS, NUM_STEPS, ITERATIONS = 4, 20, 3


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


def test_it_imports_nothing_but_torch_gymnasium_numpy_and_the_standard_library() -> None:
    source = SCRIPT.read_text()
    packages: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add("." * node.level + (node.module or "").split(".")[0])
    assert {"torch", "gymnasium"} <= packages <= ALLOWED
    assert "rl_training" not in source


def test_it_runs_alone_and_twice_the_same(tmp_path: Path) -> None:
    flags = ["--total-timesteps", "320", "--seed", "3"]
    flags += ["--num-envs", "2", "--num-steps", "80", "--eval-episodes", "2"]
    lines = printed_twice(SCRIPT, flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == ["160", "320"]
    assert all("return" in line for line in lines[:-1])
    assert lines[-1].startswith("evaluation:")


def short_cartpoles() -> SyncVectorEnv:
    """CartPoles whose time limit is about the length of a first episode: some fall, some do not."""
    return SyncVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=14)] * NUM_ENVS,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


def package_model() -> MLPActorCritic:
    return MLPActorCritic(
        ObsSpec({"": ArraySpec((4,), "float32")}), ActionSpec("discrete", (), "int64", nvec=(2,))
    )


def linears(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def paired_parameters(agent: Any, model: MLPActorCritic) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for ours, theirs in ((agent.actor, model.actor), (agent.critic, model.critic)):
        for a, b in zip(linears(ours), linears(theirs), strict=True):
            pairs += [(a.weight.detach(), b.weight.detach()), (a.bias.detach(), b.bias.detach())]
    return pairs


def as_package_rollout(rollout: Any, dtype: torch.dtype) -> RolloutBuffer:
    """The script's rollout, added to the package's buffer step by step."""
    buffer = RolloutBuffer(NUM_STEPS, NUM_ENVS, (4,), (), obs_dtype=dtype, action_dtype=torch.int64)
    for t in range(NUM_STEPS):
        obs = rollout.obs[t + 1] if t + 1 < NUM_STEPS else rollout.next_obs
        done = rollout.terminated[t] | rollout.truncated[t]
        step = VectorStep(
            obs=obs.numpy(),
            final_obs=torch.where(done[:, None], rollout.final_obs[t], obs).numpy(),
            reward=rollout.rewards[t].numpy(),
            terminated=rollout.terminated[t].numpy(),
            truncated=rollout.truncated[t].numpy(),
            valid=np.ones(NUM_ENVS, bool),
            episodes=(),
        )
        buffer.add(rollout.obs[t].numpy(), rollout.actions[t].numpy(), {}, step)
    for name in ("logprobs", "rewards", "dones", "values", "bootstrap", "advantages", "returns"):
        setattr(buffer, name, getattr(buffer, name).to(dtype))
    return buffer


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("flags", [(), ("--ent-coef=0.02", "--vf-coef=1", "--gamma=0.9")], ids=len)
def test_script_and_package_take_the_same_steps(
    script: Any, flags: tuple[str, ...], dtype: torch.dtype, tolerance: float
) -> None:
    """Three updates from the same start end at the same parameters."""
    args = script.parse_args(flags)
    config = A2CConfig(
        num_steps=NUM_STEPS,
        learning_rate=args.learning_rate,
        lr_schedule="linear",
        gamma=args.gamma,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
    )
    torch.manual_seed(0)
    agent = script.Agent().to(dtype)
    optimizer = script.make_optimizer(agent, args.learning_rate)
    model = package_model().to(dtype)
    for ours, theirs in paired_parameters(agent, model):
        theirs.copy_(ours)
    start = [ours.clone() for ours, _ in paired_parameters(agent, model)]
    a2c = A2C(model, config)

    envs = short_cartpoles()
    obs, _ = envs.reset(seed=11)
    terminated = truncated = 0
    for iteration in range(ITERATIONS):
        rollout = script.collect(envs, agent, obs, NUM_STEPS)
        obs = rollout.next_obs.numpy()
        terminated += int(rollout.terminated.sum())
        truncated += int((rollout.truncated & ~rollout.terminated).sum())
        buffer = as_package_rollout(rollout, dtype)
        returns = script.compute_returns(agent, rollout, args.gamma)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / ITERATIONS)
        losses = script.a2c_update(agent, optimizer, rollout, args)

        rows = NUM_ENVS * NUM_STEPS
        a2c.learn(buffer, Progress(iteration * rows, ITERATIONS * rows))
        torch.testing.assert_close(buffer.returns, returns, rtol=0, atol=100 * tolerance)
        metrics = a2c.pop_metrics()
        names = ("policy_loss", "value_loss", "entropy")
        for name, loss in zip(names, losses.values(), strict=True):
            assert metrics[f"losses/{name}"] == pytest.approx(loss.item(), abs=1e3 * tolerance)
    envs.close()

    assert terminated
    assert truncated
    pairs = paired_parameters(agent, model)
    for before, (ours, theirs) in zip(start, pairs, strict=True):
        assert (ours - before).abs().max() > 1e-3
        torch.testing.assert_close(theirs, ours, rtol=0, atol=tolerance)


class FirstNumber(nn.Module):
    """The value of an observation is its first number."""

    def value(self, obs: Tensor) -> Tensor:
        return obs[..., 0]


def test_script_bootstraps_truncated_episodes_and_not_terminated_ones(script: Any) -> None:
    """By hand, gamma 0.5: steps that terminate, are truncated, do both, and continue twice."""
    rollout = script.Rollout(
        obs=torch.zeros(5, 1, 4),
        actions=torch.zeros(5, 1, dtype=torch.int64),
        rewards=torch.ones(5, 1),
        terminated=torch.tensor([[True], [False], [True], [False], [False]]),
        truncated=torch.tensor([[False], [True], [True], [False], [False]]),
        final_obs=torch.full((5, 1, 4), 100.0),
        next_obs=torch.full((1, 4), 12.0),
    )
    returns = script.compute_returns(FirstNumber(), rollout, 0.5)
    assert returns.flatten().tolist() == [1.0, 51.0, 1.0, 4.5, 7.0]
