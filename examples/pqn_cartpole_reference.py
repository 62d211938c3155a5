"""The whole of PQN on CartPole-v1 in one file (Gallici et al. 2024, arXiv:2407.04811).

    python examples/pqn_cartpole_reference.py --total-timesteps 500000 --seed 1

Read it from the bottom: `main` alternates between stepping every environment and learning from the
steps. There is no replay, and layer normalisation takes the place of a target network.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

Array: TypeAlias = np.ndarray[Any, Any]
OBS_SIZE, NUM_ACTIONS = 4, 2


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--total-timesteps", type=int, default=500_000, help="environment steps in total")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add("--num-envs", type=int, default=8, help="number of environments")
    add("--num-steps", type=int, default=32, help="steps of each environment per rollout")
    add("--num-minibatches", type=int, default=2, help="minibatches per epoch")
    add("--update-epochs", type=int, default=4, help="epochs per rollout")
    add("--learning-rate", type=float, default=1e-3, help="initial learning rate of RAdam")
    add("--anneal-lr", action=switch, default=True, help="anneal the learning rate to zero")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--q-lambda", type=float, default=0.65, help="decay of the lambda returns")
    add("--exploration-fraction", type=float, default=0.2, help="run fraction of epsilon decay")
    add("--exploration-initial-eps", type=float, default=1.0, help="epsilon at the start")
    add("--exploration-final-eps", type=float, default=0.05, help="final epsilon")
    add("--max-grad-norm", type=float, default=10.0, help="clip gradients to this norm")
    add("--hidden-sizes", type=int, nargs="+", default=[120, 84], help="widths of the layers")
    add("--eval-episodes", type=int, default=20, help="greedy episodes after training")
    return parser.parse_args(argv)


def make_network(hidden_sizes: Sequence[int]) -> nn.Sequential:
    """Return a network of action values: every hidden layer is normalised, then rectified."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise([OBS_SIZE, *hidden_sizes]):
        layers += [nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden_sizes[-1], NUM_ACTIONS))


def make_optimizer(network: nn.Sequential, learning_rate: float) -> torch.optim.Optimizer:
    """Return RAdam, whose first steps are small while its averages know few gradients."""
    return torch.optim.RAdam(network.parameters(), lr=learning_rate)


class Rollout(NamedTuple):
    """Tensors of (time, environment, ...); ``next_obs`` is the observation after the last step."""

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor
    """The true last observation of each episode that ended, which ``obs`` does not contain."""
    next_obs: Tensor


def make_envs(num_envs: int) -> SyncVectorEnv:
    """Return CartPoles that are reset within the step that ends an episode."""
    return SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
    )


def epsilon(step: int, args: argparse.Namespace) -> float:
    """Return the fraction of random actions: linear at first, then constant."""
    done = min(1.0, step / (args.exploration_fraction * args.total_timesteps))
    return float((1 - done) * args.exploration_initial_eps + done * args.exploration_final_eps)


@torch.no_grad()
def explore(network: nn.Sequential, obs: Tensor, chance: float) -> Tensor:
    """Return random actions with probability ``chance``, else those of the largest value."""
    greedy = network(obs).argmax(dim=-1)
    anything = torch.randint_like(greedy, NUM_ACTIONS)
    return torch.where(torch.rand(len(obs)) < chance, anything, greedy)


def collect(
    envs: SyncVectorEnv, network: nn.Sequential, obs: Array, num_steps: int, chance: float
) -> Rollout:
    """Step every environment ``num_steps`` times, starting at ``obs``."""
    dtype = next(network.parameters()).dtype
    steps: list[tuple[Array, ...]] = []
    for _ in range(num_steps):
        action = explore(network, torch.as_tensor(obs, dtype=dtype), chance).numpy()
        next_obs, reward, terminated, truncated, infos = envs.step(action)
        final_obs = np.zeros_like(obs)
        for i in np.flatnonzero(terminated | truncated):
            final_obs[i] = infos["final_obs"][i]
        steps.append((obs, action, reward, terminated, truncated, final_obs))
        obs = next_obs
    stored = [torch.as_tensor(np.stack(column)) for column in zip(*steps, strict=True)]
    floats = [x.to(dtype) if x.is_floating_point() else x for x in stored]
    return Rollout._make([*floats, torch.as_tensor(obs, dtype=dtype)])


@torch.no_grad()
def compute_returns(
    network: nn.Sequential, rollout: Rollout, gamma: float, q_lambda: float
) -> Tensor:
    """Return lambda returns, with V(s) = max_a Q(s, a).

    R_t = r_t + gamma F_t, where what follows, F_t, is

        0             where the episode terminated with the action at t,
        V(final_obs)  where it was truncated with the action at t,
        V(next_obs)   at the end of the rollout,
        (1 - lambda) V(s_{t+1}) + lambda R_{t+1}  elsewhere.
    """
    values = network(rollout.obs).amax(dim=-1)
    final_values = network(rollout.final_obs).amax(dim=-1)
    returns = torch.zeros_like(rollout.rewards)
    following = network(rollout.next_obs).amax(dim=-1)
    for t in range(len(returns) - 1, -1, -1):
        following = torch.where(rollout.truncated[t], final_values[t], following)
        following = torch.where(rollout.terminated[t], 0.0, following)
        returns[t] = rollout.rewards[t] + gamma * following
        following = (1 - q_lambda) * values[t] + q_lambda * returns[t]
    return returns


def pqn_update(
    network: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    args: argparse.Namespace,
    orders: Sequence[Tensor],
) -> dict[str, float]:
    """Make the updates of a rollout; ``orders`` is the order of its rows in each epoch."""
    returns = compute_returns(network, rollout, args.gamma, args.q_lambda).flatten()
    obs, actions = rollout.obs.flatten(0, 1), rollout.actions.flatten()
    losses, sizes = [], []
    for order in orders:
        for rows in order.chunk(args.num_minibatches):
            # The loss is half the mean squared error of the values of the actions taken.
            chosen = network(obs[rows]).gather(1, actions[rows].unsqueeze(1)).squeeze(1)
            loss = 0.5 * ((chosen - returns[rows]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
            sizes.append(chosen.mean().item())
    return {"loss": float(np.mean(losses)), "q_mean": float(np.mean(sizes))}


@torch.no_grad()
def evaluate(network: nn.Sequential, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = gym.make("CartPole-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = network(torch.as_tensor(obs).unsqueeze(0)).argmax().item()
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    env.close()
    return returns


def finished_returns(running: Array, rollout: Rollout) -> list[float]:
    """Return the returns of ended episodes; ``running`` holds those of unfinished ones."""
    finished = []
    dones = (rollout.terminated | rollout.truncated).numpy()
    for reward, done in zip(rollout.rewards.numpy(), dones, strict=True):
        running += reward
        finished += running[done].tolist()
        running[done] = 0.0
    return finished


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report, and return the mean return of the final evaluation."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # more threads make networks this small slower
    torch.manual_seed(args.seed)
    network = make_network(args.hidden_sizes)
    optimizer = make_optimizer(network, args.learning_rate)
    envs = make_envs(args.num_envs)
    obs, _ = envs.reset(seed=args.seed)
    running, recent = np.zeros(args.num_envs), deque[float](maxlen=100)

    rows = args.num_envs * args.num_steps
    iterations = math.ceil(args.total_timesteps / rows)
    report_every = max(1, iterations // 50)
    start = time.perf_counter()
    for iteration in range(iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / iterations)
        chance = epsilon(iteration * rows, args)
        rollout = collect(envs, network, obs, args.num_steps, chance)
        obs = rollout.next_obs.numpy()
        recent.extend(finished_returns(running, rollout))
        orders = [torch.randperm(rows) for _ in range(args.update_epochs)]
        losses = pqn_update(network, optimizer, rollout, args, orders)

        if recent and (iteration % report_every == 0 or iteration == iterations - 1):
            step, report = (iteration + 1) * rows, f"return {np.mean(recent):6.1f}"
            report += "".join(f"  {name} {loss:8.4f}" for name, loss in losses.items())
            print(f"step {step:7d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    envs.close()

    returns = evaluate(network, args.eval_episodes, seed=args.seed + 10_000)
    print(
        f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    )
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
