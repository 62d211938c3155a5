"""The whole of DQN on CartPole-v1 in one file (Mnih et al. 2015, doi:10.1038/nature14236).

    python examples/dqn_cartpole_reference.py --total-timesteps 50000 --seed 1

Read it from the bottom: `main` alternates between stepping the environment and learning from
replay.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

OBS_SIZE, NUM_ACTIONS = 4, 2


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--total-timesteps", type=int, default=50_000, help="environment steps")
    add("--seed", type=int, default=1, help="seed of weights, actions and environment")
    add("--learning-rate", type=float, default=1e-3, help="initial learning rate of Adam")
    add("--anneal-lr", action=switch, default=True, help="anneal the learning rate to zero")
    add("--buffer-size", type=int, default=100_000, help="transitions kept for replay")
    add("--learning-starts", type=int, default=1000, help="random steps at the start")
    add("--batch-size", type=int, default=64, help="transitions per update")
    add("--train-freq", type=int, default=64, help="steps between rounds of learning")
    add("--gradient-steps", type=int, default=32, help="updates in each round")
    add("--target-update-interval", type=int, default=128, help="steps between target copies")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--exploration-fraction", type=float, default=0.16, help="run fraction of epsilon decay")
    add("--exploration-initial-eps", type=float, default=1.0, help="epsilon at the start")
    add("--exploration-final-eps", type=float, default=0.04, help="final epsilon")
    add("--max-grad-norm", type=float, default=10.0, help="clip gradients to this norm")
    add("--hidden-sizes", type=int, nargs="+", default=[256, 256], help="widths of the layers")
    add("--report-interval", type=int, default=1000, help="steps between progress lines")
    add("--eval-episodes", type=int, default=20, help="greedy episodes after training")
    return parser.parse_args(argv)


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU in between and torch's default weights."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Networks(NamedTuple):
    """The Q network and its target network."""

    online: nn.Sequential
    target: nn.Sequential


def make_networks(hidden_sizes: Sequence[int]) -> Networks:
    """Return a Q network and a target network with the same weights."""
    online = mlp(OBS_SIZE, *hidden_sizes, NUM_ACTIONS)
    return Networks(online, copy.deepcopy(online))


def copy_target(networks: Networks) -> None:
    """Copy the weights to the target network."""
    networks.target.load_state_dict(networks.online.state_dict())


class Replay:
    """A ring of the last ``capacity`` transitions, with one array per field."""

    def __init__(self, capacity: int) -> None:
        self.columns = {
            "obs": torch.zeros(capacity, OBS_SIZE),
            "actions": torch.zeros(capacity, dtype=torch.int64),
            "rewards": torch.zeros(capacity),
            "next_obs": torch.zeros(capacity, OBS_SIZE),
            "terminated": torch.zeros(capacity),
        }
        self.capacity, self.added = capacity, 0

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, **transition: Any) -> None:
        """Store one transition in place of the oldest."""
        for name, value in transition.items():
            self.columns[name][self.added % self.capacity] = torch.as_tensor(value)
        self.added += 1

    def rows(self, indices: Tensor) -> dict[str, Tensor]:
        """Return a batch of tensors."""
        return {name: column[indices] for name, column in self.columns.items()}


class Collector:
    """Steps an environment and stores the transitions."""

    def __init__(self, env: gym.Env[Any, Any], replay: Replay, seed: int) -> None:
        self.env, self.replay = env, replay
        self.obs, _ = env.reset(seed=seed)
        self.running, self.returns = 0.0, deque[float](maxlen=20)

    def step(self, action: int) -> None:
        """Take one action, and reset the environment if it ends the episode."""
        next_obs, reward, terminated, truncated, _ = self.env.step(action)
        # Stored before the reset below, so that next_obs is the true successor also of a last
        # step. Only a fall is stored as terminated; after the time limit targets bootstrap.
        self.replay.add(
            obs=self.obs,
            actions=action,
            rewards=float(reward),
            next_obs=next_obs,
            terminated=float(terminated),
        )
        self.running += float(reward)
        if terminated or truncated:
            self.returns.append(self.running)
            self.running = 0.0
            next_obs, _ = self.env.reset()
        self.obs = next_obs


def epsilon(step: int, args: argparse.Namespace) -> float:
    """Return the fraction of random actions: linear at first, then constant."""
    done = min(1.0, step / (args.exploration_fraction * args.total_timesteps))
    return float((1 - done) * args.exploration_initial_eps + done * args.exploration_final_eps)


@torch.no_grad()
def greedy_action(network: nn.Sequential, obs: Any) -> int:
    """Return the action with the highest value."""
    return int(network(torch.as_tensor(obs)).argmax())


def explore(network: nn.Sequential, obs: Any, random_share: float) -> int:
    """Return a random action with probability ``random_share``, else the greedy one."""
    if torch.rand(()) < random_share:
        return int(torch.randint(NUM_ACTIONS, ()))
    return greedy_action(network, obs)


@torch.no_grad()
def dqn_targets(target: nn.Sequential, batch: dict[str, Tensor], gamma: float) -> Tensor:
    """Return the targets r + gamma (1 - terminated) max_a Q_target(s', a)."""
    best: Tensor = target(batch["next_obs"]).max(dim=1).values
    return batch["rewards"] + gamma * (1 - batch["terminated"]) * best


def dqn_update(
    networks: Networks,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    args: argparse.Namespace,
) -> dict[str, Tensor]:
    """Make one gradient step on a batch."""
    targets = dqn_targets(networks.target, batch, args.gamma)
    rows = torch.arange(len(targets))
    q_values: Tensor = networks.online(batch["obs"])[rows, batch["actions"]]

    # Huber loss: quadratic up to 1, then linear, so that gradients are at most 1.
    size = (q_values - targets).abs()
    loss = torch.where(size < 1, size**2 / 2, size - 0.5).mean()

    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(networks.online.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"loss": loss.detach(), "q_mean": q_values.detach().mean()}


def make_optimizer(networks: Networks, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return Adam over the Q network (not the target network)."""
    return torch.optim.Adam(networks.online.parameters(), lr=args.learning_rate, eps=1e-8)


def evaluate(network: nn.Sequential, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = gym.make("CartPole-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(greedy_action(network, obs))
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    env.close()
    return returns


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report, and return the mean return of the final evaluation."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # more threads make networks this small slower
    torch.manual_seed(args.seed)
    networks = make_networks(args.hidden_sizes)
    optimizer = make_optimizer(networks, args)
    replay = Replay(args.buffer_size)
    collector = Collector(gym.make("CartPole-v1"), replay, args.seed)

    losses: dict[str, Tensor] = {}
    start = time.perf_counter()
    for step in range(1, args.total_timesteps + 1):
        warming_up = step <= args.learning_starts
        random_share = 1.0 if warming_up else epsilon(step - 1, args)
        collector.step(explore(networks.online, collector.obs, random_share))

        if not warming_up and step % args.train_freq == 0:
            if args.anneal_lr:
                rate = args.learning_rate * (1 - step / args.total_timesteps)
                optimizer.param_groups[0]["lr"] = rate
            for _ in range(args.gradient_steps):
                batch = replay.rows(torch.randint(len(replay), (args.batch_size,)))
                losses = dqn_update(networks, optimizer, batch, args)
        if step % args.target_update_interval == 0:
            copy_target(networks)

        due = step % args.report_interval == 0 or step == args.total_timesteps
        if collector.returns and due:
            report = f"return {np.mean(collector.returns):6.1f}"
            report += "".join(f"  {name} {loss:8.4f}" for name, loss in losses.items())
            print(f"step {step:7d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    collector.env.close()

    returns = evaluate(networks.online, args.eval_episodes, seed=args.seed + 10_000)
    print(
        f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    )
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
