"""The whole of CQL for continuous actions in one file (Kumar et al. 2020, arXiv:2006.04779).

    python examples/cql_reference.py --dataset FOLDER --env-id Pendulum-v1 --updates 20000

It learns from a Minari dataset (FOLDER/data/main_data.hdf5) and steps an environment only to
evaluate. Read it from the bottom: `main` samples recorded transitions and calls `cql_update`.
Actions are in [-1, 1] everywhere except in the dataset and in the environment.
It is SAC whose critics also learn low values for actions outside the data.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import h5py
import numpy as np
import torch
from torch import Tensor, nn

LOG_STD_BOUNDS = (-20.0, 2.0)
LARGEST_FACTOR = 1e6


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="folder of a Minari dataset")
    add("--env-id", default="Pendulum-v1", help="environment that was recorded")
    add("--updates", type=int, default=20_000, help="gradient steps")
    add("--seed", type=int, default=1, help="seed of weights, batches and environment")
    add("--learning-rate", type=float, default=3e-4, help="learning rate of the critics")
    add("--batch-size", type=int, default=256, help="transitions per update")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--tau", type=float, default=0.005, help="step of targets towards the networks")
    add("--actor-learning-rate", type=float, default=1e-4, help="of policy and entropy weight")
    add("--ent-coef-init", type=float, default=1.0, help="weight of the entropy at the start")
    add("--conservative-weight", type=float, default=5.0, help="weight of the gap")
    add("--conservative-threshold", type=float, help="learn a factor that keeps gaps near this")
    add("--num-action-samples", type=int, default=10, help="actions of each of 3 kinds")
    add("--soft-backup", action="store_true", help="targets with sampled actions and entropy")
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
    """A policy, two critics with target networks, learnt coefficients, and optimizers."""

    def __init__(self, obs_size: int, action_size: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.actor = mlp(obs_size, *args.hidden_sizes, 2 * action_size)
        self.critic_1 = mlp(obs_size + action_size, *args.hidden_sizes, 1)
        self.critic_2 = mlp(obs_size + action_size, *args.hidden_sizes, 1)
        self.target_1, self.target_2 = copy.deepcopy(self.critic_1), copy.deepcopy(self.critic_2)
        self.log_ent_coef = nn.Parameter(torch.tensor(math.log(args.ent_coef_init)))
        self.log_factor = nn.Parameter(torch.zeros(()))

        critics = [*self.critic_1.parameters(), *self.critic_2.parameters()]
        rate, actor_rate = args.learning_rate, args.actor_learning_rate
        self.critic_optimizer = torch.optim.Adam(critics, lr=rate)
        self.factor_optimizer = torch.optim.Adam([self.log_factor], lr=rate)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=actor_rate)
        self.ent_coef_optimizer = torch.optim.Adam([self.log_ent_coef], lr=actor_rate)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions that standard normal noise selects, and their log-probabilities.

        With u = mean + std noise and a = tanh(u):

            log p(a) = log N(u; mean, std) - log(1 - tanh(u)^2),  1 - tanh(u)^2 = 4 / (e^u + e^-u)^2

        ``noise`` may have one dimension more than ``obs``, for several actions per observation.
        """
        mean, log_std = self.actor(obs).chunk(2, dim=-1)
        log_std = torch.clamp(log_std, *LOG_STD_BOUNDS)
        u = mean + torch.exp(log_std) * noise
        log_normal = -(noise**2) / 2 - log_std - math.log(2 * math.pi) / 2
        log_slope = 2 * math.log(2) - 2 * torch.logaddexp(u, -u)
        return torch.tanh(u), (log_normal - log_slope).sum(dim=-1)

    def greedy_action(self, obs: Tensor) -> Tensor:
        """Return tanh of the mean."""
        return torch.tanh(self.actor(obs).chunk(2, dim=-1)[0])


class Noise(NamedTuple):
    """Random numbers of one update; ``uniform`` is in [-1, 1], the others are standard normal."""

    next_actions: Tensor
    actions: Tensor
    samples: Tensor
    """(samples, batch, action), like the two that follow."""
    next_samples: Tensor
    uniform: Tensor

    @staticmethod
    def draw(samples: int, batch: int, action_size: int) -> Noise:
        """Return new random numbers."""
        one, many = (batch, action_size), (samples, batch, action_size)
        normal = [torch.randn(shape) for shape in (one, one, many, many)]
        return Noise._make([*normal, 2 * torch.rand(many) - 1])


def value(critic: nn.Sequential, obs: Tensor, actions: Tensor) -> Tensor:
    """Return Q(s, a), one number per row."""
    return critic(torch.cat([obs, actions], dim=-1)).squeeze(-1)  # type: ignore[no-any-return]


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


@torch.no_grad()
def cql_targets(
    agent: Agent, batch: dict[str, Tensor], noise: Tensor, args: argparse.Namespace
) -> Tensor:
    """Return the targets of the critics: those of SAC, or with the most likely action a'.

    y = r + gamma (1 - terminated) min_i Q_target_i(s', a')
    """
    next_obs = batch["next_obs"]
    actions, logprobs = agent.sample(next_obs, noise)
    if not args.soft_backup:
        actions, logprobs = agent.greedy_action(next_obs), torch.zeros_like(logprobs)
    least = torch.min(
        value(agent.target_1, next_obs, actions), value(agent.target_2, next_obs, actions)
    )
    soft = least - torch.exp(agent.log_ent_coef) * logprobs
    targets: Tensor = batch["rewards"] + args.gamma * (1 - batch["terminated"]) * soft
    return targets


@torch.no_grad()
def sample_actions(agent: Agent, batch: dict[str, Tensor], noise: Noise) -> tuple[Tensor, Tensor]:
    """Return actions (3 samples, batch, action) and log-probabilities of their distributions.

    They come from the policy at the observations, from the policy at the next observations, and
    from the uniform distribution, whose density is 1/2 per component. All are valued at the
    observations.
    """
    own, own_logprobs = agent.sample(batch["obs"], noise.samples)
    following, following_logprobs = agent.sample(batch["next_obs"], noise.next_samples)
    flat = torch.full_like(own_logprobs, -own.shape[-1] * math.log(2))
    actions = torch.cat([own, following, noise.uniform])
    return actions, torch.cat([own_logprobs, following_logprobs, flat])


def conservative_gap(
    critic: nn.Sequential, batch: dict[str, Tensor], actions: Tensor, logprobs: Tensor
) -> Tensor:
    """Return how much higher a critic values all actions than the recorded one.

    E[ logsumexp_k( Q(s, a_k) - log p(a_k) ) - Q(s, a) ],  the first an estimate, by importance
    sampling, of the logarithm of the integral of exp Q(s, .) up to a constant
    """
    rows = batch["obs"].expand(len(actions), -1, -1)
    soft_maximum = torch.logsumexp(value(critic, rows, actions) - logprobs, dim=0)
    return (soft_maximum - value(critic, batch["obs"], batch["actions"])).mean()


def cql_update(
    agent: Agent, batch: dict[str, Tensor], noise: Noise, args: argparse.Namespace
) -> dict[str, Tensor]:
    """Make one gradient step of critics, policy and coefficients on a batch; move the targets."""
    obs, data_actions = batch["obs"], batch["actions"]
    targets = cql_targets(agent, batch, noise.next_actions, args)
    samples, sample_logprobs = sample_actions(agent, batch, noise)
    errors_1 = value(agent.critic_1, obs, data_actions) - targets
    errors_2 = value(agent.critic_2, obs, data_actions) - targets
    gap_1 = conservative_gap(agent.critic_1, batch, samples, sample_logprobs)
    gap_2 = conservative_gap(agent.critic_2, batch, samples, sample_logprobs)
    # With a threshold, a Lagrange multiplier (the factor) rises while gaps are larger than it.
    threshold = args.conservative_threshold or 0.0
    excess = args.conservative_weight * (gap_1 - threshold + gap_2 - threshold)
    factor = torch.clamp(torch.exp(agent.log_factor), max=LARGEST_FACTOR)
    critic_loss = (errors_1**2).mean() + (errors_2**2).mean() + factor.detach() * excess
    descend(agent.critic_optimizer, critic_loss)
    if args.conservative_threshold is not None:
        descend(agent.factor_optimizer, -factor * excess.detach())

    # The rest is SAC: L_actor = E[ ent_coef log p(a | s) - min_i Q_i(s, a) ]
    actions, logprobs = agent.sample(obs, noise.actions)
    least = torch.min(value(agent.critic_1, obs, actions), value(agent.critic_2, obs, actions))
    ent_coef = torch.exp(agent.log_ent_coef.detach())
    actor_loss = (ent_coef * logprobs - least).mean()
    descend(agent.actor_optimizer, actor_loss)
    # The entropy is -E[log p]; its target is minus the number of components of an action.
    shortfall = (logprobs.detach() - actions.shape[1]).mean()
    descend(agent.ent_coef_optimizer, -agent.log_ent_coef * shortfall)

    follow(agent.target_1, agent.critic_1, args.tau)
    follow(agent.target_2, agent.critic_2, args.tau)
    gap = (gap_1 + gap_2) / 2
    losses = {"critic_loss": critic_loss, "gap": gap, "actor_loss": actor_loss}
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


@torch.no_grad()
def evaluate(agent: Agent, env: gym.Env[Any, Any], episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes."""
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = agent.greedy_action(torch.as_tensor(obs, dtype=torch.float32)).numpy()
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
    agent = Agent(data["obs"].shape[1], data["actions"].shape[1], args)

    for update in range(1, args.updates + 1):
        rows = torch.randint(len(data["obs"]), (args.batch_size,))
        batch = {name: column[rows] for name, column in data.items()}
        noise = Noise.draw(args.num_action_samples, *batch["actions"].shape)
        losses = cql_update(agent, batch, noise, args)
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
