"""What a trainer is made of, and what comes out of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_training.communicator import ALONE
from rl_training.errors import UserError
from rl_training.runs import RunLock
from rl_training.runtime.dataset_source import DatasetSource
from rl_training.runtime.evaluation import MakeEvalEnv
from rl_training.runtime.experience import ExperienceSource
from rl_training.runtime.ranks import Ranks
from rl_training.runtime.rendering import MakeRenderingEnv
from rl_training.runtime.sharded_source import shard_sources

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.spec import AlgorithmSpec


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    folder: Path | None
    """The run folder; None for a run that was kept in memory."""
    metrics: dict[str, float]
    """The last value of every metric, the last evaluation's and ``global_step`` included."""
    stop_reason: str
    interrupted: bool = False
    """Stopped by a signal: resume it."""

    def __repr__(self) -> str:
        """Return where the run is, how far it came and why it ended."""
        where = "None" if self.folder is None else f"'{self.folder}'"
        done = int(self.metrics.get("global_step", 0))
        return f"TrainResult(run_dir={where}, global_step={done}, stop_reason={self.stop_reason!r})"

    @property
    def run_dir(self) -> Path:
        """The run folder; raises `UserError` for a run that was kept in memory."""
        return require_folder(self.folder)

    @property
    def checkpoint_path(self) -> Path:
        """The last checkpoint."""
        return self.run_dir / "checkpoints" / "last.pt"


@dataclasses.dataclass
class Setup:
    """What a trainer is made of."""

    spec: AlgorithmSpec
    config: TrainConfig[Any]
    learner: Any
    source: ExperienceSource
    make_eval_env: MakeEvalEnv
    make_rendering_env: MakeRenderingEnv
    custom_env: bool
    """Whether environments are made by a function of the user's."""
    device: torch.device
    threads: int
    folder: Path | None = None
    """The run folder; None: nothing is written."""
    lock: RunLock | None = None
    ranks: Ranks = dataclasses.field(default_factory=lambda: Ranks(ALONE))
    """The processes that execute the run's shards."""
    prior_data: DatasetSource | None = None
    """A dataset that a part of every batch comes from, besides the replay."""

    def of_shard(self, index: int) -> Setup:
        """Return the set-up of a local shard by itself: its source and its part of the sizes."""
        shards = self.ranks.communicator.shards
        if shards == 1:
            return dataclasses.replace(self, source=shard_sources(self.source)[index])
        sizes = {"shards": 1, "num_envs": self.config.num_envs // shards}
        if (capacity := getattr(self.config.algo_kwargs, "buffer_size", None)) is not None:
            sizes["buffer_size"] = capacity // shards
        config = self.config.with_overrides(**sizes)
        return dataclasses.replace(self, source=self.source.shards[index], config=config)  # type: ignore[attr-defined]


class Iteration(NamedTuple):
    """What one iteration did."""

    steps: int
    metrics: dict[str, float]


def require_folder(folder: Path | None) -> Path:
    """Return a run folder; raise `UserError` for a run that was kept in memory."""
    if folder is None:
        raise UserError("this run is kept in memory (run_dir=None): it has no folder and no files")
    return folder
