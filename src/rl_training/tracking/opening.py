"""The trackers that a run's settings name; one that fails is dropped with a warning."""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.plugins import installed_points
from rl_training.runs import read_json, write_json
from rl_training.tracking.mlflow import MlflowTracker
from rl_training.tracking.protocol import Status, TrackedRun, Tracker
from rl_training.tracking.tensorboard import TensorBoardTracker
from rl_training.tracking.wandb import WandbTracker

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

ENTRY_POINTS = "rl_training.trackers"
"""Group in which installed packages register trackers."""
_FILE = "trackers.json"
Make = Callable[[TrackedRun], Tracker]


class Identities:
    """What trackers saved of their own runs, by tracker: in the run folder, or in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE
        self._known = {} if self._path is None else _checked(read_json(self._path))
        self._lock = threading.Lock()

    def of(self, tracker: str) -> Mapping[str, str]:
        """Return what a tracker saved."""
        return self._known.get(tracker, {})

    def save(self, tracker: str, identity: Mapping[str, str]) -> None:
        """Save it, from any thread."""
        with self._lock:
            self._known[tracker] = dict(identity)
            if self._path is not None:
                write_json(self._path, self._known)


def _checked(content: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the texts of a file that anybody may have written."""
    return {
        name: {key: value for key, value in saved.items() if isinstance(value, str)}
        for name, saved in content.items()
        if isinstance(saved, dict)
    }


class Trackers:
    """All trackers of a run, which starts or is resumed."""

    def __init__(
        self,
        config: TrainConfig[Any],
        folder: Path | None,
        identities: Identities,
        *,
        resumed_at: int | None,
        earlier_rows: Callable[[], Iterable[tuple[int, Mapping[str, float]]]],
    ) -> None:
        self._open: dict[str, Tracker] = {}
        in_memory = f"{config.algo}__{config.env_id or config.dataset}__seed{config.seed}"
        for name, make in _makers(config, folder).items():
            run = TrackedRun(
                in_memory if folder is None else folder.name,
                config,
                resumed_at,
                earlier_rows,
                identities.of(name),
                functools.partial(identities.save, name),
            )
            with _Guard(self, name):
                self._open[name] = make(run)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give a row to every tracker."""
        for name, tracker in list(self._open.items()):
            with _Guard(self, name):
                tracker.write(step, metrics)

    def close(self, status: Status) -> None:
        """Close every tracker."""
        while self._open:
            name, tracker = self._open.popitem()
            with _Guard(self, name):
                tracker.close(status)

    def drop(self, name: str) -> None:
        """Forget a tracker that failed."""
        self._open.pop(name, None)


class _Guard:
    """Turns what a tracker raises into one warning; mistakes of the user are raised."""

    def __init__(self, trackers: Trackers, name: str) -> None:
        self._trackers = trackers
        self._name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Drop the tracker if it failed."""
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return False
        self._trackers.drop(self._name)
        reason = " ".join(str(error).split())[:500]
        warnings.warn(
            f"{self._name} failed and gets no more metrics, training goes on"
            f" ({type(error).__name__}: {reason}). Nothing is lost in metrics.jsonl",
            stacklevel=3,
        )
        return True


def _makers(config: TrainConfig[Any], folder: Path | None) -> dict[str, Make]:
    """Return what makes each tracker, by name. Files of TensorBoard need a run folder."""
    makers: dict[str, Make] = {}
    if config.tensorboard and folder is not None:
        makers["tensorboard"] = functools.partial(TensorBoardTracker, folder / "tensorboard")
    if config.wandb and folder is not None:
        makers["wandb"] = functools.partial(WandbTracker, folder)
    if config.mlflow:
        makers["mlflow"] = MlflowTracker
    return {**makers, **{name: _installed(name) for name in config.trackers}}


def check_trackers(config: TrainConfig[Any], *, in_memory: bool) -> None:
    """Raise ConfigError for trackers that cannot be used, before a run starts."""
    if config.wandb and in_memory:
        raise ConfigError("wandb: true needs a run folder, and run_dir=None has none")
    for name, wanted in (("wandb", config.wandb), ("mlflow", config.mlflow)):
        if wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name}: true needs the extra {name!r}; in the clone: pip install '.[{name}]'"
            )
    for name in config.trackers:
        _installed(name)


def _installed(name: str) -> Make:
    """Return what makes a tracker of an installed package."""
    points = installed_points(ENTRY_POINTS, "a tracker")
    if name in ("tensorboard", "wandb", "mlflow"):
        raise ConfigError(f"'trackers' is for other packages: set {name}: true instead")
    if name not in points:
        known = did_you_mean(name, points) or " No installed package registers one."
        raise ConfigError(f"'trackers': unknown tracker {name!r}.{known}")
    try:
        make = points[name].load()
    except Exception as error:
        raise ConfigError(
            f"'trackers': {name!r} of an installed package cannot be loaded"
            f" ({points[name].value}): {type(error).__name__}: {error}"
        ) from error
    if not callable(make):
        raise ConfigError(f"'trackers': {name!r} must name a function or class, not {make!r}")
    found: Make = make
    return found
