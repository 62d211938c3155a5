"""``normalize_obs`` with a replay: raw observations are stored, statistics move per iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.checkpointing import load_checkpoint, state_digest
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.models.normalizer import RunningNorm
from rl_training.runtime import resume_training
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.trainer import Trainer

ALGOS = ["dqn", "drqn", "sac", "td3"]


def config_of(algo: str, folder: Path, **overrides: Any) -> TrainConfig[Any]:
    """A short run of 100 steps an iteration, with the statistics of observations."""
    knobs: dict[str, Any] = {"learning_starts": 30, "buffer_size": 400, "batch_size": 16}
    knobs |= {"hidden_sizes": (8,)}
    if algo in ("dqn", "drqn"):
        knobs |= {"train_freq": 4, "target_update_interval_steps": 50}
    settings = {
        "algo": algo,
        "env_id": "Pendulum-v1" if algo in ("sac", "td3") else "CartPole-v1",
        "num_envs": 2,
        "total_timesteps": 300,
        "normalize_obs": True,
        "eval_episodes": 1,
        "progress": False,
        "tensorboard": False,
        "torch_threads": 1,
        "output_dir": folder,
        "algo_kwargs": knobs,
    }
    return TrainConfig(**{**settings, **overrides})


@pytest.fixture(autouse=True)
def _short_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.runtime.off_policy._ITERATION", 100)


def norms(module: torch.nn.Module) -> list[RunningNorm]:
    """The normalisers of a module's networks."""
    return [part for part in module.modules() if isinstance(part, RunningNorm)]


class Watch(Callback):
    """Notes the statistics, and what was observed, after each iteration."""

    def __init__(self) -> None:
        self.observed: list[np.ndarray[Any, Any]] = []
        self.means: list[list[torch.Tensor]] = []

    def on_start(self, trainer: Trainer) -> None:
        collect = trainer.source.collect
        trainer.source.collect = self._seeing(collect, trainer)  # type: ignore[method-assign]

    def _seeing(self, collect: Any, trainer: Trainer) -> Any:
        def seeing(buffer: Any, *args: Any) -> Any:
            before = [norm.count.clone() for norm in norms(trainer.learner.module)]
            watch = self

            class Seen:
                def add(self, obs: Any, *rest: Any) -> None:
                    watch.observed.append(obs.copy())
                    buffer.add(obs, *rest)

            taken = collect(Seen(), *args)
            after = [norm.count for norm in norms(trainer.learner.module)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return taken

        return seeing

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        self.means.append([norm.mean.clone() for norm in norms(trainer.learner.module)])


@pytest.mark.parametrize("algo", ALGOS)
def test_statistics_are_those_of_all_observations_and_move_once_per_iteration(
    algo: str, tmp_path: Path
) -> None:
    watch = Watch()
    trainer: Any = ExperimentManager.setup(config_of(algo, tmp_path), callbacks=[watch])
    trainer.train()
    assert len(watch.means) == 3
    for number, means in enumerate(watch.means, start=1):
        seen = np.concatenate(watch.observed[: 50 * number]).astype(np.float64)
        assert means
        for mean in means:
            np.testing.assert_allclose(mean.numpy(), seen.mean(0), rtol=1e-9, atol=1e-12)
    networks = norms(trainer.learner.module)
    assert len(networks) == (2 if algo in ("sac", "td3") else 1)
    # What is stored is what was observed.
    obs, valid = trainer.replay.newest_observations(150)
    np.testing.assert_array_equal(obs.numpy(), np.concatenate(watch.observed))
    assert valid.all()


class StopHalfway(Callback):
    """Ends a run in the middle."""

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        if event.step >= 200:
            trainer.request_stop("halfway")


@pytest.mark.parametrize("algo", ALGOS)
def test_a_run_resumes_exactly(algo: str, tmp_path: Path) -> None:
    config = config_of(algo, tmp_path)
    whole = ExperimentManager.setup(config).train()
    half = ExperimentManager.setup(config, callbacks=[StopHalfway()]).train()
    rest = resume_training(half.run_dir)
    ends = [load_checkpoint(run.checkpoint_path) for run in (whole, rest)]
    digests = [state_digest(end["algorithm"]) for end in ends]
    assert digests[0] == digests[1]
    weights = ends[0]["algorithm"]["model"]
    counts = [value for name, value in weights.items() if name.endswith("count")]
    assert counts
    assert all(float(count) == 300 for count in counts)


def test_rewards_are_not_normalised_with_a_replay(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="normalize_reward"):
        config_of("sac", tmp_path, normalize_reward=True)
