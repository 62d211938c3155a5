"""What two common mistakes with recorded data cost, on episodes that are all truncated.

In a corridor the left end, which is near, gives a reward of 0.02 at every step, and the right
end, which is far, one of 0.05. Recorded are random actions, in episodes of three steps from
anywhere. A policy walks to the right end only if values are learnt across the ends of episodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

minari = pytest.importorskip("minari")

from minari.data_collector import EpisodeBuffer  # noqa: E402

from rl_training import CQL  # noqa: E402
from rl_training.data.replay_buffer import ReplayBuffer  # noqa: E402
from rl_training.types import Array  # noqa: E402

WIDTH, START, STEPS, RECORDED_STEPS = 10, 1, 40, 3
NEAR, FAR = 0.02, 0.05  # values stay below 1: the Huber loss of larger errors is less sensitive
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Corridor(gym.Env[Any, Any]):
    """Places 0 to 10, a step to the left or to the right; it begins at place 1."""

    observation_space = spaces.Discrete(WIDTH + 1)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.t = (options or {}).get("place", START), 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.int64(self.place)

    def step(self, action: Any) -> Step:
        self.place = int(np.clip(self.place + (1 if action else -1), 0, WIDTH))
        self.t += 1
        reward = {0: NEAR, WIDTH: FAR}.get(self.place, 0.0)
        return self.observe(), reward, False, self.t == STEPS, {}


BEST = FAR * (STEPS - (WIDTH - START) + 1)
"""Return of walking to the right end: a reward at every step from the ninth on."""
LEFT = NEAR * (STEPS - START + 1)
"""Return of walking to the left end."""


def record(name: str, *, as_terminated: bool = False) -> None:
    random, env = np.random.default_rng(0), Corridor()
    buffers = []
    for _ in range(700):
        obs, _ = env.reset(options={"place": int(random.integers(WIDTH + 1))})
        observations, actions, rewards = [obs], random.integers(2, size=RECORDED_STEPS), []
        for action in actions:
            obs, reward, *_ = env.step(action)
            observations.append(obs)
            rewards.append(reward)
        last = [False] * (RECORDED_STEPS - 1) + [True]
        never = [False] * RECORDED_STEPS
        buffers.append(
            EpisodeBuffer(
                observations=np.array(observations),
                actions=actions,
                rewards=rewards,
                terminations=last if as_terminated else never,
                truncations=never if as_terminated else last,
            )
        )
    minari.create_dataset_from_buffers(
        name,
        buffers,
        observation_space=Corridor.observation_space,
        action_space=Corridor.action_space,
    )


def score(dataset: str, seed: int) -> float:
    learner = CQL(
        dataset=dataset,
        gamma=0.95,
        learning_rate=3e-3,
        tau=0.05,
        hidden_sizes=(32, 32),
        batch_size=128,
        conservative_weight=0.01,
        eval_episodes=1,
        eval_interval=0,
        seed=seed,
        progress=False,
    )
    result = learner.learn(1200, env_fn=Corridor, run_dir=None)
    return result.metrics["eval/return_mean"]


def shift_successors(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Make batches contain the successors of other rows, so many rows later."""
    take = ReplayBuffer._take

    def shifted(self: ReplayBuffer, cells: Array, last: Array, finals: Array) -> dict[str, Any]:
        del finals
        wrong = (last + rows).clip(0, len(self) - 1)
        return take(self, cells, wrong, self._final_row.reshape(-1).take(wrong))

    patch.setattr(ReplayBuffer, "_take", shifted)


@pytest.fixture(autouse=True, scope="module")
def _datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
        # Minari warns of every field of its metadata that is not given.
        warnings.filterwarnings("ignore", module=r"minari\.utils")
        record("test/truncated-v0")
        record("test/terminated-v0", as_terminated=True)
        yield


@pytest.mark.parametrize("seed", [0, 1])
def test_values_are_learnt_across_truncated_episodes(seed: int) -> None:
    assert score("test/truncated-v0", seed) == pytest.approx(BEST)


def test_truncation_taken_for_termination_costs_half() -> None:
    assert score("test/terminated-v0", 0) <= LEFT + 1e-6 <= 0.51 * BEST


@pytest.mark.parametrize("rows", [-1, 1])
def test_shifted_successors_cost_half(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_successors(monkeypatch, rows)
    assert score("test/truncated-v0", 0) <= LEFT + 1e-6 <= 0.51 * BEST
