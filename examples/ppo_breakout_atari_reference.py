"""The whole of PPO on Atari Breakout in one file (Schulman et al. 2017, arXiv:1707.06347).

    python examples/ppo_breakout_atari_reference.py --total-timesteps 10000000 --seed 1

Read it from the bottom: `main` alternates between collecting a rollout and learning from it. A
*game* lasts until the console ends it; an *episode* is what the agent sees, and ends with every
lost life. Scores are those of whole games, as the console counts them.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsFloat

import ale_py
import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit
from torch import Tensor, nn
from torch.distributions import Categorical

gym.register_envs(ale_py)

NOOP, FIRE, NUM_ACTIONS = 0, 1, 4
STACK, SIZE, SKIP = 4, 84, 4


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    best_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--total-timesteps", type=int, default=10_000_000, help="environment steps in total")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add("--num-envs", type=int, default=8, help="number of environments")
    add("--num-steps", type=int, default=128, help="steps of each environment per rollout")
    add("--num-minibatches", type=int, default=4, help="minibatches per epoch")
    add("--update-epochs", type=int, default=4, help="epochs per rollout")
    add("--learning-rate", type=float, default=2.5e-4, help="initial learning rate of Adam")
    add("--anneal-lr", action=switch, default=True, help="anneal the learning rate to zero")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--gae-lambda", type=float, default=0.95, help="decay of the advantage estimator")
    add("--clip-coef", type=float, default=0.1, help="clip range of the ratio")
    add("--ent-coef", type=float, default=0.01, help="weight of the entropy bonus")
    add("--vf-coef", type=float, default=0.5, help="weight of the value loss")
    add("--max-grad-norm", type=float, default=0.5, help="clip gradients to this norm")
    add("--noop-max", type=int, default=30, help="most frames skipped at the start")
    add("--max-frames", type=int, default=108_000, help="frames after which a game is truncated")
    add("--eval-games", type=int, default=10, help="whole games after training")
    add("--device", default=best_device, help="device of the network")
    args = parser.parse_args(argv)
    if args.num_envs * args.num_steps % args.num_minibatches:
        parser.error("--num-minibatches must divide num_envs * num_steps")
    return args


class StartGame(gym.Wrapper[Any, Any, Any, Any]):
    """Starts a game: a random number of no-op frames, then FIRE, which launches the ball."""

    def __init__(self, env: gym.Env[Any, Any], noop_max: int) -> None:
        super().__init__(env)
        self.noop_max = noop_max

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and skip 1 to ``noop_max`` frames, the one of FIRE included."""
        self.env.reset(seed=seed, options=options)
        noops = int(self.unwrapped.np_random.integers(self.noop_max)) if self.noop_max else 0
        for _ in range(noops):
            self.env.step(NOOP)
        obs, _, _, _, info = self.env.step(FIRE)
        return obs, info


class LivesAsEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the episode at every lost life, and clips rewards to -1, 0 or 1.

    The game itself continues: the reset after a lost life does not reset the game. When the game
    ends or is truncated, ``info["score"]`` is its score.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.score, self.lives, self.goes_on = 0.0, 0, False
        self.obs: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Continue the game after a lost life; otherwise, or with a seed, start a new game."""
        if self.goes_on and seed is None:
            self.goes_on = False
            return self.obs, {}
        self.obs, info = self.env.reset(seed=seed, options=options)
        self.score, self.lives, self.goes_on = 0.0, info["lives"], False
        return self.obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the game."""
        self.obs, points, game_over, truncated, info = self.env.step(action)
        reward = float(points)
        self.score += reward
        terminated = game_over or info["lives"] < self.lives
        self.lives = info["lives"]
        self.goes_on = terminated and not (game_over or truncated)
        if game_over or truncated:
            info["score"] = self.score
        return self.obs, float(np.sign(reward)), terminated, truncated, info


def make_env(noop_max: int, max_frames: int) -> gym.Env[Any, Any]:
    """Return Breakout with the standard preprocessing, from the innermost wrapper outwards.

    Without sticky actions, as in BreakoutNoFrameskip-v4.
    """
    env = gym.make(
        "ALE/Breakout-v5",
        frameskip=1,
        repeat_action_probability=0.0,
        obs_type="grayscale",
        max_num_frames_per_episode=0,  # no limit here: TimeLimit sets one
    )
    env = StartGame(env, noop_max)
    # Four frames per action; the observation is the maximum of the last two. Its own no-ops are
    # not used (they would come after FIRE), nor its rule about lives (it would reset the game).
    env = AtariPreprocessing(env, noop_max=0, frame_skip=SKIP, screen_size=SIZE)
    env = FrameStackObservation(env, STACK, padding_type="zero")
    return LivesAsEpisodes(TimeLimit(env, max_frames // SKIP))


def make_envs(args: argparse.Namespace) -> SyncVectorEnv:
    """Return environments that reset within the step that ends an episode."""
    make = functools.partial(make_env, args.noop_max, args.max_frames)
    return SyncVectorEnv([make] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class Agent(nn.Module):
    """A policy and a value function, both linear in the features of one convolutional network.

    That is the network of DQN's Nature paper (Mnih et al. 2015, doi:10.1038/nature14236).
    """

    def __init__(self) -> None:
        super().__init__()
        gain = math.sqrt(2)
        self.encoder = nn.Sequential(
            orthogonal(nn.Conv2d(STACK, 32, 8, stride=4), gain),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), gain),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, stride=1), gain),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * 7 * 7, 512), gain),
            nn.ReLU(),
        )
        # A small last layer makes the initial policy almost uniform.
        self.actor = orthogonal(nn.Linear(512, NUM_ACTIONS), 0.01)
        self.critic = orthogonal(nn.Linear(512, 1), 1.0)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Return the action distribution and the value of each row."""
        features = self.encoder(obs.to(self.critic.weight.dtype) / 255)
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(-1)


def orthogonal(layer: Any, gain: float) -> Any:
    """Return the layer, with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Rollout(NamedTuple):
    """Tensors of (time, environment, ...); ``next_obs`` is the observation after the last step."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor
    """The last observations of truncated games, in order, which ``obs`` does not contain."""
    next_obs: Tensor


@torch.no_grad()
def collect(
    envs: SyncVectorEnv, agent: Agent, obs: Tensor, num_steps: int
) -> tuple[Rollout, list[float]]:
    """Step every environment ``num_steps`` times; return the rollout and scores of ended games.

    The convolutional network, which is most of the work, runs for the action anyway, so its values
    and log-probabilities are stored.
    """
    on_device = functools.partial(torch.as_tensor, device=obs.device)
    steps: list[tuple[Tensor, ...]] = []
    final_obs: list[Any] = []
    scores: list[float] = []
    for _ in range(num_steps):
        policy, value = agent(obs)
        action = policy.sample()
        next_obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
        # A lost life terminates the episode: nothing is bootstrapped. The limit on frames truncates
        # it: the value of the final observation is needed. A step that is both is terminated.
        final_obs += [infos["final_obs"][i] for i in np.flatnonzero(truncated & ~terminated)]
        ended = infos.get("final_info", {})
        scores += ended["score"][ended["_score"]].tolist() if "score" in ended else []
        told = (on_device(reward).to(value.dtype), on_device(terminated), on_device(truncated))
        steps.append((obs, action, policy.log_prob(action), value, *told))
        obs = on_device(next_obs)
    grids = [torch.stack(column) for column in zip(*steps, strict=True)]
    last = np.array(final_obs, np.uint8).reshape(-1, *obs.shape[1:])
    return Rollout._make([*grids, on_device(last), obs]), scores


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
    """Flatten a rollout into rows, with the advantages and returns to learn from."""
    bootstrap = torch.zeros_like(rollout.values)
    if len(rollout.final_obs):
        bootstrap[rollout.truncated & ~rollout.terminated] = agent(rollout.final_obs)[1]
    dones = (rollout.terminated | rollout.truncated).to(rollout.values.dtype)
    last_value = agent(rollout.next_obs)[1]
    advantages, returns = compute_gae(
        rollout.rewards, rollout.values, dones, bootstrap, last_value, args.gamma, args.gae_lambda
    )
    names = ("obs", "actions", "logprobs", "advantages", "returns")
    grids = (rollout.obs, rollout.actions, rollout.logprobs, advantages, returns)
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
    policy, values = agent(rows["obs"])
    ratio = torch.exp(policy.log_prob(rows["actions"]) - rows["logprobs"])
    clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = 0.5 * ((values - rows["returns"]) ** 2).mean()
    entropy = policy.entropy().mean()

    optimizer.zero_grad()
    (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return {name: loss.detach() for name, loss in losses.items()}


def make_optimizer(agent: Agent, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return Adam over all parameters."""
    return torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)


@torch.no_grad()
def evaluate(agent: Agent, args: argparse.Namespace) -> list[float]:
    """Return the scores of whole games in a separate environment.

    Actions are sampled, as in training: a greedy policy may wait forever without launching the
    ball.
    """
    env = make_env(args.noop_max, args.max_frames)
    obs, _ = env.reset(seed=args.seed + 10_000)
    scores: list[float] = []
    while len(scores) < args.eval_games:
        policy, _ = agent(torch.as_tensor(obs, device=args.device).unsqueeze(0))
        obs, _, terminated, truncated, info = env.step(policy.sample().item())
        scores += [info["score"]] if "score" in info else []
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    return scores


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report, and return the mean score of the final evaluation."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    agent = Agent().to(args.device)
    optimizer = make_optimizer(agent, args)
    envs = make_envs(args)
    obs = torch.as_tensor(envs.reset(seed=args.seed)[0], device=args.device)
    recent = deque[float](maxlen=100)

    rows = args.num_envs * args.num_steps
    iterations = math.ceil(args.total_timesteps / rows)
    start = time.perf_counter()
    for iteration in range(iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / iterations)
        rollout, scores = collect(envs, agent, obs, args.num_steps)
        obs = rollout.next_obs
        recent.extend(scores)

        batch = make_batch(agent, rollout, args)
        for _ in range(args.update_epochs):
            for minibatch_indices in torch.randperm(rows).chunk(args.num_minibatches):
                losses = ppo_update(agent, optimizer, batch, minibatch_indices, args)

        if recent and (iteration % 10 == 0 or iteration == iterations - 1):
            step, report = (iteration + 1) * rows, f"score {np.mean(recent):6.1f}"
            report += "".join(f"  {name} {loss:8.4f}" for name, loss in losses.items())
            print(f"step {step:8d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    envs.close()

    scores = evaluate(agent, args)
    print(f"evaluation: {np.mean(scores):.1f} +- {np.std(scores):.1f} over {len(scores)} games")
    return float(np.mean(scores))


if __name__ == "__main__":
    main()
