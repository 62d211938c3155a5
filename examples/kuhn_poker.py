"""Kuhn poker learnt in self-play, and how far the result is from optimal play, exactly.

    python examples/kuhn_poker.py [--steps 60000] [--seed 1] [--opponents pool|current]

Three cards, two players, each pays 1 and gets a card. A player passes or bets 1; after a bet the
other one calls or folds, and the higher card wins. Optimal play is mixed: a policy that learns
against itself circles around it, and the average of its snapshots comes nearer than most of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import AECEnv

from rl_training.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.setup import ExperimentManager

CARDS = (0, 1, 2)
HISTORIES = ("", "p", "b", "pb")
"""What was done when a player is to move; p: pass or fold, b: bet or call."""
Policy = Mapping[tuple[int, str], float]
"""The probability of b, by card and history."""


def payoff(history: str, cards: tuple[int, int]) -> int | None:
    """What player 0 wins at the end of a game; None while it goes on."""
    if history in ("bp", "pbp"):  # folded
        return 1 if history == "bp" else -1
    if history in ("pp", "bb", "pbb"):
        return (1 if cards[0] > cards[1] else -1) * (1 if history == "pp" else 2)
    return None


class KuhnPoker(AECEnv):  # type: ignore[misc]
    """The game as an environment of PettingZoo; observes the own card and the history."""

    metadata = {"name": "kuhn_poker", "is_parallelizable": False}
    possible_agents = ["player_0", "player_1"]
    render_mode = None

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        size = len(CARDS) + len(HISTORIES)
        self.observation_spaces = {
            agent: spaces.Box(0, 1, (size,), np.float32) for agent in self.possible_agents
        }
        self.action_spaces = {agent: spaces.Discrete(2) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def observe(self, agent: str) -> np.ndarray[Any, Any]:
        return observation(self._cards[self.possible_agents.index(agent)], self._history)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        first, second, _ = self._random.permutation(CARDS).tolist()
        self._cards, self._history = (first, second), ""
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._history += "pb"[int(action)]
        won = payoff(self._history, self._cards)
        if won is not None:
            self.rewards = {"player_0": float(won), "player_1": float(-won)}
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = self.possible_agents[len(self._history) % 2]
        self._accumulate_rewards()


def observation(card: int, history: str) -> np.ndarray[Any, Any]:
    """The card and the history, one-hot; a history at the end of a game is all zeros."""
    shown = np.zeros(len(CARDS) + len(HISTORIES), np.float32)
    shown[card] = 1
    if history in HISTORIES:
        shown[len(CARDS) + HISTORIES.index(history)] = 1
    return shown


# -- exact values by search of the whole tree ------------------------------------------------------


def best_response(policy: Policy, player: int) -> float:
    """What ``player`` wins on average with the best answer to a policy of the other one."""

    def value(history: str, own: int, others: Mapping[int, float]) -> float:
        """``others``: the probability of each card of the other player, and of its moves so far."""
        deals = {card: (own, card) if player == 0 else (card, own) for card in others}
        if payoff(history, next(iter(deals.values()))) is not None:
            sign = 1 if player == 0 else -1
            return sum(w * sign * (payoff(history, deals[card]) or 0) for card, w in others.items())
        if len(history) % 2 == player:
            return max(value(history + move, own, others) for move in "pb")
        bets = {card: w * policy[card, history] for card, w in others.items()}
        passes = {card: w - bets[card] for card, w in others.items()}
        return value(history + "p", own, passes) + value(history + "b", own, bets)

    each = 1 / len(list(permutations(CARDS, 2)))
    return sum(value("", own, {c: each for c in CARDS if c != own}) for own in CARDS)


def exploitability(policy: Policy) -> float:
    """What a best response wins against a policy, averaged over both seats; 0 is optimal play."""
    return (best_response(policy, 0) + best_response(policy, 1)) / 2


def average(policies: Iterable[Policy]) -> Policy:
    """The policy of a player who draws one of these for each game.

    At a decision each counts as often as its own moves lead there (Kuhn's theorem).
    """
    listed = list(policies)

    def reach(policy: Policy, card: int, history: str) -> float:
        return 1 - policy[card, ""] if history == "pb" else 1.0

    mixed = {}
    for card in CARDS:
        for history in HISTORIES:
            weights = [reach(policy, card, history) for policy in listed]
            bets = sum(w * p[card, history] for w, p in zip(weights, listed, strict=True))
            mixed[card, history] = bets / sum(weights) if sum(weights) > 0 else 0.5
    return mixed


@torch.no_grad()
def policy_of(module: Any) -> Policy:
    """The probabilities of a network."""
    keys = [(card, history) for card in CARDS for history in HISTORIES]
    rows = torch.from_numpy(np.stack([observation(*key) for key in keys]))
    parameters, _ = module.policy(rows)
    bets = torch.softmax(parameters.double(), -1)[:, 1].tolist()
    return dict(zip(keys, bets, strict=True))


# -- training --------------------------------------------------------------------------------------


class Policies(Callback):
    """Keeps the policy after every iteration."""

    def __init__(self) -> None:
        self.all: list[Policy] = []

    def on_iteration(self, trainer: Any, event: Any) -> None:
        self.all.append(policy_of(trainer.learner.module))


def train(steps: int, seed: int, opponents: str, **overrides: Any) -> tuple[Any, list[Policy]]:
    """Train, and return the trainer and the policies after every iteration."""
    config: TrainConfig[Any] = TrainConfig(
        algo="ippo",
        total_timesteps=steps,
        num_envs=16,
        seed=seed,
        eval_episodes=0,
        progress=False,
    ).with_overrides(
        opponents=opponents,
        pool_size=40,
        snapshot_interval=500,
        num_steps=16,
        num_minibatches=2,
        learning_rate=3e-3,
        anneal_lr=False,
        gamma=1.0,
        gae_lambda=1.0,
        norm_adv=False,
        ent_coef=0.15,
        hidden_sizes=[32],
    )
    policies = Policies()
    trainer = ExperimentManager.setup(
        config.with_overrides(**overrides),
        env_fn=KuhnPoker,
        run_dir=None,
        callbacks=[policies],
    )
    trainer.train()
    return trainer, policies.all


def main() -> None:
    """Train and print exploitabilities."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--opponents", choices=("pool", "current"), default="pool")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer, policies = train(args.steps, args.seed, args.opponents)
    uniform = {(card, history): 0.5 for card in CARDS for history in HISTORIES}
    print(f"random policy: exploitability {exploitability(uniform):.4f}")
    print(f"last policy: {exploitability(policies[-1]):.4f}")
    print(f"average of {len(policies)} iterations: {exploitability(average(policies)):.4f}")
    if args.opponents == "pool":
        pool = [policy_of(one.module) for one in trainer.source.pool.snapshots.values()]
        print(f"average of {len(pool)} snapshots: {exploitability(average(pool)):.4f}")
    trainer.close()


if __name__ == "__main__":
    main()
