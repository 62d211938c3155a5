"""The single-file script stands alone, runs, and takes the very steps the package takes."""

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
from rl_training.algorithms.ppo import PPO, PPOConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep

SCRIPT = Path(__file__).parent.parent / "examples" / "ppo_cartpole_reference.py"
ALLOWED = {"torch", "gymnasium", "numpy"} | set(sys.stdlib_module_names)
NUM_ENVS, NUM_STEPS, MINIBATCHES, EPOCHS, ITERATIONS = 4, 32, 4, 4, 3


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


def imported_packages(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or "").split(".")[0])
    return names


def test_imports_nothing_but_torch_gymnasium_numpy_and_the_standard_library() -> None:
    packages = imported_packages(SCRIPT.read_text())
    assert {"torch", "gymnasium"} <= packages
    assert packages <= ALLOWED


def test_never_names_the_package() -> None:
    assert "rl_training" not in SCRIPT.read_text()


def test_runs_alone_and_reports_returns_and_an_evaluation(tmp_path: Path) -> None:
    flags = ["--total-timesteps", "256", "--seed", "3"]
    flags += ["--num-envs", "2", "--num-steps", "64", "--eval-episodes", "2"]
    lines = printed_twice(SCRIPT, flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == ["128", "256"]
    assert all("return" in line for line in lines[:-1])
    assert lines[-1].startswith("evaluation:")


def test_refuses_minibatches_that_do_not_divide(script: Any) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(["--num-minibatches", "3"])


def short_cartpoles() -> SyncVectorEnv:
    """CartPoles with a time limit about as long as a first episode: some fall, some run out."""
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
    """The script's record, told to the package step by step."""
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
def test_script_and_package_take_the_same_steps(
    script: Any, dtype: torch.dtype, tolerance: float
) -> None:
    """Three iterations (48 gradient steps) from the same start end at the same parameters."""
    args = script.parse_args(
        [
            *("--num-envs", str(NUM_ENVS), "--num-steps", str(NUM_STEPS)),
            *("--num-minibatches", str(MINIBATCHES), "--update-epochs", str(EPOCHS)),
        ]
    )
    config = PPOConfig(
        learning_rate=args.learning_rate,
        num_steps=NUM_STEPS,
        num_minibatches=MINIBATCHES,
        update_epochs=EPOCHS,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_coef=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
    )
    torch.manual_seed(0)
    agent = script.Agent().to(dtype)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    model = package_model().to(dtype)
    for ours, theirs in paired_parameters(agent, model):
        theirs.copy_(ours)
    start = [ours.clone() for ours, _ in paired_parameters(agent, model)]
    ppo = PPO(model, config, generator=torch.Generator().manual_seed(5))
    order = torch.Generator().manual_seed(5)

    envs = short_cartpoles()
    obs, _ = envs.reset(seed=11)
    terminated = truncated = 0
    for iteration in range(ITERATIONS):
        rollout = script.collect(envs, agent, obs, NUM_STEPS)
        obs = rollout.next_obs.numpy()
        terminated += int(rollout.terminated.sum())
        truncated += int((rollout.truncated & ~rollout.terminated).sum())
        buffer = as_package_rollout(rollout, dtype)

        batch = script.make_batch(agent, rollout, args)
        rows = NUM_ENVS * NUM_STEPS
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - iteration / ITERATIONS)
        for _ in range(EPOCHS):
            for indices in torch.randperm(rows, generator=order).chunk(MINIBATCHES):
                script.ppo_update(agent, optimizer, batch, indices, args)

        ppo.learn(buffer, Progress(iteration * rows, ITERATIONS * rows))
        for name, field in (("advantages", buffer.advantages), ("returns", buffer.returns)):
            torch.testing.assert_close(
                field.flatten(), batch[name], rtol=0, atol=100 * tolerance, msg=name
            )
    envs.close()

    assert terminated
    assert truncated
    pairs = paired_parameters(agent, model)
    for before, (ours, theirs) in zip(start, pairs, strict=True):
        assert (ours - before).abs().max() > 1e-3
        torch.testing.assert_close(theirs, ours, rtol=0, atol=tolerance)


def test_script_bootstraps_truncated_episodes_and_not_terminated_ones(script: Any) -> None:
    """By hand, gamma 0.5, lambda 0: returns are r + 0.5 * (what follows)."""
    advantages, returns = script.compute_gae(
        rewards=torch.tensor([[1.0], [1.0], [1.0]]),
        values=torch.tensor([[2.0], [4.0], [6.0]]),
        dones=torch.tensor([[1.0], [1.0], [0.0]]),
        bootstrap=torch.tensor([[0.0], [10.0], [0.0]]),
        last_value=torch.tensor([8.0]),
        gamma=0.5,
        gae_lambda=0.0,
    )
    assert returns.flatten().tolist() == [1.0, 6.0, 5.0]
    assert advantages.flatten().tolist() == [-1.0, 2.0, -1.0]


def test_script_records_the_true_successor_where_an_episode_ends(script: Any) -> None:
    torch.manual_seed(0)
    envs = short_cartpoles()
    obs, _ = envs.reset(seed=0)
    rollout = script.collect(envs, script.Agent(), obs, 64)
    envs.close()
    dones = rollout.terminated | rollout.truncated
    assert int(dones.sum()) >= 8
    following = torch.cat((rollout.obs[1:], rollout.next_obs[None]))
    assert (following[dones].abs() <= 0.05).all(), "a reset CartPole is within 0.05 of zero"

    pole: Any = gym.make("CartPole-v1").unwrapped
    pole.reset()
    successors = []
    for before, action in zip(rollout.obs[dones], rollout.actions[dones], strict=True):
        pole.state, pole.steps_beyond_terminated = before.double().numpy(), None
        successors.append(torch.from_numpy(pole.step(int(action))[0]))
    torch.testing.assert_close(rollout.final_obs[dones], torch.stack(successors), rtol=0, atol=1e-5)
