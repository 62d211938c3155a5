"""The whole of discrete SAC on CartPole-v1 in one file (Christodoulou 2019, arXiv:1910.07207).

    python examples/sac_discrete_cartpole_reference.py --total-timesteps 20000 --seed 1

Read it from the bottom: `main` takes a step, then learns from a batch of stored transitions. The
policy's expectations are sums over both actions, so that updates need no samples.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

OBS_SIZE, NUM_ACTIONS = 4, 2


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--total-timesteps", type=int, default=20_000, help="environment steps")
    add("--seed", type=int, default=1, help="seed of weights, actions and environment")
    add("--learning-rate", type=float, default=3e-4, help="learning rate of all networks")
    add("--buffer-size", type=int, default=20_000, help="transitions kept for replay")
    add("--learning-starts", type=int, default=1000, help="random steps at the start")
    add("--batch-size", type=int, default=64, help="transitions per update")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--tau", type=float, default=0.005, help="step of targets towards the critics")
    add("--ent-coef-init", type=float, default=1.0, help="weight of the entropy at the start")
    add("--target-entropy-scale", type=float, default=0.5, help="entropy to keep, of log 2")
    add("--hidden-sizes", type=int, nargs="+", default=[64, 64], help="widths of the layers")
    add("--report-interval", type=int, default=1000, help="steps between progress lines")
    add("--eval-episodes", type=int, default=20, help="greedy episodes after training")
    return parser.parse_args(argv)


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU in between and torch's default weights."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """A policy, two critics with target networks, the entropy coefficient, and optimizers."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        sizes = (OBS_SIZE, *args.hidden_sizes, NUM_ACTIONS)
        self.actor, self.critic_1, self.critic_2 = mlp(*sizes), mlp(*sizes), mlp(*sizes)
        self.target_1, self.target_2 = copy.deepcopy(self.critic_1), copy.deepcopy(self.critic_2)
        self.log_ent_coef = nn.Parameter(torch.tensor(math.log(args.ent_coef_init)))

        critics = [*self.critic_1.parameters(), *self.critic_2.parameters()]
        rate = args.learning_rate
        self.critic_optimizer = torch.optim.Adam(critics, lr=rate)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=rate)
        self.ent_coef_optimizer = torch.optim.Adam([self.log_ent_coef], lr=rate)

    def probabilities(self, obs: Tensor) -> Tensor:
        """Return the probabilities of both actions, row by row."""
        return torch.softmax(self.actor(obs), dim=-1)

    @torch.no_grad()
    def greedy_action(self, obs: Any) -> int:
        """Return the more likely action."""
        return int(self.actor(torch.as_tensor(obs)).argmax())

    @torch.no_grad()
    def explore(self, obs: Any) -> int:
        """Return a sample of the policy; there is no other exploration."""
        return int(torch.multinomial(self.probabilities(torch.as_tensor(obs)), 1))


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
        for name, entry in transition.items():
            self.columns[name][self.added % self.capacity] = torch.as_tensor(entry)
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


@torch.no_grad()
def sac_targets(agent: Agent, batch: dict[str, Tensor], gamma: float) -> Tensor:
    """Return the soft targets of the critics, an expectation over the next action.

    y = r + gamma (1 - terminated) V(s')
    V(s) = sum_a p(a | s) ( min_i Q_target_i(s, a) - ent_coef log p(a | s) )
    """
    next_obs = batch["next_obs"]
    chances = agent.probabilities(next_obs)
    least = torch.min(agent.target_1(next_obs), agent.target_2(next_obs))
    soft = (chances * (least - torch.exp(agent.log_ent_coef) * torch.log(chances))).sum(dim=-1)
    return batch["rewards"] + gamma * (1 - batch["terminated"]) * soft


def value(critic: nn.Sequential, obs: Tensor, actions: Tensor) -> Tensor:
    """Return Q(s, a), one number per row."""
    return critic(obs)[torch.arange(len(obs)), actions]  # type: ignore[no-any-return]


def sac_update(
    agent: Agent, batch: dict[str, Tensor], args: argparse.Namespace
) -> dict[str, Tensor]:
    """Make one gradient step of critics, policy and entropy coefficient on a batch."""
    obs = batch["obs"]
    targets = sac_targets(agent, batch, args.gamma)
    errors_1 = value(agent.critic_1, obs, batch["actions"]) - targets
    errors_2 = value(agent.critic_2, obs, batch["actions"]) - targets
    critic_loss = 0.5 * (errors_1**2).mean() + 0.5 * (errors_2**2).mean()
    descend(agent.critic_optimizer, critic_loss)

    # L_actor = E[ sum_a p(a | s) ( ent_coef log p(a | s) - min_i Q_i(s, a) ) ]
    chances = agent.probabilities(obs)
    logarithms = torch.log(chances)
    with torch.no_grad():
        least = torch.min(agent.critic_1(obs), agent.critic_2(obs))
    ent_coef = torch.exp(agent.log_ent_coef.detach())
    actor_loss = (chances * (ent_coef * logarithms - least)).sum(dim=-1).mean()
    descend(agent.actor_optimizer, actor_loss)

    # Below the target entropy the gradient raises ent_coef, above it lowers it.
    entropy = -(chances * logarithms).sum(dim=-1).detach()
    target_entropy = args.target_entropy_scale * math.log(NUM_ACTIONS)
    shortfall = (target_entropy - entropy).mean()
    descend(agent.ent_coef_optimizer, -agent.log_ent_coef * shortfall)

    follow(agent.target_1, agent.critic_1, args.tau)
    follow(agent.target_2, agent.critic_2, args.tau)
    losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "ent_coef": ent_coef}
    return {name: loss.detach() for name, loss in losses.items()}


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


def evaluate(agent: Agent, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = gym.make("CartPole-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(agent.greedy_action(obs))
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
    agent = Agent(args)
    replay = Replay(args.buffer_size)
    collector = Collector(gym.make("CartPole-v1"), replay, args.seed)

    losses: dict[str, Tensor] = {}
    start = time.perf_counter()
    for step in range(1, args.total_timesteps + 1):
        if step <= args.learning_starts:
            collector.step(int(torch.randint(NUM_ACTIONS, ())))
        else:
            collector.step(agent.explore(collector.obs))
            batch = replay.rows(torch.randint(len(replay), (args.batch_size,)))
            losses = sac_update(agent, batch, args)

        due = step % args.report_interval == 0 or step == args.total_timesteps
        if collector.returns and due:
            report = f"return {np.mean(collector.returns):7.1f}"
            report += "".join(f"  {name} {loss:8.3f}" for name, loss in losses.items())
            print(f"step {step:7d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    collector.env.close()

    returns = evaluate(agent, args.eval_episodes, seed=args.seed + 10_000)
    print(
        f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    )
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
