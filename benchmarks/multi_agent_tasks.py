"""The tasks of `multi_agent.py` and the episodes that policies play; needs only mpe2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpe2 import simple_speaker_listener_v4, simple_spread_v3

TASKS: dict[str, Callable[[], Any]] = {
    "simple_spread_v3": lambda: simple_spread_v3.parallel_env(N=3, max_cycles=25),
    "simple_speaker_listener_v4": lambda: simple_speaker_listener_v4.parallel_env(max_cycles=25),
}
ROLLOUT = 125
"""Steps of the environment per rollout, in every library."""


def played(
    task: str, act: Callable[[dict[str, Any]], dict[str, int]], episodes: int
) -> list[dict[str, float]]:
    """Return the return of each agent, for each of the episodes that all policies play."""
    game = TASKS[task]()
    returns = []
    for episode in range(episodes):
        seen, _ = game.reset(seed=10_000 + episode)
        sums = dict.fromkeys(game.agents, 0.0)
        while game.agents:
            seen, rewards, *_ = game.step(act(seen))
            for agent, reward in rewards.items():
                sums[agent] += float(reward)
        returns.append(sums)
    return returns
