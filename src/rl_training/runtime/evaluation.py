"""Evaluations of a run: every shard plays its share of the episodes, on environments of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_training.communicator import Communicator
from rl_training.envs import PlainAdapter
from rl_training.errors import Paused, RankFailure
from rl_training.eval import EvalResult, episodes_of_each, eval_envs_for, evaluate_actor
from rl_training.runtime.episode_info import EpisodeInfo, means_of_sums
from rl_training.runtime.stopping import WorkFailedElsewhere
from rl_training.seeding import shard_key, stream_seed, torch_stream
from rl_training.types import StopRequest

if TYPE_CHECKING:
    from rl_training.runtime.actors import Actor
    from rl_training.runtime.trainer import Trainer

MakeEvalEnv = Callable[[int, int, int], PlainAdapter]
"""Makes environments for so many episodes, given the index of the first one and the shard."""


class Evaluator:
    """Plays evaluations of ``episodes`` episodes with the policy of a run.

    The episodes depend on the run's seed, the step and the shard alone: there is nothing to save,
    and training is not disturbed.
    """

    def __init__(self, episodes: int, make_env: MakeEvalEnv, communicator: Communicator) -> None:
        self.episodes = episodes
        self._make_env = make_env
        self._communicator = communicator
        self._shares = episodes_of_each(episodes, communicator.shards)
        self._envs: dict[int, PlainAdapter] = {}

    def open(self) -> None:
        """Make the environments of the local shards, unless they exist."""
        for shard in self._communicator.local:
            if self._shares[shard] and shard not in self._envs:
                first = sum(eval_envs_for(share) for share in self._shares[:shard])
                self._envs[shard] = self._make_env(self._shares[shard], first, shard)

    def close(self) -> None:
        """Close the environments."""
        while self._envs:
            _, env = self._envs.popitem()
            env.close()

    def play(self, trainer: Trainer, deterministic: bool, stop: StopRequest) -> list[list[Any]]:
        """Play the episodes of the local shards; return of each: returns, lengths, info sums.

        Raises `Paused` where ``stop`` requests it.
        """
        self.open()
        return [
            self._play(trainer, shard, deterministic, stop) for shard in self._communicator.local
        ]

    def _play(
        self, trainer: Trainer, shard: int, deterministic: bool, stop: StopRequest
    ) -> list[Any]:
        config, share = trainer.config, self._shares[shard]
        keys = trainer.log_info
        info = EpisodeInfo(keys, quota=[])
        if not share:
            return [(), (), info.sums()]
        env, step = self._envs[shard], trainer.global_step
        if keys:
            info = EpisodeInfo(keys, quota=episodes_of_each(share, env.num_episodes))
            env.watch_episodes(info.add)
        result = evaluate_actor(
            _actor_of(trainer, shard, deterministic),
            env,
            num_episodes=share,
            seed=stream_seed(config.seed, "evaluation", step, *shard_key(shard)),
            stop=stop,
        )
        return [result.returns, result.lengths, info.sums()]

    def combined(self, played: list[list[Any]]) -> tuple[EvalResult, list[tuple[float, float]]]:
        """Return the result over all shards of the run, and the sums of ``log_info``."""
        parts = self._communicator.gather_objects(played)
        returns, lengths = (tuple(x for part in parts for x in part[i]) for i in (0, 1))
        sums = np.sum([part[2] for part in parts], axis=0)
        return EvalResult(returns, lengths), [(float(a), float(b)) for a, b in sums]


class Evaluations:
    """The evaluations of a trainer: every rank plays the episodes of its own shards."""

    def __init__(self, trainer: Trainer) -> None:
        # Weak: a trainer, and with it a replay, is freed at once when its last user drops it.
        self._trainer_ref = weakref.ref(trainer)
        self._evaluators: dict[int, Evaluator] = {}
        """By number of episodes."""

    @property
    def _trainer(self) -> Trainer:
        trainer = self._trainer_ref()
        if trainer is None:
            raise RuntimeError("the trainer of these evaluations is gone")
        return trainer

    def open(self, episodes: int) -> None:
        """Make the environments for evaluations of so many episodes; all ranks call this."""
        evaluator = self._evaluator(episodes)
        error: Exception | None = None
        try:
            evaluator.open()
        except Exception as failure:  # noqa: BLE001 - raised below, on all ranks
            error = failure
        self._trainer.ranks.raise_together(error)
        self._close_workers(evaluator)

    def evaluate(self, episodes: int, deterministic: bool) -> tuple[EvalResult, dict[str, float]]:
        """Let every shard play its episodes; all ranks call this."""
        trainer, evaluator = self._trainer, self._evaluator(episodes)
        module = trainer.learner.module
        was_training = module.training
        module.eval()
        trainer.activity = "evaluating"
        try:
            result, sums = evaluator.combined(self._play(evaluator, deterministic))
        finally:
            trainer.activity = ""
            module.train(was_training)
        self._close_workers(evaluator)
        return result, means_of_sums("eval", trainer.log_info, sums)

    def close(self) -> None:
        """Close all environments."""
        for evaluator in self._evaluators.values():
            evaluator.close()

    def _evaluator(self, episodes: int) -> Evaluator:
        if episodes not in self._evaluators:
            trainer = self._trainer
            found = Evaluator(episodes, trainer.make_eval_env, trainer.communicator)
            self._evaluators[episodes] = found
        return self._evaluators[episodes]

    def _close_workers(self, evaluator: Evaluator) -> None:
        """Close worker processes: started for each evaluation, they take no memory in between."""
        if self._trainer.config.vectorization == "async":
            evaluator.close()

    def _play(self, evaluator: Evaluator, deterministic: bool) -> list[list[Any]]:
        """Play the episodes of this rank's shards and wait for the others; they fail together."""
        trainer = self._trainer
        if trainer.stop_signal is not None:  # all ranks know of it, also those without episodes
            raise Paused
        error: Exception | None = None
        played: list[list[Any]] = []
        try:
            with trainer.stopping.at("evaluate"):
                played = evaluator.play(trainer, deterministic, trainer.stops_work)
        except WorkFailedElsewhere as failure:
            error = failure
        except (Paused, RankFailure):
            raise
        except Exception as failure:  # noqa: BLE001 - raised below
            error = failure
        failed_elsewhere = isinstance(error, WorkFailedElsewhere)
        if failed_elsewhere or trainer.wait_for_ranks(failed=error is not None):
            trainer.save_before_failure()
            trainer.ranks.raise_together(None if failed_elsewhere else error)
        return played


def _actor_of(trainer: Trainer, shard: int, deterministic: bool) -> Actor:
    sampling: torch.Generator | None = None
    if not deterministic:
        seed, step = trainer.config.seed, trainer.global_step
        sampling = torch_stream(seed, "evaluation_actions", step, *shard_key(shard))
    return trainer.spec.eval_actor(trainer.learner, trainer.device, sampling)
