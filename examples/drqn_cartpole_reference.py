"""The whole of DRQN in one file, on a CartPole-v1 that does not show its velocities.

    python examples/drqn_cartpole_reference.py --total-timesteps 50000 --seed 1

Deep recurrent Q-learning (Hausknecht and Stone 2015, arXiv:1507.06527) on sequences that start from
the recurrent states stored when they were collected. Read it from the bottom: `main` alternates
between stepping the environments and learning from replay.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

OBS_SIZE, NUM_ACTIONS = 2, 2


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--total-timesteps", type=int, default=50_000, help="environment steps in total")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add("--num-envs", type=int, default=4, help="environments stepped in turn")
    add("--learning-rate", type=float, default=2e-3, help="initial learning rate of Adam")
    add("--anneal-lr", action=switch, default=True, help="anneal the learning rate to zero")
    add("--buffer-size", type=int, default=50_000, help="transitions kept for replay")
    add("--learning-starts", type=int, default=1000, help="random steps at the start")
    add("--batch-size", type=int, default=32, help="sequences per update")
    add("--sequence-length", type=int, default=16, help="most steps that gradients flow back")
    add("--burn-in", type=int, default=4, help="first steps, which only update the state")
    add("--train-freq", type=int, default=32, help="steps between rounds of learning")
    add("--gradient-steps", type=int, default=16, help="updates in each round")
    add("--target-update-interval", type=int, default=512, help="steps between target copies")
    add("--double", action=switch, default=True, help="double Q-learning")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--exploration-fraction", type=float, default=0.3, help="run fraction of epsilon decay")
    add("--exploration-initial-eps", type=float, default=1.0, help="epsilon at the start")
    add("--exploration-final-eps", type=float, default=0.04, help="final epsilon")
    add("--max-grad-norm", type=float, default=10.0, help="clip gradients to this norm")
    add("--hidden-sizes", type=int, nargs="+", default=[64], help="layers before the LSTM")
    add("--lstm-size", type=int, default=64, help="cells of the LSTM")
    add("--report-interval", type=int, default=1000, help="steps between progress lines")
    add("--eval-episodes", type=int, default=20, help="greedy episodes after training")
    args = parser.parse_args(argv)
    if args.buffer_size < 2 * args.num_envs * args.sequence_length:
        parser.error("--buffer-size must hold two sequences of every environment")
    return args


class PositionsOnly(gym.ObservationWrapper[Any, Any, Any]):
    """Removes the velocities of the cart and the pole from observations."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-math.inf, math.inf, (OBS_SIZE,))

    def observation(self, observation: Any) -> Any:
        """Return the cart's position and the pole's angle."""
        return observation[[0, 2]]


def make_env() -> gym.Env[Any, Any]:
    """Return a CartPole environment without velocities."""
    return PositionsOnly(gym.make("CartPole-v1"))


class QNetwork(nn.Module):
    """Values of all actions, given an observation and a recurrent state.

    A state is (rows, 2, size): the LSTM's output h and its cell c. It is zero at the start of an
    episode. Weights are torch's defaults, those of the LSTM as in `nn.LSTM`.
    """

    def __init__(self, hidden_sizes: Sequence[int], size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = OBS_SIZE
        for hidden in hidden_sizes:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        self.encoder = nn.Sequential(*layers)
        self.seen, self.said = nn.Linear(width, 4 * size), nn.Linear(size, 4 * size)
        for parameter in (*self.seen.parameters(), *self.said.parameters()):
            nn.init.uniform_(parameter, -(size**-0.5), size**-0.5)
        self.values = nn.Linear(size, NUM_ACTIONS)
        self.size = size

    def no_memory(self, rows: int) -> Tensor:
        """Return the state at the start of an episode: zeros."""
        return torch.zeros(rows, 2, self.size)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run one LSTM step; return values and the next state."""
        h, c = state.unbind(1)
        gates = self.seen(self.encoder(obs)) + self.said(h)
        write, keep, new, show = gates.chunk(4, dim=1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
        h = torch.sigmoid(show) * torch.tanh(c)
        return self.values(h), torch.stack((h, c), dim=1)


class Networks(NamedTuple):
    """The Q network and its target network."""

    online: QNetwork
    target: QNetwork


def make_networks(args: argparse.Namespace) -> Networks:
    """Return a Q network and a target network with the same weights."""
    online = QNetwork(args.hidden_sizes, args.lstm_size)
    return Networks(online, copy.deepcopy(online))


def copy_target(networks: Networks) -> None:
    """Copy the weights to the target network."""
    networks.target.load_state_dict(networks.online.state_dict())


class Transitions:
    """Consecutive steps of one episode, and the recurrent state before the first."""

    def __init__(self, state: Tensor, obs: Any, begins_episode: bool) -> None:
        self.state = state
        self.begins_episode = begins_episode
        self.obs = [torch.as_tensor(obs)]
        """One more than there are steps: the last is the true successor of the last step."""
        self.actions: list[int] = []
        self.rewards: list[float] = []
        self.terminated = False
        """Whether the last step terminated the episode."""

    def __len__(self) -> int:
        return len(self.actions)

    def unlearnt(self, burn_in: int) -> int:
        """Return how many first steps are burn-in: they only update a state of an older network."""
        return 0 if self.begins_episode else min(burn_in, len(self))


class Replay:
    """Sequences of every environment, oldest first, including incomplete ones."""

    def __init__(self, capacity: int, num_envs: int, sequence_length: int) -> None:
        self.capacity_each = capacity // num_envs
        self.sequence_length = sequence_length
        self.kept: list[deque[Transitions]] = [deque() for _ in range(num_envs)]
        self.growing: list[Transitions | None] = [None] * num_envs
        self.room = [0] * num_envs
        self.episodes = [0] * num_envs
        self.between_episodes = [True] * num_envs

    def add(
        self,
        env: int,
        *,
        state: Tensor,
        obs: Any,
        action: int,
        reward: float,
        next_obs: Any,
        terminated: bool,
        truncated: bool,
    ) -> None:
        """Append a step to a sequence of ``env``, or start one; drop the oldest if full."""
        sequence = self.growing[env]
        if sequence is None:
            sequence = Transitions(state, obs, self.between_episodes[env])
            self.room[env] = self.sequence_length
            if sequence.begins_episode:
                # So that burn-in does not always fall on the same steps of an episode.
                self.room[env] -= self.episodes[env] % self.sequence_length
                self.episodes[env] += 1
            self.kept[env].append(sequence)
        sequence.actions.append(action)
        sequence.rewards.append(reward)
        sequence.obs.append(torch.as_tensor(next_obs))
        sequence.terminated = terminated
        self.between_episodes[env] = terminated or truncated
        complete = len(sequence) == self.room[env] or self.between_episodes[env]
        self.growing[env] = None if complete else sequence
        while sum(map(len, self.kept[env])) > self.capacity_each:
            self.kept[env].popleft()

    def sequences(self) -> list[Transitions]:
        """Return all sequences, environment by environment."""
        return [sequence for sequences in self.kept for sequence in sequences]

    def sample(self, count: int, burn_in: int) -> list[Transitions]:
        """Sample uniformly, with replacement, from the sequences with a step after the burn-in.

        Each of these steps is trained once per sample, so that all are trained equally often.
        """
        learnt = [one for one in self.sequences() if len(one) > one.unlearnt(burn_in)]
        return [learnt[i] for i in torch.randint(len(learnt), (count,)).tolist()]


class Collector:
    """Steps environments, holds their recurrent states, and stores the transitions."""

    def __init__(
        self, envs: Sequence[gym.Env[Any, Any]], network: QNetwork, replay: Replay, seed: int
    ) -> None:
        self.envs, self.network, self.replay = envs, network, replay
        self.obs = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
        self.state = network.no_memory(len(envs))
        self.running, self.returns = [0.0] * len(envs), deque[float](maxlen=20)

    @torch.no_grad()
    def step(self, random_share: float) -> None:
        """Step every environment, with a random action with probability ``random_share``.

        The network is run in any case, because the recurrent state depends on every observation.
        """
        values, after = self.network(torch.as_tensor(np.stack(self.obs)), self.state)
        actions = torch.where(
            torch.rand(len(values)) < random_share,
            torch.randint(NUM_ACTIONS, (len(values),)),
            values.argmax(dim=1),
        )
        for i, (env, action) in enumerate(zip(self.envs, actions.tolist(), strict=True)):
            next_obs, reward, terminated, truncated, _ = env.step(action)
            # Stored before the reset below, so that next_obs is the true successor.
            self.replay.add(
                i,
                state=self.state[i],
                obs=self.obs[i],
                action=action,
                reward=float(reward),
                next_obs=next_obs,
                terminated=terminated,
                truncated=truncated,
            )
            self.running[i] += float(reward)
            if terminated or truncated:
                self.returns.append(self.running[i])
                self.running[i] = 0.0
                next_obs, _ = env.reset()
                after[i] = 0.0
            self.obs[i] = next_obs
        self.state = after


def epsilon(step: int, args: argparse.Namespace) -> float:
    """Return the fraction of random actions: linear at first, then constant."""
    done = min(1.0, step / (args.exploration_fraction * args.total_timesteps))
    return float((1 - done) * args.exploration_initial_eps + done * args.exploration_final_eps)


def crosses(before: int, step: int, interval: int) -> bool:
    """Return whether a multiple of ``interval`` was reached since ``before``."""
    return step // interval > before // interval


def values_along(network: QNetwork, sequences: Sequence[Transitions]) -> list[Tensor]:
    """Return values of all actions at every observation of sequences, sorted longest first.

    Each time step has a row for every sequence that is long enough.
    """
    dtype = next(network.parameters()).dtype
    state = torch.stack([sequence.state for sequence in sequences]).to(dtype)
    values = []
    for t in range(len(sequences[0]) + 1):
        seen = [sequence.obs[t] for sequence in sequences if len(sequence) >= t]
        values_t, state = network(torch.stack(seen).to(dtype), state[: len(seen)])
        values.append(values_t)
    return values


def drqn_update(
    networks: Networks,
    optimizer: torch.optim.Optimizer,
    sequences: Sequence[Transitions],
    args: argparse.Namespace,
) -> dict[str, Tensor]:
    """Make one gradient step on sequences; all steps after the burn-in have the same weight."""
    sequences = sorted(sequences, key=len, reverse=True)
    online = values_along(networks.online, sequences)
    with torch.no_grad():
        target = values_along(networks.target, sequences)

    q_values, errors = [], []
    for t in range(len(sequences[0])):
        going = [sequence for sequence in sequences if len(sequence) > t]
        rows = torch.arange(len(going))
        # r + gamma (1 - terminated) max_a Q_target(s', a); double: a is the argmax of Q itself.
        preferred = (online if args.double else target)[t + 1].argmax(dim=1)
        following = target[t + 1][rows, preferred]
        ends = [sequence.terminated and len(sequence) == t + 1 for sequence in going]
        goes_on = 1 - torch.tensor(ends).to(following.dtype)
        rewards = torch.tensor([sequence.rewards[t] for sequence in going], dtype=following.dtype)
        actions = torch.tensor([sequence.actions[t] for sequence in going])
        q_values.append(online[t][rows, actions])
        errors.append(q_values[-1] - (rewards + args.gamma * goes_on * following))
        counted = torch.tensor([t >= one.unlearnt(args.burn_in) for one in going])
        q_values[-1], errors[-1] = q_values[-1][counted], errors[-1][counted]

    # Squared errors: targets vary with the hidden velocities, and their mean is wanted (Huber's
    # loss tends to the median). Divided by a constant, not by the number of errors, so that steps
    # of short sequences have the same weight.
    loss = torch.cat(errors).square().sum() / (2 * len(sequences) * args.sequence_length)

    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(networks.online.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"loss": loss.detach(), "q_mean": torch.cat(q_values).detach().mean()}


def make_optimizer(networks: Networks, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return Adam over the Q network (not the target network)."""
    return torch.optim.Adam(networks.online.parameters(), lr=args.learning_rate, eps=1e-8)


@torch.no_grad()
def evaluate(network: QNetwork, episodes: int, seed: int) -> list[float]:
    """Return the returns of greedy episodes in a separate environment."""
    env = make_env()
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        state, total, over = network.no_memory(1), 0.0, False
        while not over:
            values, state = network(torch.as_tensor(obs).unsqueeze(0), state)
            obs, reward, terminated, truncated, _ = env.step(int(values.argmax()))
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
    networks = make_networks(args)
    optimizer = make_optimizer(networks, args)
    replay = Replay(args.buffer_size, args.num_envs, args.sequence_length)
    envs = [make_env() for _ in range(args.num_envs)]
    collector = Collector(envs, networks.online, replay, args.seed)

    losses: dict[str, Tensor] = {}
    start = time.perf_counter()
    for before in range(0, args.total_timesteps, args.num_envs):
        step = before + args.num_envs
        warming_up = before < args.learning_starts
        collector.step(1.0 if warming_up else epsilon(before, args))
        if not warming_up and crosses(before, step, args.train_freq):
            if args.anneal_lr:
                rate = args.learning_rate * max(0.0, 1 - step / args.total_timesteps)
                optimizer.param_groups[0]["lr"] = rate
            for _ in range(args.gradient_steps):
                losses = drqn_update(
                    networks, optimizer, replay.sample(args.batch_size, args.burn_in), args
                )
        if crosses(before, step, args.target_update_interval):
            copy_target(networks)

        due = crosses(before, step, args.report_interval) or step >= args.total_timesteps
        if collector.returns and due:
            report = f"return {np.mean(collector.returns):6.1f}"
            report += "".join(f"  {name} {loss:8.4f}" for name, loss in losses.items())
            print(f"step {step:7d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    for env in envs:
        env.close()

    returns = evaluate(networks.online, args.eval_episodes, seed=args.seed + 10_000)
    print(
        f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    )
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
