"""Find and read run folders for a report; folders that cannot be read are listed as damaged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training._internal.yaml_io import load_yaml_file
from rl_training.errors import ConfigError, UserError
from rl_training.tools.report.limits import (
    MAX_STEP,
    DamagedError,
    plain_mapping,
    read_mapping,
    require_counts,
    require_names,
    require_types,
)
from rl_training.tools.report.log import Series, read_log
from rl_training.tools.report.stats import Unit

_FILES = ("config.yaml", "metadata.json", "metrics.jsonl", "summary.json")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What a run is, from its config and metadata."""

    path: Path
    config: Mapping[str, Any]
    """Flat: hyperparameters of the algorithm are 'algo_kwargs.NAME'."""
    metadata: Mapping[str, Any]

    @property
    def unit(self) -> Unit:
        """What the run counts: steps of environments, or updates of a run from a dataset alone."""
        return "updates" if self.config.get("total_updates") else "steps"

    @property
    def algo(self) -> str:
        """The algorithm's name."""
        return str(self.config["algo"])

    @property
    def env_id(self) -> str:
        """The environment's id, and the name of the ``env_fn`` that created it, if any."""
        made_by = self.metadata.get("env_fn")
        env_id = str(self.config["env_id"])
        return env_id if made_by is None else f"{env_id} (env_fn {made_by})"

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def created(self) -> str:
        """When it started, in UTC."""
        return str(self.metadata.get("created", ""))


@dataclasses.dataclass(frozen=True)
class StoredRun(RunInfo):
    """One readable run folder."""

    status: str
    """'finished', 'interrupted', 'failed', or 'no end recorded' (still running, or killed)."""
    reason: str
    step: int
    total: int
    seconds: float
    series: Mapping[str, Series]
    metric_names: frozenset[str]
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return self.status == "finished"


@dataclasses.dataclass(frozen=True)
class DamagedRun:
    """A run folder that could not be read."""

    path: Path
    reason: str


def find_run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders at or below ``paths``, without duplicates."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist")
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: give a run folder, or one that contains some")
        here = list(run_folders_below(path))
        if not here:
            raise UserError(
                f"no runs found in {path}: a run folder contains config.yaml, metadata.json"
                " and metrics.jsonl"
            )
        for folder in here:
            found.setdefault(folder.resolve(), folder)
    return sorted(found.values())


def run_folders_below(path: Path) -> Iterator[Path]:
    """Yield the run folders at or below a folder."""
    for folder, below, files in os.walk(path):
        if sum(name in files for name in _FILES) >= 2:  # a folder that lost a file is still listed
            below.clear()
            yield Path(folder)


def read_runs(
    folders: Iterable[Path], metrics: Sequence[str]
) -> tuple[list[StoredRun], list[DamagedRun]]:
    """Read all folders; return the runs, and the damaged folders with the reason."""
    runs: list[StoredRun] = []
    damaged: list[DamagedRun] = []
    for folder in folders:
        try:
            runs.append(read_run(folder, metrics))
        except DamagedError as error:
            damaged.append(DamagedRun(folder, str(error)))
        except Exception as error:  # noqa: BLE001 - a folder nobody thought of must not end a report
            damaged.append(DamagedRun(folder, f"cannot be read: {type(error).__name__}"))
    return runs, damaged


def read_run(folder: Path, metrics: Sequence[str]) -> StoredRun:
    """Read one run folder and the named metrics."""
    info = read_info(folder)
    log = read_log(folder / "metrics.jsonl", metrics)
    summary = read_summary(folder)
    status, reason = summary.get("status", "no end recorded"), str(summary.get("reason", ""))
    step = summary.get("global_step", log.last_step)
    if not summary:
        reason = "still running, or killed"
    elif log.last_step > step:
        # A resumed run writes its summary only when it ends again.
        status, reason, step = "no end recorded", "resumed; still running, or killed", log.last_step
    return StoredRun(
        path=folder,
        config=info.config,
        metadata=info.metadata,
        status=status,
        reason=reason,
        step=step,
        total=total_of(summary) or total_of(info.config),
        seconds=log.seconds,
        series=log.series,
        metric_names=log.names,
        notes=log.notes,
    )


def read_info(folder: Path) -> RunInfo:
    """Read the config and the metadata of a run folder."""
    config = _read_config(folder / "config.yaml")
    return RunInfo(folder, config, _read_metadata(folder / "metadata.json"))


def total_of(content: Mapping[str, Any]) -> int:
    """Return the steps that a run is to make; the updates of a run from a dataset alone."""
    return int(content.get("total_updates") or content.get("total_timesteps") or 0)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DamagedError("config.yaml is missing")
    try:
        content = load_yaml_file(path)
    except ConfigError as error:
        raise DamagedError(str(error).replace(str(path), "config.yaml")) from None
    if not isinstance(content, dict):
        raise DamagedError("config.yaml does not contain settings")
    flat = dict(_flatten(plain_mapping(content, path.name)))
    if flat.get("env_id") == "":  # a run from a dataset, without an environment
        flat["env_id"] = flat.get("dataset")
    require_names(path.name, flat, "algo", "env_id")
    require_counts(path.name, flat, seed=10**100, total_timesteps=MAX_STEP)
    if "total_updates" in flat:
        require_counts(path.name, flat, total_updates=MAX_STEP)
    flat.pop("format", None)
    return flat


def _read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a run and its resumes."""
    content = read_mapping(path)
    require_types(path.name, content, created=str, command=list, resumes=list)
    require_types(path.name, content, hardware=dict, versions=dict)
    if content.get("env_fn") is not None:
        require_names(path.name, content, "env_fn")
    return content


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary that is written when a run ends; empty if there is none yet."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    content = read_mapping(path)
    require_names(path.name, content, "status")
    total = "total_updates" if "total_updates" in content else "total_timesteps"
    require_counts(path.name, content, global_step=MAX_STEP, **{total: MAX_STEP})
    return content


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
