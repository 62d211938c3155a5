"""The whole of SAC on Pendulum-v1 in one file (Haarnoja et al. 2018, arXiv:1812.05905).

    python examples/sac_pendulum_reference.py --total-timesteps 20000 --seed 1

Read it from the bottom: `main` takes a step, then learns from a batch of stored transitions.
Actions are in [-1, 1] everywhere except in the environment itself.
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

OBS_SIZE, ACTION_SIZE, MAX_TORQUE = 3, 1, 2.0
LOG_STD_BOUNDS = (-20.0, 2.0)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--total-timesteps", type=int, default=20_000, help="environment steps")
    add("--seed", type=int, default=1, help="seed of weights, actions and environment")
    add("--learning-rate", type=float, default=1e-3, help="learning rate of all networks")
    add("--buffer-size", type=int, default=20_000, help="transitions kept for replay")
    add("--learning-starts", type=int, default=1000, help="random steps at the start")
    add("--batch-size", type=int, default=256, help="transitions per update")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--tau", type=float, default=0.005, help="step of targets towards the critics")
    add("--ent-coef-init", type=float, default=1.0, help="weight of the entropy at the start")
    add("--target-entropy", type=float, default=-float(ACTION_SIZE), help="target of the entropy")
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


class Agent(nn.Module):
    """A policy, two critics with target networks, the entropy coefficient, and optimizers."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.actor = mlp(OBS_SIZE, *args.hidden_sizes, 2 * ACTION_SIZE)
        self.critic_1 = mlp(OBS_SIZE + ACTION_SIZE, *args.hidden_sizes, 1)
        self.critic_2 = mlp(OBS_SIZE + ACTION_SIZE, *args.hidden_sizes, 1)
        self.target_1, self.target_2 = copy.deepcopy(self.critic_1), copy.deepcopy(self.critic_2)
        self.log_ent_coef = nn.Parameter(torch.tensor(math.log(args.ent_coef_init)))

        critics = [*self.critic_1.parameters(), *self.critic_2.parameters()]
        rate = args.learning_rate
        self.critic_optimizer = torch.optim.Adam(critics, lr=rate)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=rate)
        self.ent_coef_optimizer = torch.optim.Adam([self.log_ent_coef], lr=rate)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions that standard normal noise z selects, and their log-probabilities.

        a = tanh(u) with u = mean + std z is a change of variables from z, component by component:

            log p(a)         = log N(z; 0, 1) - log |da/dz|
            log |da/dz|      = log std + log(1 - tanh(u)^2)
            1 - tanh(u)^2    = 4 / (e^u + e^-u)^2

        The last line's logarithm, 2 log 2 - 2 logaddexp(u, -u), is accurate also where tanh(u)
        rounds to one and log(1 - a^2) would be infinite.
        """
        mean, log_std = self.actor(obs).chunk(2, dim=-1)
        log_std = torch.clamp(log_std, *LOG_STD_BOUNDS)
        u = mean + torch.exp(log_std) * noise
        log_density = -(noise**2) / 2 - math.log(2 * math.pi) / 2
        log_slope = log_std + 2 * math.log(2) - 2 * torch.logaddexp(u, -u)
        return torch.tanh(u), (log_density - log_slope).sum(dim=-1)

    @torch.no_grad()
    def greedy_action(self, obs: Any) -> Tensor:
        """Return tanh of the mean."""
        return torch.tanh(self.actor(torch.as_tensor(obs))[:ACTION_SIZE])

    @torch.no_grad()
    def explore(self, obs: Any) -> Tensor:
        """Return a sample of the policy; there is no other exploration."""
        return self.sample(torch.as_tensor(obs), torch.randn(ACTION_SIZE))[0]


def value(critic: nn.Sequential, obs: Tensor, actions: Tensor) -> Tensor:
    """Return Q(s, a), one number per row."""
    return critic(torch.cat([obs, actions], dim=1)).squeeze(1)  # type: ignore[no-any-return]


class Replay:
    """A ring of the last ``capacity`` transitions, with one array per field."""

    def __init__(self, capacity: int) -> None:
        self.columns = {
            "obs": torch.zeros(capacity, OBS_SIZE),
            "actions": torch.zeros(capacity, ACTION_SIZE),
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

    def step(self, action: Tensor) -> None:
        """Take one action in [-1, 1], and reset the environment if it ends the episode."""
        next_obs, reward, terminated, truncated, _ = self.env.step(MAX_TORQUE * action.numpy())
        # Stored before the reset below, so that next_obs is the true successor also of a last
        # step. Only terminations are stored; after the time limit, which is all that ends a
        # Pendulum episode, targets bootstrap.
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
def sac_targets(agent: Agent, batch: dict[str, Tensor], noise: Tensor, gamma: float) -> Tensor:
    """Return the soft targets of the critics, with a next action a' sampled from the policy.

    y = r + gamma (1 - terminated) ( min_i Q_target_i(s', a') - ent_coef log p(a' | s') )

    The minimum of two critics reduces overestimation (Fujimoto et al. 2018, arXiv:1802.09477).
    """
    next_obs = batch["next_obs"]
    actions, logprobs = agent.sample(next_obs, noise)
    least = torch.min(
        value(agent.target_1, next_obs, actions), value(agent.target_2, next_obs, actions)
    )
    soft = least - torch.exp(agent.log_ent_coef) * logprobs
    return batch["rewards"] + gamma * (1 - batch["terminated"]) * soft


def sac_update(
    agent: Agent, batch: dict[str, Tensor], noise: Tensor, args: argparse.Namespace
) -> dict[str, Tensor]:
    """Make one gradient step of critics, policy and entropy coefficient on a batch.

    ``noise`` is (2, batch, action): standard normal, for the next actions and the current ones.
    """
    obs = batch["obs"]
    targets = sac_targets(agent, batch, noise[0], args.gamma)
    errors_1 = value(agent.critic_1, obs, batch["actions"]) - targets
    errors_2 = value(agent.critic_2, obs, batch["actions"]) - targets
    critic_loss = 0.5 * (errors_1**2).mean() + 0.5 * (errors_2**2).mean()
    descend(agent.critic_optimizer, critic_loss)

    # L_actor = E[ ent_coef log p(a | s) - min_i Q_i(s, a) ],  a a function of the policy and noise.
    # The critics accumulate gradients here, too; their next step clears them first.
    actions, logprobs = agent.sample(obs, noise[1])
    least = torch.min(value(agent.critic_1, obs, actions), value(agent.critic_2, obs, actions))
    ent_coef = torch.exp(agent.log_ent_coef.detach())
    actor_loss = (ent_coef * logprobs - least).mean()
    descend(agent.actor_optimizer, actor_loss)

    # The entropy is -E[log p]: below its target the gradient raises ent_coef, above it lowers it.
    shortfall = (logprobs.detach() + args.target_entropy).mean()
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
    env = gym.make("Pendulum-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            torque = MAX_TORQUE * agent.greedy_action(obs).numpy()
            obs, reward, terminated, truncated, _ = env.step(torque)
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
    collector = Collector(gym.make("Pendulum-v1"), replay, args.seed)

    losses: dict[str, Tensor] = {}
    start = time.perf_counter()
    for step in range(1, args.total_timesteps + 1):
        if step <= args.learning_starts:
            collector.step(2 * torch.rand(ACTION_SIZE) - 1)
        else:
            collector.step(agent.explore(collector.obs))
            batch = replay.rows(torch.randint(len(replay), (args.batch_size,)))
            noise = torch.randn(2, args.batch_size, ACTION_SIZE)
            losses = sac_update(agent, batch, noise, args)

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
