"""The whole of PPG on CartPole-v1 in one file (Cobbe et al. 2020, arXiv:2009.04416).

    python examples/ppg_cartpole_reference.py --total-timesteps 100000 --seed 1

Phasic policy gradient: PPO, with auxiliary phases that train the policy's network to predict values
while the policy is kept unchanged. Read it from the bottom: `main` collects a rollout, learns from
it, and every few rollouts runs an auxiliary phase on all of them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

Array: TypeAlias = np.ndarray[Any, Any]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--total-timesteps", type=int, default=100_000, help="environment steps in total")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add("--num-envs", type=int, default=8, help="number of environments")
    add("--num-steps", type=int, default=64, help="steps of each environment per rollout")
    add("--num-minibatches", type=int, default=4, help="minibatches per epoch")
    add("--update-epochs", type=int, default=10, help="epochs per rollout")
    add("--policy-phases", type=int, default=16, help="rollouts before each auxiliary phase")
    add("--aux-epochs", type=int, default=6, help="epochs of an auxiliary phase")
    add("--num-aux-minibatches", type=int, default=16, help="minibatches of an auxiliary epoch")
    add("--beta-clone", type=float, default=1.0, help="weight of keeping the policy")
    add("--learning-rate", type=float, default=1e-3, help="initial learning rate of Adam")
    add("--anneal-lr", action=switch, default=True, help="anneal the learning rate to zero")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--gae-lambda", type=float, default=0.95, help="decay of the advantage estimator")
    add("--clip-coef", type=float, default=0.2, help="clip range of the ratio")
    add("--ent-coef", type=float, default=0.0, help="weight of the entropy bonus")
    add("--vf-coef", type=float, default=0.5, help="weight of the value loss")
    add("--max-grad-norm", type=float, default=0.5, help="clip gradients to this norm")
    add("--normalize-reward", action=switch, default=True, help="scale rewards, see RewardScaler")
    add("--eval-episodes", type=int, default=20, help="greedy episodes after training")
    args = parser.parse_args(argv)
    rows = args.num_envs * args.num_steps
    if rows % args.num_minibatches:
        parser.error("--num-minibatches must divide num_envs * num_steps")
    if args.policy_phases * rows % args.num_aux_minibatches:
        parser.error("--num-aux-minibatches must divide policy_phases * num_envs * num_steps")
    return args


class Agent(nn.Module):
    """A trunk with three heads: a policy over two actions, a value, and an auxiliary value.

    Two heads learn values. The value head is used for advantages; its gradient does not reach the
    trunk. The auxiliary value head only serves to train the trunk.
    """

    def __init__(self) -> None:
        super().__init__()
        gain = math.sqrt(2)
        self.trunk = nn.Sequential(linear(4, 64, gain), nn.Tanh(), linear(64, 64, gain), nn.Tanh())
        # A small layer makes the initial policy almost uniform.
        self.policy_head = linear(64, 2, 0.01)
        self.value_head = nn.Sequential(linear(64, 64, gain), nn.Tanh(), linear(64, 1, 1.0))
        self.aux_head = linear(64, 1, 1.0)

    def policy(self, obs: Tensor) -> Categorical:
        """Return the action distribution of each row."""
        return Categorical(logits=self.policy_head(self.trunk(obs)))

    def value(self, obs: Tensor) -> Tensor:
        """Return the value of each row; its gradient does not reach the trunk."""
        with torch.no_grad():
            features = self.trunk(obs)
        return self.value_head(features).squeeze(-1)  # type: ignore[no-any-return]

    def aux_value(self, obs: Tensor) -> Tensor:
        """Return the auxiliary value of each row; its gradient trains the trunk."""
        return self.aux_head(self.trunk(obs)).squeeze(-1)  # type: ignore[no-any-return]


def linear(n_in: int, n_out: int, gain: float) -> nn.Linear:
    """Return a layer with orthogonal weights and zero biases."""
    layer = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Optimizers(NamedTuple):
    """One optimizer per phase over the same parameters, since their gradients differ much."""

    policy: torch.optim.Adam
    auxiliary: torch.optim.Adam


def make_optimizers(agent: Agent, args: argparse.Namespace) -> Optimizers:
    """Return a new Adam optimizer for each phase."""
    adams = [torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5) for _ in range(2)]
    return Optimizers(*adams)


def set_learning_rate(optimizers: Optimizers, rate: float) -> None:
    """Set the learning rate of both phases."""
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = rate


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


def make_envs(num_envs: int) -> SyncVectorEnv[Any, Any]:
    """Return CartPole environments that reset within the step that ends an episode."""
    return SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
    )


@torch.no_grad()
def collect(envs: SyncVectorEnv[Any, Any], agent: Agent, obs: Array, num_steps: int) -> Rollout:
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


class RewardScaler:
    """Divides rewards by the standard deviation of all discounted returns so far.

    With G_t = r_t + gamma G_{t-1}, reset to 0 when an episode ends:

        r_t / sqrt( Var(G) + 1e-8 ), within [-10, 10]

    Values are then of order 1, whatever the scale of the rewards.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.returns = np.zeros(num_envs)
        self.count, self.sum, self.sum_of_squares = 0, 0.0, 0.0

    def __call__(self, reward: Array, done: Array) -> Array:
        """Return one step's scaled rewards, after updating the statistics with them."""
        self.returns = reward + self.gamma * self.returns
        self.count += len(self.returns)
        self.sum += float(self.returns.sum())
        self.sum_of_squares += float((self.returns**2).sum())
        self.returns[done] = 0.0
        variance = self.sum_of_squares / self.count - (self.sum / self.count) ** 2
        scaled: Array = np.clip(reward / math.sqrt(max(variance, 0.0) + 1e-8), -10, 10)
        return scaled


def scale_rewards(scaler: RewardScaler, rollout: Rollout) -> Rollout:
    """Return the rollout with rewards scaled step by step."""
    dones = (rollout.terminated | rollout.truncated).numpy()
    steps = zip(rollout.rewards.double().numpy(), dones, strict=True)
    scaled = torch.as_tensor(np.stack([scaler(reward, done) for reward, done in steps]))
    return rollout._replace(rewards=scaled.to(rollout.rewards.dtype))


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


Losses: TypeAlias = dict[str, Tensor]


def policy_update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rows: dict[str, Tensor],
    args: argparse.Namespace,
) -> Losses:
    """Make one gradient step of the policy phase: PPO's, without the auxiliary head."""
    advantages = rows["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # L_policy = -E[ min(r A, clip(r, 1 - c, 1 + c) A) ],  r = pi(a|s) / pi_old(a|s)
    policy = agent.policy(rows["obs"])
    ratio = torch.exp(policy.log_prob(rows["actions"]) - rows["logprobs"])
    clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = 0.5 * ((agent.value(rows["obs"]) - rows["returns"]) ** 2).mean()
    entropy = policy.entropy().mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    descend(agent, optimizer, loss, args.max_grad_norm)
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return {name: loss.detach() for name, loss in losses.items()}


def auxiliary_update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rows: dict[str, Tensor],
    args: argparse.Namespace,
) -> Losses:
    """Make one gradient step of the auxiliary phase.

    L_joint = E[ (V_aux - R)^2 ] / 2 + beta E[ KL(pi_teacher || pi) ], and the value head's own
    E[ (V - R)^2 ] / 2 besides.
    """
    obs, returns = rows["obs"], rows["returns"]
    aux_value_loss = 0.5 * ((agent.aux_value(obs) - returns) ** 2).mean()
    value_loss = 0.5 * ((agent.value(obs) - returns) ** 2).mean()
    teacher = Categorical(logits=rows["teacher_logits"])
    clone_kl = kl_divergence(teacher, agent.policy(obs)).mean()

    loss = aux_value_loss + args.beta_clone * clone_kl + value_loss
    descend(agent, optimizer, loss, args.max_grad_norm)
    losses = {"aux_value_loss": aux_value_loss, "value_loss": value_loss, "clone_kl": clone_kl}
    return {name: loss.detach() for name, loss in losses.items()}


def descend(
    agent: Agent, optimizer: torch.optim.Optimizer, loss: Tensor, max_grad_norm: float
) -> None:
    """Make one optimizer step on a loss."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
    optimizer.step()


def epochs(
    batch: dict[str, Tensor], count: int, parts: int, generator: torch.Generator | None
) -> Iterator[dict[str, Tensor]]:
    """Yield minibatches of ``count`` epochs, each in a new random order and ``parts`` parts."""
    for _ in range(count):
        order = torch.randperm(len(batch["obs"]), generator=generator)
        for chosen in order.chunk(parts):
            yield {name: tensor[chosen] for name, tensor in batch.items()}


def policy_phase(
    agent: Agent,
    optimizers: Optimizers,
    batch: dict[str, Tensor],
    args: argparse.Namespace,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Learn from one rollout as PPO does."""
    return mean_losses(
        [
            policy_update(agent, optimizers.policy, rows, args)
            for rows in epochs(batch, args.update_epochs, args.num_minibatches, generator)
        ]
    )


def auxiliary_phase(
    agent: Agent,
    optimizers: Optimizers,
    kept: Sequence[dict[str, Tensor]],
    args: argparse.Namespace,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Train the auxiliary value head on all rollouts since the last auxiliary phase."""
    batch = {name: torch.cat([rows[name] for rows in kept]) for name in ("obs", "returns")}
    # The policy to keep is the current one, not those that collected the rollouts.
    with torch.no_grad():
        batch["teacher_logits"] = agent.policy(batch["obs"]).logits
    return mean_losses(
        [
            auxiliary_update(agent, optimizers.auxiliary, rows, args)
            for rows in epochs(batch, args.aux_epochs, args.num_aux_minibatches, generator)
        ]
    )


def mean_losses(updates: Sequence[Losses]) -> dict[str, float]:
    """Return losses averaged over gradient steps."""
    return {
        name: torch.stack([losses[name] for losses in updates]).mean().item() for name in updates[0]
    }


@torch.no_grad()
def evaluate(agent: Agent, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = gym.make("CartPole-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = agent.policy(torch.as_tensor(obs)).logits.argmax().item()
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
    optimizers = make_optimizers(agent, args)
    envs = make_envs(args.num_envs)
    obs, _ = envs.reset(seed=args.seed)
    scaler = RewardScaler(args.num_envs, args.gamma)
    running, recent = np.zeros(args.num_envs), deque[float](maxlen=100)
    kept: list[dict[str, Tensor]] = []

    rows = args.num_envs * args.num_steps
    iterations = math.ceil(args.total_timesteps / rows)
    start = time.perf_counter()
    for iteration in range(iterations):
        if args.anneal_lr:
            set_learning_rate(optimizers, args.learning_rate * (1 - iteration / iterations))
        rollout = collect(envs, agent, obs, args.num_steps)
        obs = rollout.next_obs.numpy()
        recent.extend(finished_returns(running, rollout))
        if args.normalize_reward:
            rollout = scale_rewards(scaler, rollout)

        batch = make_batch(agent, rollout, args)
        losses = policy_phase(agent, optimizers, batch, args)
        kept.append(batch)
        if len(kept) == args.policy_phases:
            # Both phases have a value loss; that of the policy phase is reported.
            losses = auxiliary_phase(agent, optimizers, kept, args) | losses
            kept.clear()

        if recent and (not kept or iteration == iterations - 1):
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
