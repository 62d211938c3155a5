"""Games against a pool of frozen snapshots of the policy that learns."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.algorithms.ippo import IPPOConfig
from rl_training.config import TrainConfig
from rl_training.envs import Adapter, TeamAdapter
from rl_training.errors import ConfigError
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.actors import Actor, EvaluationActor, PolicyActor
from rl_training.runtime.episode_info import WINDOW
from rl_training.runtime.ratings import START, after_game, expected_score
from rl_training.runtime.sources import LocalSource, Taken, local_source
from rl_training.seeding import torch_stream
from rl_training.types import Array, Obs, Progress, StopRequest, VectorStep

_LEARNER = -1
"""In place of a snapshot's number: a row that the learner plays."""


@dataclasses.dataclass
class Snapshot:
    """The policy as it was at a step, with its Elo rating."""

    step: int
    rating: float
    module: Any
    """A copy of the networks."""
    actor: EvaluationActor
    """Samples from this policy."""


class SnapshotPool:
    """The last ``pool_size`` snapshots of a policy, their ratings, and the rating of the policy."""

    def __init__(
        self,
        module: Any,
        settings: IPPOConfig,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self.snapshots: dict[int, Snapshot] = {}
        """By number, counted from 0. Older ones are kept while a game against them goes on."""
        self.rating = START
        """Of the policy that learns."""
        self.results: deque[float] = deque(maxlen=WINDOW)
        """Scores of the learner in the last games: 1 for a win, 0.5 for a draw."""
        self._module = module
        self._settings = settings
        self._generator = generator
        self._device = device
        self._counted = -1
        """The step at which it was last decided whether a snapshot is due."""

    @property
    def drawn_from(self) -> list[int]:
        """Numbers of the snapshots that new games are played against."""
        return sorted(self.snapshots)[-self._settings.pool_size :]

    def update(self, step: int, in_use: set[int]) -> None:
        """Add a snapshot where ``step`` crossed a multiple of the interval, and before any step."""
        interval = self._settings.snapshot_interval
        is_due = self._counted < 0 or step // interval > self._counted // interval
        self._counted = step
        if not is_due:
            return
        number = max(self.snapshots, default=-1) + 1
        self.snapshots[number] = self._made(step, self.rating, None)
        kept = in_use.union(self.drawn_from)
        self.snapshots = {k: one for k, one in self.snapshots.items() if k in kept}

    def _made(self, step: int, rating: float, weights: Mapping[str, Tensor] | None) -> Snapshot:
        module = copy.deepcopy(self._module).eval().requires_grad_(requires_grad=False)
        if weights is not None:
            module.load_state_dict(weights)
        actor = EvaluationActor(module, self._device, self._generator)
        return Snapshot(step, rating, module, actor)

    def draw(self) -> tuple[int, int]:
        """Return who plays a new game, a snapshot's number or the learner's, and its seat."""
        against, which, seat = torch.rand(3, generator=self._generator).tolist()
        if against >= self._settings.pool_fraction:
            return _LEARNER, 0
        numbers = self.drawn_from
        cumulative = np.cumsum([self._weight(number) for number in numbers])
        place = int(np.searchsorted(cumulative, which * cumulative[-1], side="right"))
        return numbers[min(place, len(numbers) - 1)], int(seat >= 0.5)

    def _weight(self, number: int) -> float:
        """The chance of a snapshot to be drawn, up to a factor.

        By rating it is its expected score against the policy that learns: strong opponents are met
        more often (prioritised fictitious self-play, Vinyals et al. 2019).
        """
        if self._settings.pool_sampling == "uniform":
            return 1.0
        return expected_score(self.snapshots[number].rating, self.rating)

    def add_result(self, number: int, score: float) -> None:
        """Rate a game in which the learner scored 1, 0.5 or 0."""
        snapshot = self.snapshots[number]
        self.rating, snapshot.rating = after_game(self.rating, snapshot.rating, score)
        self.results.append(score)

    def metrics(self) -> dict[str, float]:
        """Return the rating of the policy that learns and the results of its last games."""
        found = {"self_play/elo": self.rating, "self_play/snapshots": float(len(self.drawn_from))}
        if self.results:
            scores = np.array(self.results)
            found["self_play/win_rate"] = float(np.mean(scores == 1.0))
            found["self_play/draw_rate"] = float(np.mean(scores == 0.5))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return snapshots, ratings, results and the state of the random generator."""
        return {
            "snapshots": [
                {
                    "number": number,
                    "step": one.step,
                    "rating": one.rating,
                    "weights": dict(one.module.state_dict()),
                }
                for number, one in self.snapshots.items()
            ],
            "rating": self.rating,
            "results": list(self.results),
            "counted": self._counted,
            "rng": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.snapshots = {
            int(one["number"]): self._made(int(one["step"]), float(one["rating"]), one["weights"])
            for one in state["snapshots"]
        }
        self.rating = float(state["rating"])
        self.results.clear()
        self.results.extend(map(float, state["results"]))
        self._counted = int(state["counted"])
        self._generator.set_state(state["rng"])


class SelfPlaySource(LocalSource):
    """Steps games of two agents; in a part of them a snapshot has one of the two seats.

    The rows of a snapshot are not ``valid``: they are in no loss and are not counted.
    """

    env: TeamAdapter

    def __init__(
        self,
        env: TeamAdapter,
        actor: Actor,
        reward_normalizer: RewardNormalizer | None,
        window: int,
        pool: SnapshotPool,
    ) -> None:
        super().__init__(env, actor, reward_normalizer, window)
        self.pool = pool
        self._played_by = np.full(env.num_envs, _LEARNER)
        """Who plays each row: a snapshot's number, or the learner."""
        self._returns = np.zeros(env.num_envs)
        """Rewards so far of each row's game."""

    def _steps(
        self, obs: Obs, num_steps: int, progress: Progress, stop: StopRequest
    ) -> Iterator[Taken]:
        self.pool.update(progress.step, set(self._played_by.tolist()))
        if self.obs is None:
            for env in range(self.env.num_episodes):
                self._begin(env)
        for _ in range(num_steps):
            if stop():
                return
            action, record = self._act(obs, progress)
            action = self._with_snapshots(obs, action)
            step = self._recorded(self._step(action))
            yield action, record, step
            obs = step.obs

    def _with_snapshots(self, obs: Obs, action: Array) -> Array:
        """Return the actions with those of the snapshots' rows replaced by theirs."""
        rows = np.flatnonzero((self._played_by != _LEARNER) & self.env.acting)
        if not rows.size:
            return action
        action, players = action.copy(), self._played_by[rows]
        for number in np.unique(players).tolist():
            own = rows[players == number]
            seen: Any = tree_map(lambda leaf, own=own: leaf[own], obs)
            action[own], _ = self.pool.snapshots[number].actor.act(seen, Progress(0, 1))
        return action

    def _recorded(self, step: VectorStep) -> VectorStep:
        """Rate games that ended, draw who plays the next ones; return a step of the learner's."""
        learns = self._played_by == _LEARNER
        self._returns += step.reward
        for episode in step.episodes:
            self._rate(episode.env)
            self._begin(episode.env)
        waiting = step.waiting
        if waiting is not None:
            waiting = waiting & (self._played_by == _LEARNER)
        return step._replace(valid=step.valid & learns, waiting=waiting)

    def _rate(self, env: int) -> None:
        rows = slice(2 * env, 2 * env + 2)
        (seats,) = np.nonzero(self._played_by[rows] != _LEARNER)
        if seats.size:
            theirs, ours = self._returns[rows][seats[0]], self._returns[rows][1 - seats[0]]
            score = 0.5 if ours == theirs else float(ours > theirs)
            self.pool.add_result(int(self._played_by[rows][seats[0]]), score)

    def _begin(self, env: int) -> None:
        """Draw who plays the next game of an environment."""
        number, seat = self.pool.draw()
        self._played_by[2 * env : 2 * env + 2] = _LEARNER
        self._played_by[2 * env + 1 - seat] = number
        self._returns[2 * env : 2 * env + 2] = 0

    def metrics(self) -> dict[str, float]:
        """Return the means over the last training episodes, and how the pool's games ended."""
        return {**super().metrics(), **self.pool.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a `LocalSource`, of the pool and of the games."""
        pool, rows = self.pool.state_dict(), self._played_by.copy()
        own = {"pool": pool, "played_by": rows, "returns": self._returns.copy()}
        return {**super().state_dict(), "self_play": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; False where the environments could not be restored exactly."""
        own = state["self_play"]
        self.pool.load_state_dict(own["pool"])
        self._played_by[:] = own["played_by"]
        self._returns[:] = own["returns"]
        if not set(self._played_by.tolist()) <= {_LEARNER, *self.pool.snapshots}:
            raise ValueError("a game is played by a snapshot that is not in the pool")
        return super().load_state_dict(state)


def source_of_games(
    learner: Any,
    config: TrainConfig[Any],
    device: torch.device,
    env: Adapter,
    actor: Actor,
    reward_normalizer: RewardNormalizer | None,
    window: int,
) -> LocalSource:
    """Return the source of a shard, with a pool of opponents where the settings request one."""
    if getattr(config.algo_kwargs, "opponents", "current") == "current":
        return local_source(env, actor, reward_normalizer, window)
    if config.shards > 1:
        raise ConfigError(
            "'algo_kwargs.opponents' pool runs in one shard: leave out shards and torchrun"
        )
    assert isinstance(env, TeamAdapter)  # noqa: S101 - narrows the type: others are refused before
    if len(env.agents) != 2:
        raise ConfigError(
            f"'algo_kwargs.opponents' pool is for games of two agents; {env.name} has"
            f" {len(env.agents)} ({', '.join(env.agents)}): use opponents: current"
        )
    if env.layout.is_grouped:
        raise ConfigError(
            "'algo_kwargs.opponents' pool needs agents that share a policy: use policies: shared,"
            " without groups"
        )
    if not isinstance(actor, PolicyActor):
        raise ConfigError(
            "'algo_kwargs.opponents' pool needs a policy without memory: use opponents: current"
        )
    generator = torch_stream(config.seed, "opponents")
    pool = SnapshotPool(learner.module, config.algo_kwargs, generator, device)
    return SelfPlaySource(env, actor, reward_normalizer, window, pool)
