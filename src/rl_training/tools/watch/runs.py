"""The runs below some folders as they are now: status, curves, videos. Reads only what is new."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.terminal import one_line
from rl_training.tools.report.data import (
    RunInfo,
    read_info,
    read_summary,
    run_folders_below,
    total_of,
)
from rl_training.tools.report.format import plain, setting
from rl_training.tools.report.groups import NOT_LEARNING, differing_keys
from rl_training.tools.report.limits import MAX_STEP, DamagedError
from rl_training.tools.report.log import is_drawable
from rl_training.tools.report.model import EVALUATION, TRAINING
from rl_training.tools.report.videos import video_names
from rl_training.tools.watch.follower import LogFollower

_SECONDS_PER_READING = 1.0
"""Time after which an answer is given, although logs may not be read to their ends yet."""
_SECONDS_BETWEEN_SEARCHES = 3.0
RECENT_SECONDS = 120.0
"""A run without a recorded end counts as running if it wrote a row so recently (see `_status`)."""
_LOCKS = Path("/proc/locks")
_FILES = ("config.yaml", "metadata.json", "summary.json")
_LONGEST_TEXT = 300


class WatchedRun:
    """One run folder, read again where it changed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.id = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self.log = LogFollower(folder / "metrics.jsonl")
        self.info: RunInfo | None = None
        self.damage = ""
        """Why it cannot be read."""
        self.is_read = False
        """Whether all files were read to their ends."""
        self._summary: dict[str, Any] = {}
        self._stamp: tuple[Any, ...] = ()
        self._problem = ""
        """What is wrong with the files of this stamp."""
        self._was_locked = False

    def refresh(self, deadline: float) -> None:
        """Read what is new, until ``deadline`` (of `time.monotonic`)."""
        try:
            self._read_small_files()
            self.is_read = self.log.read_more(deadline)
            self.damage = ""
        except DamagedError as error:
            self.is_read, self.damage = True, str(error)
        except Exception as error:  # noqa: BLE001 - a folder nobody thought of must not end the rest
            self.is_read, self.damage = True, f"cannot be read: {type(error).__name__}"

    def _read_small_files(self) -> None:
        """Read config, metadata and summary if they changed; damaged ones are not read again."""
        stamp = tuple(_stamp(self.folder / name) for name in _FILES)
        if stamp != self._stamp:
            self._problem = ""
            try:
                self.info = read_info(self.folder)
                self._summary = read_summary(self.folder)
            except DamagedError as error:
                self._problem = str(error)
            self._stamp = stamp
        if self._problem:
            raise DamagedError(self._problem)

    def described(self, info: RunInfo, locked: set[int]) -> dict[str, Any]:
        """Return the run as the page shows it; ``locked`` are the inodes that trainers hold."""
        log = self.log
        status, reason = self._status(locked)
        running = status == "running"
        step = log.last_step if running else max(self._step(), log.last_step)
        total = _total_of(info, self._summary)
        speed = self._last(f"time/{info.unit}_per_second")
        return {
            "id": self.id,
            "name": plain(self.name),
            "algo": plain(info.algo),
            "env": plain(info.env_id),
            "seed": str(info.seed),
            "created": plain(info.created)[:_LONGEST_TEXT],
            "unit": info.unit,
            "status": status,
            "reason": one_line(plain(reason))[:_LONGEST_TEXT],
            "step": step,
            "total": total,
            "seconds": log.seconds,
            "speed": speed[0] if speed and running else _ratio(step, log.seconds),
            "evaluation": self._last(EVALUATION),
            "training": self._last(TRAINING),
            "revision": log.revision,
            "reading": not self.is_read,
            "videos": video_names(self.folder),
        }

    def _last(self, metric: str) -> tuple[float, int] | None:
        """Return the last value of a metric and its step."""
        found = self.log.last.get(metric)
        return found if found is not None and is_drawable(found[0]) else None

    def _step(self) -> int:
        return int(self._summary.get("global_step", 0))

    def _status(self, locked: set[int]) -> tuple[str, str]:
        """Return the status and the reason for it.

        A trainer holds a lock on its folder, which Linux lists. Elsewhere, and for runs of other
        machines, a run counts as running while it writes rows.
        """
        with contextlib.suppress(OSError):
            if self.folder.stat().st_ino in locked:
                self._was_locked = True
                return "running", ""
        if self._summary and self.log.last_step <= self._step():
            reason = str(self._summary.get("reason", ""))
            status = str(self._summary["status"])
            return plain(status), "" if reason.endswith(" reached") else reason
        age = time.time() - self.log.modified
        if not self._was_locked and age < RECENT_SECONDS:
            return "running", ""
        if self._was_locked:
            return "no end recorded", "its process ended without recording an end: killed?"
        minutes = f"{age / 60:,.0f} minutes" if age < 7200 else f"{age / 3600:,.0f} hours"
        return "no end recorded", f"killed, or without a row for {minutes}"


class WatchedRuns:
    """All runs below some folders. Nothing is read between calls; calls may come in parallel."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._runs: dict[str, WatchedRun] = {}
        self._searched = -_SECONDS_BETWEEN_SEARCHES
        self._lock = threading.Lock()

    def overview(self) -> dict[str, Any]:
        """Return what the page shows of all runs, read until now."""
        with self._lock:
            self._search()
            deadline = time.monotonic() + _SECONDS_PER_READING
            for run in self._runs.values():
                run.refresh(deadline)
            locked = locked_inodes()
            found = [(run, run.info) for run in self._runs.values() if not run.damage]
            readable = [(run, info) for run, info in found if info is not None]
            settings = _differing([info for _, info in readable])
            return {
                "runs": [
                    {**run.described(info, locked), "settings": own}
                    for (run, info), own in zip(readable, settings, strict=True)
                ],
                "metrics": sorted({name for run, _ in readable for name in run.log.curves}),
                "damaged": [
                    {"name": plain(run.name), "reason": one_line(plain(run.damage))[:1000]}
                    for run in self._runs.values()
                    if run.damage
                ],
            }

    def curves(self, run_id: str, metrics: Sequence[str]) -> dict[str, Any] | None:
        """Return the named curves of a run, as read so far; None for an unknown run."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                return None
            curves = run.log.curves
            return {
                "revision": run.log.revision,
                "curves": {name: curves[name].points() for name in metrics if name in curves},
            }

    def video(self, run_id: str, name: str) -> Path | None:
        """Return the path of a run's video; None for an unknown one."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None or name not in video_names(run.folder):
                return None
            return run.folder / "videos" / name

    def _search(self) -> None:
        """Look for new folders and forget those that are gone, every few seconds."""
        now = time.monotonic()
        if now - self._searched < _SECONDS_BETWEEN_SEARCHES:
            return
        found = dict(_named_folders(self._roots))
        known = {run.folder: run for run in self._runs.values()}
        runs = [known.get(path) or WatchedRun(path, name) for path, name in found.items()]
        self._runs = {run.id: run for run in runs}
        self._searched = time.monotonic()


def _named_folders(roots: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the run folders and their names: relative to a single root, or as given."""
    for root in roots:
        for folder in sorted(run_folders_below(root)):
            is_below = len(roots) == 1 and folder != root
            yield folder, str(folder.relative_to(root) if is_below else folder)


def _differing(infos: Sequence[RunInfo]) -> list[dict[str, str]]:
    """Return the settings in which the runs differ, of each run."""
    configs = [
        {key: value for key, value in info.config.items() if key not in NOT_LEARNING}
        for info in infos
    ]
    shown = [key for key in differing_keys(configs) if key not in ("algo", "env_id")]
    return [
        {plain(k): plain(setting(config[k]))[:_LONGEST_TEXT] for k in shown if k in config}
        for config in configs
    ]


def locked_inodes() -> set[int]:
    """Return the inodes of all files and folders with an exclusive lock; empty where not Linux."""
    found = set()
    with contextlib.suppress(OSError):
        for line in _LOCKS.read_text(encoding="ascii", errors="replace").splitlines():
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE":
                inode = words[5].rpartition(":")[2]
                if inode.isdecimal():
                    found.add(int(inode))
    return found


def _total_of(info: RunInfo, summary: Mapping[str, Any]) -> int:
    """Return where the run ends: a resume may have moved it."""
    setting = f"total_{'timesteps' if info.unit == 'steps' else 'updates'}"
    for entry in reversed(info.metadata.get("resumes") or []):
        moved = entry.get(setting) if isinstance(entry, dict) else None
        if type(moved) is int and 0 < moved <= MAX_STEP:
            return moved
    return total_of(summary) or total_of(info.config)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_ctime_ns  # which permissions change, too


def _ratio(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
