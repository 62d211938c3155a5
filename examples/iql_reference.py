"""The whole of IQL in one file (Kostrikov et al. 2021, arXiv:2110.06169).

    python examples/iql_reference.py --dataset FOLDER --env-id Pendulum-v1 --updates 20000

It learns from a Minari dataset (FOLDER/data/main_data.hdf5) and steps an environment only to
evaluate. Read it from the bottom: `main` samples recorded transitions and calls `iql_update`.
It takes Box actions, which are in [-1, 1] everywhere except in the dataset and in the
environment, and Discrete ones.
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
from torch.distributions import Categorical, Distribution, Independent, Normal

LOG_STD_BOUNDS = (-5.0, 2.0)


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
    add("--expectile", type=float, default=0.7, help="expectile of action values that V learns")
    add("--inverse-temperature", type=float, default=3.0, help="factor of advantages in weights")
    add("--max-weight", type=float, default=100.0, help="largest weight of an action")
    add("--log-std-init", type=float, default=-1.0, help="logarithm of the first deviation")
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
    """A policy, two critics with target networks, a state value, and their optimizers.

    Continuous actions are an input of the critics; of discrete ones all values are outputs.
    """

    def __init__(self, obs_size: int, space: gym.Space[Any], args: argparse.Namespace) -> None:
        super().__init__()
        widths = args.hidden_sizes
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        size = gym.spaces.flatdim(space)
        ends = (obs_size, size) if self.is_discrete else (obs_size + size, 1)
        self.actor = mlp(obs_size, *widths, size)
        self.log_std = nn.Parameter(torch.full((size,), args.log_std_init))
        self.critic_1, self.critic_2 = (mlp(ends[0], *widths, ends[1]) for _ in range(2))
        self.target_1, self.target_2 = copy.deepcopy(self.critic_1), copy.deepcopy(self.critic_2)
        self.value = mlp(obs_size, *widths, 1)

        critics = [*self.critic_1.parameters(), *self.critic_2.parameters()]
        policy = [*self.actor.parameters(), self.log_std]
        self.critic_optimizer = torch.optim.Adam(critics, lr=args.learning_rate)
        self.value_optimizer = torch.optim.Adam(self.value.parameters(), lr=args.learning_rate)
        self.actor_optimizer = torch.optim.Adam(policy, lr=args.learning_rate)

    def policy(self, obs: Tensor) -> Distribution:
        """Return the distribution of actions; a Gaussian's deviation is the same in all states."""
        if self.is_discrete:
            return Categorical(logits=self.actor(obs))
        std = torch.exp(torch.clamp(self.log_std, *LOG_STD_BOUNDS))
        return Independent(Normal(torch.tanh(self.actor(obs)), std), 1)

    def action_value(self, critic: nn.Sequential, obs: Tensor, actions: Tensor) -> Tensor:
        """Return Q(s, a), one number per row."""
        if self.is_discrete:
            return critic(obs)[torch.arange(len(obs)), actions]  # type: ignore[no-any-return]
        return critic(torch.cat([obs, actions], dim=1)).squeeze(1)  # type: ignore[no-any-return]

    def state_value(self, obs: Tensor) -> Tensor:
        """Return V(s), one number per row."""
        return self.value(obs).squeeze(1)  # type: ignore[no-any-return]

    def greedy_action(self, obs: Tensor) -> Tensor:
        """Return the most likely action."""
        return self.policy(obs).mode


def read_transitions(folder: Path, space: gym.Space[Any]) -> dict[str, Tensor]:
    """Return all recorded transitions, one tensor per field.

    An episode of T transitions has T + 1 observations, so that the successor of each is the next
    one, also at the end of the episode. Only terminations are kept: truncated episodes would have
    continued, and targets bootstrap there.
    """
    episodes = []
    with h5py.File(folder / "data" / "main_data.hdf5") as file:
        for name in sorted(file, key=lambda name: int(name.removeprefix("episode_"))):
            recorded = {key: file[name][key][:] for key in ("observations", "actions", "rewards")}
            actions = recorded["actions"]
            if isinstance(space, gym.spaces.Box):
                actions = 2 * (actions - space.low) / (space.high - space.low) - 1
            episodes.append(
                {
                    "obs": recorded["observations"][:-1],
                    "actions": actions,
                    "rewards": recorded["rewards"],
                    "next_obs": recorded["observations"][1:],
                    "terminated": file[name]["terminations"][:],
                }
            )
    joined = {key: np.concatenate([one[key] for one in episodes]) for key in episodes[0]}
    data = {key: torch.as_tensor(column, dtype=torch.float32) for key, column in joined.items()}
    if isinstance(space, gym.spaces.Discrete):
        data["actions"] = torch.as_tensor(joined["actions"] - space.start)
    return data


def iql_update(
    agent: Agent, batch: dict[str, Tensor], args: argparse.Namespace
) -> dict[str, Tensor]:
    """Make one gradient step of all networks on a batch, and move the targets.

    V(s) estimates an upper expectile of the values of recorded actions; no other action is ever
    valued. The policy imitates the recorded actions, the more the better they are than V(s):

        L_V     = E[ |expectile - 1(d < 0)| d^2 ],  d = min_i Q_target_i(s, a) - V(s)
        L_Q     = sum_i E[ (r + gamma (1 - terminated) V(s') - Q_i(s, a))^2 ] / 2
        L_actor = -E[ min( exp(inverse_temperature d), max_weight ) log pi(a | s) ]

    L_Q is that of V before this step, the weights are those of V after it.
    """
    obs, data_actions = batch["obs"], batch["actions"]
    with torch.no_grad():
        target_q = torch.min(
            agent.action_value(agent.target_1, obs, data_actions),
            agent.action_value(agent.target_2, obs, data_actions),
        )
        next_values = agent.state_value(batch["next_obs"])
        targets = batch["rewards"] + args.gamma * (1 - batch["terminated"]) * next_values
    differences = target_q - agent.state_value(obs)
    slopes = torch.abs(args.expectile - (differences < 0).to(differences.dtype))
    value_loss = (slopes * differences**2).mean()
    descend(agent.value_optimizer, value_loss)

    errors_1 = agent.action_value(agent.critic_1, obs, data_actions) - targets
    errors_2 = agent.action_value(agent.critic_2, obs, data_actions) - targets
    critic_loss = 0.5 * (errors_1**2).mean() + 0.5 * (errors_2**2).mean()
    descend(agent.critic_optimizer, critic_loss)

    with torch.no_grad():
        advantages = target_q - agent.state_value(obs)
        weights = torch.exp(args.inverse_temperature * advantages).clamp(max=args.max_weight)
    logprobs = agent.policy(obs).log_prob(data_actions)
    actor_loss = -(weights * logprobs).mean()
    descend(agent.actor_optimizer, actor_loss)

    follow(agent.target_1, agent.critic_1, args.tau)
    follow(agent.target_2, agent.critic_2, args.tau)
    losses = {"value_loss": value_loss, "critic_loss": critic_loss, "actor_loss": actor_loss}
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
    data = read_transitions(args.dataset, env.action_space)
    agent = Agent(data["obs"].shape[1], env.action_space, args)

    for update in range(1, args.updates + 1):
        rows = torch.randint(len(data["obs"]), (args.batch_size,))
        batch = {name: column[rows] for name, column in data.items()}
        losses = iql_update(agent, batch, args)
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
