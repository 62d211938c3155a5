"""The whole of PPO on CartPole-v1 in one file (Schulman et al. 2017, arXiv:1707.06347).

    python examples/ppo_cartpole_reference.py --total-timesteps 100000 --seed 1

Read it from the bottom: `main` alternates between collecting a rollout and learning from it.
"""

from __future__ import annotations

import argparse
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
from torch.distributions import Categorical

Array: TypeAlias = np.ndarray[Any, Any]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--total-timesteps", type=int, default=100_000, help="environment steps in total")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add("--num-envs", type=int, default=8, help="number of environments")
    add("--num-steps", type=int, default=128, help="steps of each environment per rollout")
    add("--num-minibatches", type=int, default=4, help="minibatches per epoch")
    add("--update-epochs", type=int, default=10, help="epochs per rollout")
    add("--learning-rate", type=float, default=1e-3, help="initial learning rate of Adam")
    add("--anneal-lr", action=switch, default=True, help="anneal the learning rate to zero")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--gae-lambda", type=float, default=0.95, help="decay of the advantage estimator")
    add("--clip-coef", type=float, default=0.2, help="clip range of the ratio")
    add("--ent-coef", type=float, default=0.01, help="weight of the entropy bonus")
    add("--vf-coef", type=float, default=0.5, help="weight of the value loss")
    add("--max-grad-norm", type=float, default=0.5, help="clip gradients to this norm")
    add("--eval-episodes", type=int, default=20, help="greedy episodes after training")
    args = parser.parse_args(argv)
    if args.num_envs * args.num_steps % args.num_minibatches:
        parser.error("--num-minibatches must divide num_envs * num_steps")
    return args


class Agent(nn.Module):
    """A policy over two actions and a value function, as two separate networks."""

    def __init__(self) -> None:
        super().__init__()
        # A small last layer makes the initial policy almost uniform.
        self.actor = mlp(4, 2, output_gain=0.01)
        self.critic = mlp(4, 1, output_gain=1.0)

    def policy(self, obs: Tensor) -> Categorical:
        """Return the action distribution of each row."""
        return Categorical(logits=self.actor(obs))

    def value(self, obs: Tensor) -> Tensor:
        """Return the value of each row."""
        return self.critic(obs).squeeze(-1)  # type: ignore[no-any-return]


def mlp(n_in: int, n_out: int, output_gain: float) -> nn.Sequential:
    """Return two hidden layers of 64 with tanh; orthogonal weights, zero biases."""
    layers = [nn.Linear(n_in, 64), nn.Linear(64, 64), nn.Linear(64, n_out)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), output_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


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
    """Return CartPole environments that reset within the step that ends an episode."""
    return SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
    )


@torch.no_grad()
def collect(envs: SyncVectorEnv, agent: Agent, obs: Array, num_steps: int) -> Rollout:
    """Step every environment ``num_steps`` times, starting at ``obs``."""
    dtype = next(agent.parameters()).dtype
    steps: list[tuple[Array, ...]] = []
    for _ in range(num_steps):
        action = agent.policy(torch.as_tensor(obs, dtype=dtype)).sample().numpy()
        next_obs, reward, terminated, truncated, infos = envs.step(action)
        final_obs = np.zeros_like(obs)
        for i in np.flatnonzero(terminated | truncated):
            final_obs[i] = infos["final_obs"][i]
        steps.append((obs, action, reward, terminated, truncated, final_obs))
        obs = next_obs
    stored = [torch.as_tensor(np.stack(column)) for column in zip(*steps, strict=True)]
    floats = [x.to(dtype) if x.is_floating_point() else x for x in stored]
    return Rollout._make([*floats, torch.as_tensor(obs, dtype=dtype)])


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438); returns advantages and returns.

    dones[t] is 1 where the episode ended with the action at t, bootstrap[t] is V(final_obs) where
    it was truncated there and 0 elsewhere. The value after step t is

        next_t  = (1 - dones[t]) V_{t+1} + bootstrap[t]
        delta_t = r_t + gamma next_t - V_t
        A_t     = delta_t + gamma lambda (1 - dones[t]) A_{t+1}
    """
    advantages = torch.zeros_like(rewards)
    following_value, following_advantage = last_value, torch.zeros_like(last_value)
    for t in range(len(rewards) - 1, -1, -1):
        going_on = 1 - dones[t]
        following = going_on * following_value + bootstrap[t]
        delta = rewards[t] + gamma * following - values[t]
        advantages[t] = delta + gamma * gae_lambda * going_on * following_advantage
        following_value, following_advantage = values[t], advantages[t]
    return advantages, advantages + values


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: argparse.Namespace) -> dict[str, Tensor]:
    """Flatten a rollout into rows, with values and log-probabilities of the acting policy."""
    values = agent.value(rollout.obs)
    # A fall terminates the episode: nothing is bootstrapped. The time limit truncates it: the
    # return is bootstrapped with V(final_obs). A step that is both counts as terminated.
    cut_short = rollout.truncated & ~rollout.terminated
    bootstrap = torch.where(cut_short, agent.value(rollout.final_obs), 0.0)
    dones = (rollout.terminated | rollout.truncated).to(values.dtype)
    last_value = agent.value(rollout.next_obs)
    advantages, returns = compute_gae(
        rollout.rewards, values, dones, bootstrap, last_value, args.gamma, args.gae_lambda
    )
    logprobs = agent.policy(rollout.obs).log_prob(rollout.actions)
    names = ("obs", "actions", "logprobs", "advantages", "returns")
    grids = (rollout.obs, rollout.actions, logprobs, advantages, returns)
    return {name: grid.flatten(0, 1) for name, grid in zip(names, grids, strict=True)}


def ppo_update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    minibatch_indices: Tensor,
    args: argparse.Namespace,
) -> dict[str, Tensor]:
    """Make one gradient step on the rows ``minibatch_indices`` of ``batch``."""
    rows = {name: tensor[minibatch_indices] for name, tensor in batch.items()}
    advantages = rows["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # L_policy = -E[ min(r A, clip(r, 1 - c, 1 + c) A) ],  r = pi(a|s) / pi_old(a|s)
    policy = agent.policy(rows["obs"])
    ratio = torch.exp(policy.log_prob(rows["actions"]) - rows["logprobs"])
    clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = 0.5 * ((agent.value(rows["obs"]) - rows["returns"]) ** 2).mean()
    entropy = policy.entropy().mean()

    optimizer.zero_grad()
    (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return {name: loss.detach() for name, loss in losses.items()}


@torch.no_grad()
def evaluate(agent: Agent, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = gym.make("CartPole-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = agent.actor(torch.as_tensor(obs).unsqueeze(0)).argmax().item()
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
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs = make_envs(args.num_envs)
    obs, _ = envs.reset(seed=args.seed)
    running, recent = np.zeros(args.num_envs), deque[float](maxlen=100)

    rows = args.num_envs * args.num_steps
    iterations = math.ceil(args.total_timesteps / rows)
    start = time.perf_counter()
    for iteration in range(iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / iterations)
        rollout = collect(envs, agent, obs, args.num_steps)
        obs = rollout.next_obs.numpy()
        recent.extend(finished_returns(running, rollout))

        batch = make_batch(agent, rollout, args)
        for _ in range(args.update_epochs):
            for minibatch_indices in torch.randperm(rows).chunk(args.num_minibatches):
                losses = ppo_update(agent, optimizer, batch, minibatch_indices, args)

        if recent and (iteration % 10 == 0 or iteration == iterations - 1):
            step, report = (iteration + 1) * rows, f"return {np.mean(recent):6.1f}"
            report += "".join(f"  {name} {loss:8.4f}" for name, loss in losses.items())
            print(f"step {step:7d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    envs.close()

    returns = evaluate(agent, args.eval_episodes, seed=args.seed + 10_000)
    print(
        f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    )
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
