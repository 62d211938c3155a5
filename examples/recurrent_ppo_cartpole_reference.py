"""The whole of recurrent PPO in one file, on a CartPole-v1 that does not show its velocities.

    python examples/recurrent_ppo_cartpole_reference.py --total-timesteps 100000 --seed 1

PPO (Schulman et al. 2017, arXiv:1707.06347) with LSTMs, which can infer the hidden velocities from
earlier observations. Read it from the bottom: `main` alternates between collecting a rollout and
learning from it.
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
OBS_SIZE, NUM_ACTIONS, SIZE = 2, 2, 64


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--total-timesteps", type=int, default=100_000, help="environment steps in total")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add("--num-envs", type=int, default=8, help="number of environments")
    add("--num-steps", type=int, default=128, help="steps of each environment per rollout")
    add("--sequence-length", type=int, default=32, help="steps that gradients flow back through")
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
    if args.num_steps % args.sequence_length:
        parser.error("--sequence-length must divide num_steps")
    if args.num_envs * args.num_steps // args.sequence_length % args.num_minibatches:
        parser.error("--num-minibatches must divide num_envs * num_steps / sequence_length")
    return args


class PositionsOnly(gym.ObservationWrapper[Any, Any, Any]):
    """Removes the velocities of the cart and the pole from observations."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-math.inf, math.inf, (OBS_SIZE,))

    def observation(self, observation: Array) -> Array:
        """Return the cart's position and the pole's angle."""
        return observation[[0, 2]]


class LSTMCell(nn.Module):
    """One LSTM step; ``h`` is the output, ``c`` the cell state."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.seen = nn.Linear(n_in, 4 * SIZE)
        self.said = nn.Linear(SIZE, 4 * SIZE)
        for layer in (self.seen, self.said):
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next ``h`` and ``c``."""
        write, keep, new, show = (self.seen(x) + self.said(h)).chunk(4, dim=-1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(c), c


class Agent(nn.Module):
    """A policy over two actions and a value function, each with a separate LSTM.

    A state is (rows, 4, SIZE): h and c of the policy, then h and c of the value function. It is
    zero at the start of an episode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actor_lstm, self.critic_lstm = LSTMCell(OBS_SIZE), LSTMCell(OBS_SIZE)
        # A small last layer makes the initial policy almost uniform.
        self.actor = mlp(NUM_ACTIONS, output_gain=0.01)
        self.critic = mlp(1, output_gain=1.0)

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, values and the next state of each row."""
        h, c, value_h, value_c = state.unbind(1)
        h, c = self.actor_lstm(obs, h, c)
        value_h, value_c = self.critic_lstm(obs, value_h, value_c)
        after = torch.stack((h, c, value_h, value_c), dim=1)
        return self.actor(h), self.critic(value_h).squeeze(-1), after


def mlp(n_out: int, output_gain: float) -> nn.Sequential:
    """Return one hidden layer with tanh; orthogonal weights, zero biases."""
    layers = [nn.Linear(SIZE, 64), nn.Linear(64, n_out)]
    for layer, gain in zip(layers, (math.sqrt(2), output_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def no_memory(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the state at the start of an episode: zeros."""
    return torch.zeros(rows, 4, SIZE, dtype=dtype)


def forget(state: Tensor, where: Tensor) -> Tensor:
    """Return the state, set to zero in the rows where an episode begins."""
    return torch.where(where[:, None, None], 0.0, state)


class Unrolled(NamedTuple):
    """The agent's outputs along sequences, time first."""

    policy: Categorical
    values: Tensor
    before: Tensor
    """State before each observation."""
    after: Tensor
    """State after each observation, before any reset."""


def unroll(agent: Agent, obs: Tensor, starts: Tensor, state: Tensor) -> Unrolled:
    """Run the agent along sequences, resetting the state where ``starts`` is true."""
    logits, values, before, after = [], [], [], []
    for obs_t, starts_t in zip(obs, starts, strict=True):
        before.append(forget(state, starts_t))
        logits_t, values_t, state = agent.step(obs_t, before[-1])
        logits.append(logits_t)
        values.append(values_t)
        after.append(state)
    grids = [torch.stack(rows) for rows in (values, before, after)]
    return Unrolled(Categorical(logits=torch.stack(logits)), *grids)


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
    state: Tensor
    """State before the first step."""


def make_env() -> gym.Env[Any, Any]:
    """Return a CartPole environment without velocities."""
    return PositionsOnly(gym.make("CartPole-v1"))


def make_envs(num_envs: int) -> SyncVectorEnv[Any, Any]:
    """Return environments that reset within the step that ends an episode."""
    return SyncVectorEnv([make_env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@torch.no_grad()
def collect(
    envs: SyncVectorEnv[Any, Any], agent: Agent, obs: Array, state: Tensor, num_steps: int
) -> tuple[Rollout, Tensor]:
    """Step every environment ``num_steps`` times, starting at ``obs`` and ``state``."""
    first_state, dtype = state, state.dtype
    steps: list[tuple[Array, ...]] = []
    for _ in range(num_steps):
        logits, _, state = agent.step(torch.as_tensor(obs, dtype=dtype), state)
        action = Categorical(logits=logits).sample().numpy()
        next_obs, reward, terminated, truncated, infos = envs.step(action)
        final_obs = np.zeros_like(obs)
        for i in np.flatnonzero(terminated | truncated):
            final_obs[i] = infos["final_obs"][i]
        steps.append((obs, action, reward, terminated, truncated, final_obs))
        obs = next_obs
        state = forget(state, torch.as_tensor(terminated | truncated))
    stored = [torch.as_tensor(np.stack(column)) for column in zip(*steps, strict=True)]
    floats = [x.to(dtype) if x.is_floating_point() else x for x in stored]
    rollout = Rollout._make([*floats, torch.as_tensor(obs, dtype=dtype), first_state])
    return rollout, state


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


def cut(grid: Tensor, length: int) -> Tensor:
    """Reshape (time, environment, ...) to (length, sequence, ...): all first sequences first."""
    return torch.cat(grid.split(length), dim=1)


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: argparse.Namespace) -> dict[str, Tensor]:
    """Split a rollout into sequences, with values and log-probabilities of the acting policy."""
    ended = rollout.terminated | rollout.truncated
    starts = torch.cat((torch.zeros_like(ended[:1]), ended[:-1]))
    was = unroll(agent, rollout.obs, starts, rollout.state)
    # A fall terminates the episode: nothing is bootstrapped. The time limit truncates it: the
    # return is bootstrapped with V(final_obs), computed with the state of that episode. A step
    # that is both counts as terminated.
    cut_short = rollout.truncated & ~rollout.terminated
    bootstrap = torch.zeros_like(rollout.rewards)
    for t in range(len(ended)):
        _, final_values, _ = agent.step(rollout.final_obs[t], was.after[t])
        bootstrap[t] = torch.where(cut_short[t], final_values, 0.0)
    _, last_value, _ = agent.step(rollout.next_obs, forget(was.after[-1], ended[-1]))
    advantages, returns = compute_gae(
        rollout.rewards,
        was.values,
        ended.to(was.values.dtype),
        bootstrap,
        last_value,
        args.gamma,
        args.gae_lambda,
    )
    logprobs = was.policy.log_prob(rollout.actions)
    names = ("obs", "actions", "starts", "values", "logprobs", "advantages", "returns")
    grids = (rollout.obs, rollout.actions, starts, was.values, logprobs, advantages, returns)
    length = args.sequence_length
    batch = {name: cut(grid, length) for name, grid in zip(names, grids, strict=True)}
    # Each sequence starts from the state it had when it was collected.
    return {**batch, "state": cut(was.before, length)[0]}


def ppo_update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    chosen: Tensor,
    args: argparse.Namespace,
) -> dict[str, Tensor]:
    """Make one gradient step on the ``chosen`` sequences of ``batch``."""
    state = batch["state"][chosen]
    steps = {name: grid[:, chosen] for name, grid in batch.items() if name != "state"}
    advantages = steps["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # L_policy = -E[ min(r A, clip(r, 1 - c, 1 + c) A) ],  r = pi(a|s) / pi_old(a|s)
    now = unroll(agent, steps["obs"], steps["starts"], state)
    ratio = torch.exp(now.policy.log_prob(steps["actions"]) - steps["logprobs"])
    clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = 0.5 * ((now.values - steps["returns"]) ** 2).mean()
    entropy = now.policy.entropy().mean()

    optimizer.zero_grad()
    (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return {name: loss.detach() for name, loss in losses.items()}


@torch.no_grad()
def evaluate(agent: Agent, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = make_env()
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        state, total, over = no_memory(1), 0.0, False
        while not over:
            logits, _, state = agent.step(torch.as_tensor(obs).unsqueeze(0), state)
            obs, reward, terminated, truncated, _ = env.step(logits.argmax().item())
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
    state = no_memory(args.num_envs)
    running, recent = np.zeros(args.num_envs), deque[float](maxlen=100)

    rows = args.num_envs * args.num_steps
    iterations = math.ceil(args.total_timesteps / rows)
    start = time.perf_counter()
    for iteration in range(iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / iterations)
        rollout, state = collect(envs, agent, obs, state, args.num_steps)
        obs = rollout.next_obs.numpy()
        recent.extend(finished_returns(running, rollout))

        batch = make_batch(agent, rollout, args)
        for _ in range(args.update_epochs):
            order = torch.randperm(rows // args.sequence_length)
            for chosen in order.chunk(args.num_minibatches):
                losses = ppo_update(agent, optimizer, batch, chosen, args)

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
