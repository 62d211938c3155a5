"""The whole of TD3+BC in one file (Fujimoto and Gu 2021, arXiv:2106.06860).

    python examples/td3_bc_reference.py --dataset FOLDER --env-id Pendulum-v1 --updates 20000

It learns from a Minari dataset (FOLDER/data/main_data.hdf5) and steps an environment only to
evaluate. Read it from the bottom: `main` samples recorded transitions and calls `td3_bc_update`.
Actions are in [-1, 1] everywhere except in the dataset and in the environment.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import torch
from torch import Tensor, nn


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="folder of a Minari dataset")
    add("--env-id", default="Pendulum-v1", help="environment that was recorded")
    add("--updates", type=int, default=20_000, help="gradient steps")
    add("--seed", type=int, default=1, help="seed of weights, batches and environment")
    add("--learning-rate", type=float, default=3e-4, help="learning rate of all networks")
    add("--batch-size", type=int, default=256, help="transitions per update")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--tau", type=float, default=0.005, help="step of targets towards the networks")
    add("--policy-delay", type=int, default=2, help="critic updates per update of the policy")
    add("--target-policy-noise", type=float, default=0.2, help="standard deviation of its noise")
    add("--target-noise-clip", type=float, default=0.5, help="largest magnitude of that noise")
    add("--alpha", type=float, default=2.5, help="weight of values against imitation")
    add("--hidden-sizes", type=int, nargs="+", default=[256, 256], help="widths of the layers")
    add("--report-interval", type=int, default=1000, help="updates between progress lines")
    add("--eval-episodes", type=int, default=10, help="greedy episodes after training")
    return parser.parse_args(argv)


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU in between and torch's default weights."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """A policy and two critics, each with a target network, and their optimizers."""

    def __init__(self, obs_size: int, action_size: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.actor = mlp(obs_size, *args.hidden_sizes, action_size).append(nn.Tanh())
        self.critic_1 = mlp(obs_size + action_size, *args.hidden_sizes, 1)
        self.critic_2 = mlp(obs_size + action_size, *args.hidden_sizes, 1)
        self.target_actor = copy.deepcopy(self.actor)
        self.target_1, self.target_2 = copy.deepcopy(self.critic_1), copy.deepcopy(self.critic_2)
        self.updates = 0

        critics = [*self.critic_1.parameters(), *self.critic_2.parameters()]
        self.critic_optimizer = torch.optim.Adam(critics, lr=args.learning_rate)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.learning_rate)


def value(critic: nn.Sequential, obs: Tensor, actions: Tensor) -> Tensor:
    """Return Q(s, a), one number per row."""
    return critic(torch.cat([obs, actions], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def read_transitions(folder: Path, space: gym.spaces.Box) -> dict[str, Tensor]:
    """Return all recorded transitions, one tensor per field.

    An episode of T transitions has T + 1 observations, so that the successor of each is the next
    one, also at the end of the episode. Only terminations are kept: truncated episodes would have
    continued, and targets bootstrap there.
    """
    episodes = []
    with h5py.File(folder / "data" / "main_data.hdf5") as file:
        for name in sorted(file, key=lambda name: int(name.removeprefix("episode_"))):
            recorded = {key: file[name][key][:] for key in ("observations", "actions", "rewards")}
            scaled = 2 * (recorded["actions"] - space.low) / (space.high - space.low) - 1
            episodes.append(
                {
                    "obs": recorded["observations"][:-1],
                    "actions": scaled,
                    "rewards": recorded["rewards"],
                    "next_obs": recorded["observations"][1:],
                    "terminated": file[name]["terminations"][:],
                }
            )
    joined = {key: np.concatenate([one[key] for one in episodes]) for key in episodes[0]}
    return {key: torch.as_tensor(column, dtype=torch.float32) for key, column in joined.items()}


def standardize(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Standardise observations in place; return what was subtracted and divided by."""
    mean, scale = data["obs"].mean(0), data["obs"].std(0, correction=0) + 1e-3
    for name in ("obs", "next_obs"):
        data[name] = (data[name] - mean) / scale
    return mean, scale


@torch.no_grad()
def td3_targets(
    agent: Agent, batch: dict[str, Tensor], noise: Tensor, args: argparse.Namespace
) -> Tensor:
    """Return the targets of the critics.

    a' = clip( mu_target(s') + clip(deviation noise, -c, c), -1, 1 )
    y  = r + gamma (1 - terminated) min_i Q_target_i(s', a')
    """
    next_obs, limit = batch["next_obs"], args.target_noise_clip
    smoothing = torch.clamp(args.target_policy_noise * noise, -limit, limit)
    actions = torch.clamp(agent.target_actor(next_obs) + smoothing, -1.0, 1.0)
    least = torch.min(
        value(agent.target_1, next_obs, actions), value(agent.target_2, next_obs, actions)
    )
    following: Tensor = args.gamma * (1 - batch["terminated"]) * least
    return batch["rewards"] + following


def td3_bc_update(
    agent: Agent, batch: dict[str, Tensor], noise: Tensor, args: argparse.Namespace
) -> dict[str, Tensor]:
    """Make one gradient step on a batch; ``noise`` is (batch, action), standard normal.

    As in TD3, the policy and all targets are updated every ``policy_delay``-th time.
    """
    obs, data_actions = batch["obs"], batch["actions"]
    agent.updates += 1
    targets = td3_targets(agent, batch, noise, args)
    errors_1 = value(agent.critic_1, obs, data_actions) - targets
    errors_2 = value(agent.critic_2, obs, data_actions) - targets
    critic_loss = 0.5 * (errors_1**2).mean() + 0.5 * (errors_2**2).mean()
    descend(agent.critic_optimizer, critic_loss)
    losses = {"critic_loss": critic_loss.detach()}

    if agent.updates % args.policy_delay == 0:
        # L_actor = -lambda E[ Q_1(s, mu(s)) ] + E[ (mu(s) - a)^2 ],  lambda = alpha / E|Q_1|.
        # The scale makes alpha independent of the rewards' units; no gradient flows through it.
        actions = agent.actor(obs)
        q_values = value(agent.critic_1, obs, actions)
        scale = args.alpha / q_values.detach().abs().mean()
        actor_loss = -scale * q_values.mean() + nn.functional.mse_loss(actions, data_actions)
        descend(agent.actor_optimizer, actor_loss)
        losses["actor_loss"] = actor_loss.detach()
        follow(agent.target_actor, agent.actor, args.tau)
        follow(agent.target_1, agent.critic_1, args.tau)
        follow(agent.target_2, agent.critic_2, args.tau)
    return losses


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Make one optimizer step on a loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, tau: float) -> None:
    """Update a target network: theta_target <- (1 - tau) theta_target + tau theta."""
    for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
        slow.copy_((1 - tau) * slow + tau * fast)


@torch.no_grad()
def evaluate(agent: Agent, env: gym.Env[Any, Any], episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes."""
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = agent.actor(torch.as_tensor(obs, dtype=torch.float32)).numpy()
            obs, reward, terminated, truncated, _ = env.step(low + (action + 1) / 2 * (high - low))
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    return returns


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report, and return the mean return of the final evaluation."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # more threads make networks this small slower
    torch.manual_seed(args.seed)
    env = gym.make(args.env_id)
    assert isinstance(env.action_space, gym.spaces.Box)
    data = read_transitions(args.dataset, env.action_space)
    mean, scale = (x.numpy() for x in standardize(data))
    env = gym.wrappers.TransformObservation(
        env, lambda obs: (obs - mean) / scale, env.observation_space
    )
    agent = Agent(data["obs"].shape[1], data["actions"].shape[1], args)

    losses: dict[str, Tensor] = {}
    for update in range(1, args.updates + 1):
        rows = torch.randint(len(data["obs"]), (args.batch_size,))
        batch = {name: column[rows] for name, column in data.items()}
        losses.update(td3_bc_update(agent, batch, torch.randn_like(batch["actions"]), args))
        if update % args.report_interval == 0 or update == args.updates:
            report = "".join(f"  {name} {loss:9.4f}" for name, loss in losses.items())
            print(f"update {update:7d}{report}")

    returns = evaluate(agent, env, args.eval_episodes, seed=args.seed + 10_000)
    env.close()
    print(
        f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    )
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
