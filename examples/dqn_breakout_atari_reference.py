"""The whole of DQN on Atari Breakout in one file (Mnih et al. 2015, doi:10.1038/nature14236).

    python examples/dqn_breakout_atari_reference.py --total-timesteps 10000000 --seed 1

Read it from the bottom: `main` alternates between stepping the environment and learning from
replay. A *game* lasts until the console ends it; an *episode* is what the agent sees, and ends
with every lost life. Scores are those of whole games, as the console counts them.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

import ale_py
import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit
from torch import Tensor, nn

Array: TypeAlias = np.ndarray[Any, Any]

gym.register_envs(ale_py)

NOOP, FIRE, NUM_ACTIONS = 0, 1, 4
STACK, SIZE, SKIP = 4, 84, 4


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    best_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--total-timesteps", type=int, default=10_000_000, help="environment steps")
    add("--seed", type=int, default=1, help="seed of weights, actions and environment")
    add("--learning-rate", type=float, default=1e-4, help="learning rate of Adam")
    add("--buffer-size", type=int, default=1_000_000, help="frames kept for replay, 7 kB each")
    add("--learning-starts", type=int, default=80_000, help="random steps at the start")
    add("--batch-size", type=int, default=32, help="transitions per update")
    add("--train-freq", type=int, default=4, help="steps between updates")
    add("--target-update-interval", type=int, default=1000, help="steps between target copies")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--exploration-fraction", type=float, default=0.1, help="run fraction of epsilon decay")
    add("--exploration-initial-eps", type=float, default=1.0, help="epsilon at the start")
    add("--exploration-final-eps", type=float, default=0.01, help="final epsilon")
    add("--max-grad-norm", type=float, default=10.0, help="clip gradients to this norm")
    add("--noop-max", type=int, default=30, help="most frames skipped at the start")
    add("--max-frames", type=int, default=108_000, help="frames after which a game is truncated")
    add("--report-interval", type=int, default=10_000, help="steps between progress lines")
    add("--eval-games", type=int, default=10, help="whole games after training")
    add("--device", default=best_device, help="device of the networks")
    args = parser.parse_args(argv)
    if args.buffer_size <= args.batch_size:
        parser.error("--buffer-size must be above --batch-size")
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


class QNetwork(nn.Module):
    """Values of all actions for a stack of frames; torch's default weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(STACK, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Linear(512, NUM_ACTIONS),
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Return one row of values for each observation."""
        pixels = obs.to(next(self.parameters()).dtype) / 255
        return self.layers(pixels)  # type: ignore[no-any-return]


class Networks(NamedTuple):
    """The Q network and its target network."""

    online: QNetwork
    target: QNetwork


def make_networks(device: str) -> Networks:
    """Return a Q network and a target network with the same weights."""
    online = QNetwork().to(device)
    return Networks(online, copy.deepcopy(online))


def copy_target(networks: Networks) -> None:
    """Copy the weights to the target network."""
    networks.target.load_state_dict(networks.online.state_dict())


class Replay:
    """A ring of the last transitions, stored as single frames.

    Whole stacks for an observation and its successor would take 56 kB per transition, with every
    frame stored eight times: a million of them would not fit in memory. So a row holds one frame,
    the newest of its stack, and the action taken there. The older frames are in the rows before
    (black before a game's first frame), the successor's frame is in the row after. The last row of
    a game and the newest row have no action yet: they are not transitions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.added = capacity, 0
        self.frames = np.zeros((capacity, SIZE, SIZE), np.uint8)
        self.ages = np.zeros(capacity, np.int64)  # rows since the game's first
        self.acted = np.zeros(capacity, bool)
        self.actions = np.zeros(capacity, np.int64)
        self.rewards = np.zeros(capacity, np.float32)
        self.terminated = np.zeros(capacity, np.float32)

    def begin(self, frame: Array) -> None:
        """Store the first frame of a game."""
        self._write(frame, age=0)

    def add(self, action: int, reward: float, terminated: bool, frame: Array) -> None:
        """Store the action at the newest frame, its reward and end, and the next frame."""
        newest = (self.added - 1) % self.capacity
        self.actions[newest], self.rewards[newest] = action, reward
        self.terminated[newest], self.acted[newest] = terminated, True
        self._write(frame, age=self.ages[newest] + 1)

    def _write(self, frame: Array, age: int) -> None:
        row = self.added % self.capacity
        self.frames[row], self.ages[row], self.acted[row] = frame, age, False
        self.added += 1

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        """Return a batch of transitions, sampled with replacement."""
        oldest = max(0, self.added - self.capacity)
        chosen = np.zeros(0, np.int64)
        while len(chosen) < batch_size:
            places = torch.randint(self.added - oldest, (batch_size,)).numpy()
            rows = (oldest + places) % self.capacity
            # The first frames of the oldest stacks have been overwritten.
            is_whole = places >= np.minimum(self.ages[rows], STACK - 1)
            chosen = np.concatenate((chosen, rows[self.acted[rows] & is_whole]))
        return self.rows(chosen[:batch_size])

    def rows(self, rows: Array) -> dict[str, Tensor]:
        """Return the transitions of some rows as tensors."""
        columns = {
            "obs": self._stacks(rows),
            "actions": self.actions[rows],
            "rewards": self.rewards[rows],
            "next_obs": self._stacks((rows + 1) % self.capacity),
            "terminated": self.terminated[rows],
        }
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def _stacks(self, rows: Array) -> Array:
        """Return the stacks of some rows, oldest frame first."""
        ago = np.arange(STACK - 1, -1, -1)
        stacks: Array = self.frames[(rows[:, None] - ago) % self.capacity]
        stacks[ago > self.ages[rows][:, None]] = 0
        return stacks


class Collector:
    """Steps an environment and stores the transitions."""

    def __init__(self, env: gym.Env[Any, Any], replay: Replay, seed: int) -> None:
        self.env, self.replay = env, replay
        self.obs, _ = env.reset(seed=seed)
        self.replay.begin(self.obs[-1])
        self.scores = deque[float](maxlen=100)

    def step(self, action: int) -> None:
        """Take one action, and reset the environment if it ends the episode."""
        self.obs, reward, terminated, truncated, info = self.env.step(action)
        # Stored before the reset below, so that the next frame is the true successor also of a
        # last step. Only a lost life is stored as terminated; after the limit targets bootstrap.
        self.replay.add(action, float(reward), terminated, self.obs[-1])
        if terminated or truncated:
            self.obs, _ = self.env.reset()
        if "score" in info:  # the game is over, not just a life lost
            self.scores.append(info["score"])
            self.replay.begin(self.obs[-1])


def epsilon(step: int, args: argparse.Namespace) -> float:
    """Return the fraction of random actions: linear at first, then constant."""
    done = min(1.0, step / (args.exploration_fraction * args.total_timesteps))
    return float((1 - done) * args.exploration_initial_eps + done * args.exploration_final_eps)


@torch.no_grad()
def explore(network: QNetwork, obs: Array, random_share: float) -> int:
    """Return a random action with probability ``random_share``, else the greedy one."""
    if torch.rand(()) < random_share:
        return int(torch.randint(NUM_ACTIONS, ()))
    device = next(network.parameters()).device
    return int(network(torch.as_tensor(obs, device=device).unsqueeze(0)).argmax())


@torch.no_grad()
def dqn_targets(target: QNetwork, batch: dict[str, Tensor], gamma: float) -> Tensor:
    """Return the targets r + gamma (1 - terminated) max_a Q_target(s', a)."""
    best: Tensor = target(batch["next_obs"]).max(dim=1).values
    return batch["rewards"] + gamma * (1 - batch["terminated"]) * best


def dqn_update(
    networks: Networks,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    args: argparse.Namespace,
) -> dict[str, Tensor]:
    """Make one gradient step on a batch."""
    targets = dqn_targets(networks.target, batch, args.gamma)
    q_values = networks.online(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)

    # Huber loss: quadratic up to 1, then linear, so that gradients are at most 1.
    size = (q_values - targets).abs()
    loss = torch.where(size < 1, size**2 / 2, size - 0.5).mean()

    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(networks.online.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"loss": loss.detach(), "q_mean": q_values.detach().mean()}


def make_optimizer(networks: Networks, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return Adam over the Q network (not the target network)."""
    return torch.optim.Adam(networks.online.parameters(), lr=args.learning_rate, eps=1e-8)


def evaluate(network: QNetwork, args: argparse.Namespace) -> list[float]:
    """Return the scores of whole games in a separate environment.

    Epsilon is that of the end of training: a greedy policy may wait forever without launching
    the ball.
    """
    env = make_env(args.noop_max, args.max_frames)
    obs, _ = env.reset(seed=args.seed + 10_000)
    scores: list[float] = []
    while len(scores) < args.eval_games:
        action = explore(network, obs, args.exploration_final_eps)
        obs, _, terminated, truncated, info = env.step(action)
        scores += [info["score"]] if "score" in info else []
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    return scores


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report, and return the mean score of the final evaluation."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    networks = make_networks(args.device)
    optimizer = make_optimizer(networks, args)
    replay = Replay(args.buffer_size)
    env = make_env(args.noop_max, args.max_frames)
    collector = Collector(env, replay, args.seed)

    losses: dict[str, Tensor] = {}
    start = time.perf_counter()
    for step in range(1, args.total_timesteps + 1):
        warming_up = step <= args.learning_starts
        random_share = 1.0 if warming_up else epsilon(step - 1, args)
        collector.step(explore(networks.online, collector.obs, random_share))

        if not warming_up and step % args.train_freq == 0:
            rows = replay.sample(args.batch_size)
            batch = {name: column.to(args.device) for name, column in rows.items()}
            losses = dqn_update(networks, optimizer, batch, args)
        if step % args.target_update_interval == 0:
            copy_target(networks)

        due = step % args.report_interval == 0 or step == args.total_timesteps
        if collector.scores and due:
            report = f"score {np.mean(collector.scores):6.1f}"
            report += "".join(f"  {name} {loss:8.4f}" for name, loss in losses.items())
            print(f"step {step:8d}  {report}  {step / (time.perf_counter() - start):6.0f} steps/s")
    env.close()

    scores = evaluate(networks.online, args)
    print(f"evaluation: {np.mean(scores):.1f} +- {np.std(scores):.1f} over {len(scores)} games")
    return float(np.mean(scores))


if __name__ == "__main__":
    main()
