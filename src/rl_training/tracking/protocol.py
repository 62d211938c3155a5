"""What a tracker does, and what it is given when a run starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

Status: TypeAlias = Literal["finished", "interrupted", "failed"]
"""How a run ended. Interrupted runs are to be resumed."""


class Tracker(Protocol):
    """Sends the metrics of a run somewhere. It is made and called in the process of rank 0.

    What it raises ends the tracking with a warning, not the training.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one row: some metrics of a step. Steps never decrease, and may repeat."""
        ...

    def close(self, status: Status) -> None:
        """Finish: training ended, or is interrupted."""
        ...


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run that starts or is resumed, as a tracker is given it."""

    name: str
    """Name of the run folder; of a run in memory, algorithm, environment and seed."""
    config: TrainConfig[Any]
    """The settings of the run."""
    resumed_at: int | None
    """Step that a resumed run continues from; None: a new run."""
    earlier_rows: Callable[[], Iterable[tuple[int, Mapping[str, float]]]]
    """Returns the rows up to ``resumed_at``, with their steps, from ``metrics.jsonl``; a run in
    memory and a new run have none."""
    identity: Mapping[str, str]
    """What was saved by ``save_identity`` before the run was resumed; else empty."""
    save_identity: Callable[[Mapping[str, str]], None]
    """Saves what the tracker needs to continue its own run after a resume, such as an id."""

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the settings by flat names; values that are no numbers or texts as JSON."""
        fields = self.config.to_dict()
        nested = {key: fields.pop(key) for key in ("algo_kwargs", "atari")}
        if self.config.preprocessing == "none":
            nested.pop("atari")
        for group in nested.values():
            fields.update(group)
        return {
            key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for key, value in fields.items()
        }
