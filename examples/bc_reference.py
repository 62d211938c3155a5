"""Behavioural cloning in one file: supervised learning of recorded actions (Pomerleau 1991).

    python examples/bc_reference.py --dataset FOLDER --env-id Pendulum-v1 --updates 20000

It learns from a Minari dataset (FOLDER/data/main_data.hdf5) and steps an environment only to
evaluate. Read it from the bottom: `main` samples recorded transitions and calls `bc_update`.
It takes Box actions, which are in [-1, 1] everywhere except in the dataset and in the
environment, and Discrete ones.
"""

from __future__ import annotations

import argparse
import itertools
import math
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
    add("--learning-rate", type=float, default=1e-3, help="learning rate")
    add("--batch-size", type=int, default=256, help="transitions per update")
    add("--top-fraction", type=float, default=1.0, help="fraction of the episodes, the best ones")
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
    """A policy and its optimizer."""

    def __init__(self, obs_size: int, space: gym.Space[Any], args: argparse.Namespace) -> None:
        super().__init__()
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        self.actor = mlp(obs_size, *args.hidden_sizes, gym.spaces.flatdim(space))
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.learning_rate)

    def greedy_action(self, obs: Tensor) -> Tensor:
        """Return the most likely discrete action, or the continuous one."""
        outputs = self.actor(obs)
        return outputs.argmax(-1) if self.is_discrete else torch.tanh(outputs)


def read_transitions(folder: Path, space: gym.Space[Any], top_fraction: float) -> dict[str, Tensor]:
    """Return observations and actions of the episodes with the highest returns, in their order.

    An episode of T transitions has T + 1 observations: no action was taken in the last one.
    """
    episodes = []
    with h5py.File(folder / "data" / "main_data.hdf5") as file:
        for name in sorted(file, key=lambda name: int(name.removeprefix("episode_"))):
            recorded = {key: file[name][key][:] for key in ("observations", "actions", "rewards")}
            actions = recorded["actions"]
            if isinstance(space, gym.spaces.Box):
                actions = 2 * (actions - space.low) / (space.high - space.low) - 1
            episodes.append((recorded["rewards"].sum(), recorded["observations"][:-1], actions))
    by_return = sorted(range(len(episodes)), key=lambda i: -episodes[i][0])
    chosen = sorted(by_return[: math.ceil(top_fraction * len(episodes))])
    obs, actions = (np.concatenate([episodes[i][part] for i in chosen]) for part in (1, 2))
    data = {"obs": torch.as_tensor(obs, dtype=torch.float32)}
    if isinstance(space, gym.spaces.Discrete):
        data["actions"] = torch.as_tensor(actions - space.start)
    else:
        data["actions"] = torch.as_tensor(actions, dtype=torch.float32)
    return data


def bc_update(agent: Agent, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make one gradient step towards the recorded actions.

    L = E[ (mu(s) - a)^2 ],  the mean over components, too; discrete: L = -E[ log pi(a | s) ]
    """
    outputs, actions = agent.actor(batch["obs"]), batch["actions"]
    if agent.is_discrete:
        loss = nn.functional.cross_entropy(outputs, actions)
    else:
        loss = nn.functional.mse_loss(torch.tanh(outputs), actions)
    agent.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    agent.optimizer.step()
    return {"loss": loss.detach()}


@torch.no_grad()
def evaluate(agent: Agent, env: gym.Env[Any, Any], episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes."""
    space, returns = env.action_space, []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = agent.greedy_action(torch.as_tensor(obs, dtype=torch.float32)).numpy()
            if isinstance(space, gym.spaces.Box):
                action = space.low + (action + 1) / 2 * (space.high - space.low)
            else:
                action = space.start + action  # type: ignore[attr-defined]
            obs, reward, terminated, truncated, _ = env.step(action)
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
    data = read_transitions(args.dataset, env.action_space, args.top_fraction)
    agent = Agent(data["obs"].shape[1], env.action_space, args)

    for update in range(1, args.updates + 1):
        rows = torch.randint(len(data["obs"]), (args.batch_size,))
        batch = {name: column[rows] for name, column in data.items()}
        losses = bc_update(agent, batch)
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
