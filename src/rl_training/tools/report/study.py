"""Find and read the studies of ``rl-training tune`` for a report: their ``study.json``."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.tools.report.data import DamagedRun
from rl_training.tools.report.limits import (
    MAX_NAME,
    MAX_NUMBER,
    MAX_STEP,
    DamagedError,
    read_mapping,
    require_counts,
    require_names,
    require_types,
)

STUDY = "study.json"
_FORMAT = 1
_FINAL = "final"
_STATES = ("complete", "pruned", "fail")
_MAX_SETTINGS = 100


@dataclasses.dataclass(frozen=True)
class StoredTrial:
    """One trial that ended."""

    number: int
    state: str
    value: float | None


@dataclasses.dataclass(frozen=True)
class BestTrial:
    """One of the best complete trials, with its settings as text."""

    number: int
    value: float
    folder: str
    settings: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class FinalReturns:
    """Returns on seeds that were not tuned on."""

    seeds: tuple[int, ...]
    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class StoredStudy:
    """One readable study."""

    path: Path
    name: str
    command: str
    algo: str
    env_id: str
    objective: str
    seeds: tuple[int, ...]
    trials: tuple[StoredTrial, ...]
    best: tuple[BestTrial, ...]
    importances: Mapping[str, float]
    final: Mapping[str, FinalReturns]
    """Of the best settings ("tuned") and of the untuned preset ("preset"); empty: not evaluated."""


def find_studies(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of studies at or below ``paths``, without duplicates."""
    found: dict[Path, Path] = {}
    for path in paths:
        for folder, below, files in os.walk(path):
            if STUDY in files:
                below.clear()
                found.setdefault(Path(folder).resolve(), Path(folder))
    return sorted(found.values())


def without_trials(runs: Sequence[Path], study: Path, best: str | None) -> list[Path]:
    """Return the run folders without those of a study's trials, of which there are many.

    Kept are the runs of its final evaluation; without one, those of the best trial.
    """
    own = [run for run in runs if run.resolve().is_relative_to(study.resolve())]
    parts = {run: run.resolve().relative_to(study.resolve()).parts for run in own}
    kept = [run for run in own if parts[run][:1] == (_FINAL,)]
    kept = kept or [run for run in own if parts[run][:1] == (best,)] or own
    return [run for run in runs if run not in own or run in kept]


def read_studies(folders: Sequence[Path]) -> tuple[list[StoredStudy], list[DamagedRun]]:
    """Read all folders; return the studies, and the damaged folders with the reason."""
    studies: list[StoredStudy] = []
    damaged: list[DamagedRun] = []
    for folder in folders:
        try:
            studies.append(read_study(folder))
        except DamagedError as error:
            damaged.append(DamagedRun(folder, str(error)))
    return studies, damaged


def read_study(folder: Path) -> StoredStudy:
    """Read the study.json of a folder; raise DamagedError if it cannot be used."""
    content = read_mapping(folder / STUDY)
    require_counts(STUDY, content, format=_FORMAT)
    require_names(STUDY, content, "study", "algo", "env_id", "objective")
    require_types(STUDY, content, command=str, importances=dict, final=dict)
    return StoredStudy(
        path=folder,
        name=content["study"],
        command=content.get("command") or "",
        algo=content["algo"],
        env_id=content["env_id"],
        objective=content["objective"],
        seeds=_seeds(content),
        trials=tuple(_trial(each) for each in _mappings(content, "trials")),
        best=tuple(_best(each) for each in _mappings(content, "best")),
        importances=_importances(content.get("importances") or {}),
        final={
            name: _final(each)
            for name, each in (content.get("final") or {}).items()
            if name in ("tuned", "preset")
        },
    )


def _trial(content: Mapping[str, Any]) -> StoredTrial:
    require_counts(STUDY, content, number=MAX_STEP)
    state = content.get("state")
    if state not in _STATES:
        raise DamagedError(f"{STUDY} has no usable 'state'")
    value = content.get("value")
    return StoredTrial(
        content["number"], str(state), None if value is None else _finite(content, "value")
    )


def _best(content: Mapping[str, Any]) -> BestTrial:
    require_counts(STUDY, content, number=MAX_STEP)
    require_names(STUDY, content, "folder")
    settings = content.get("settings")
    if not isinstance(settings, dict) or len(settings) > _MAX_SETTINGS:
        raise DamagedError(f"{STUDY} has no usable 'settings'")
    shown = {name: str(value)[:MAX_NAME] for name, value in settings.items()}
    return BestTrial(content["number"], _finite(content, "value"), content["folder"], shown)


def _final(content: Any) -> FinalReturns:
    if not isinstance(content, dict):
        raise DamagedError(f"{STUDY} has no usable 'final'")
    mean, low, high = (_finite(content, name) for name in ("mean", "low", "high"))
    return FinalReturns(_seeds(content), mean, low, high)


def _importances(content: Mapping[str, Any]) -> dict[str, float]:
    if len(content) > _MAX_SETTINGS:
        raise DamagedError(f"{STUDY} has no usable 'importances'")
    return {name: _finite(content, name) for name in content}


def _seeds(content: Mapping[str, Any]) -> tuple[int, ...]:
    seeds = content.get("seeds")
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise DamagedError(f"{STUDY} has no usable 'seeds'")
    return tuple(seeds)


def _mappings(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = content.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DamagedError(f"{STUDY} has no usable {key!r}")
    return found


def _finite(content: Mapping[str, Any], key: str) -> float:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DamagedError(f"{STUDY} has no usable {key!r}")
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise DamagedError(f"{STUDY} has no usable {key!r}")
    return float(value)
