"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.errors import ConfigError
from rl_training.tracking.protocol import Status, TrackedRun


class WandbTracker:
    """Weights & Biases, in the mode that its own environment variables set.

    Rows that were logged just before a run was killed may be missing there. So a resumed run first
    sends the rows that are missing: online, those after the last step that the server has;
    offline, where every part of a run is a folder of its own, all of them.
    """

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "wandb: true needs the extra 'wandb'; in the clone: pip install '.[wandb]'"
            ) from None
        self._run: Any = wandb.init(
            project=run.config.wandb_project,
            name=run.name,
            id=run.name,
            resume="allow",
            dir=str(folder),
            config=run.config.to_dict(),
        )
        self._first_step = int(self._run.starting_step)
        for step, metrics in run.earlier_rows():
            self.write(step, metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a row, unless it is there already."""
        if step >= self._first_step:
            self._run.log(dict(metrics), step=step)

    def close(self, status: Status) -> None:
        """Finish the run."""
        if status == "failed":
            self._run.finish(exit_code=1)
        else:
            self._run.finish()
