"""Runs that differ only in their seed are one group; what tells groups apart is their label."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_training.tools.report.data import Run

_NOT_LEARNING = frozenset(
    {"seed", "output_dir", "progress", "tensorboard", "wandb", "wandb_project"}
)
"""Settings that leave what is learnt as it is: runs that differ in these alone are one group."""
_TASK = ("env_kwargs", "wrappers", "preprocessing", "atari")
"""Settings that make another task of the same environment."""
_LABEL_KEYS = 3
_LABEL_LENGTH = 40
_LONGEST_LABEL = 200


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one config on several seeds."""

    label: str
    env_id: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    """All of them, by seed."""
    counted: tuple[Run, ...]
    """Those that are aggregated: finished, one for each seed."""

    @property
    def set_aside(self) -> tuple[Run, ...]:
        """Runs that are shown but not aggregated."""
        return tuple(run for run in self.runs if run not in self.counted)


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """Group runs, sorted by environment and label."""
    runs = list(runs)
    of_versions = _settings_of_some_versions(runs)
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        ignored = of_versions[run.algo]
        settings = {key: value for key, value in _settings(run).items() if key not in ignored}
        found[json.dumps([run.env_id, settings], sort_keys=True, default=str)].append(run)
    alike: dict[tuple[str, str], list[list[Run]]] = defaultdict(list)
    on_env: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, members in sorted(found.items()):
        alike[members[0].env_id, members[0].algo].append(members)
        on_env[members[0].env_id].append(_settings(members[0]))
    groups = [
        _group(members, label)
        for (env_id, _), siblings in alike.items()
        for members, label in zip(siblings, _labels(siblings, on_env[env_id]), strict=True)
    ]
    return sorted(groups, key=lambda group: (group.env_id, group.label))


def _settings_of_some_versions(runs: Sequence[Run]) -> dict[str, set[str]]:
    """Return settings that only some runs of an algorithm have, all of them with one value.

    They came or went with a version of this package, and tell no runs apart.
    """
    by_algo: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_algo[run.algo].append(_settings(run))
    return {
        algo: {
            key
            for key in {key for each in settings for key in each}
            if _is_of_the_package(key)
            and len(having := [each[key] for each in settings if key in each]) < len(settings)
            and all(value == having[0] for value in having)
        }
        for algo, settings in by_algo.items()
    }


def _is_of_the_package(key: str) -> bool:
    """Whether a setting's name is the package's own, not a key of the user's (``env_kwargs.x``)."""
    owner, dot, _ = key.rpartition(".")
    return owner == "algo_kwargs" or (not dot and key not in _TASK)


def common_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """What is the same in every group."""
    first, *others = (group.settings for group in groups)
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that are not the same, or not there, in all of ``settings``; in the order they stand."""
    keys = dict.fromkeys(key for mapping in settings for key in mapping)
    absent = object()
    return [
        key
        for key in keys
        if any(mapping.get(key, absent) != settings[0].get(key, absent) for mapping in settings)
    ]


def _settings(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in _NOT_LEARNING}


def _group(members: list[Run], label: str) -> Group:
    runs = tuple(sorted(members, key=lambda run: (run.seed, run.created, str(run.path))))
    # A seed trained twice is not two samples: its newest run stands for it.
    newest = {run.seed: run for run in runs if run.finished}
    return Group(label, runs[0].env_id, _settings(runs[0]), runs, tuple(newest.values()))


def _labels(siblings: Sequence[list[Run]], on_env: Sequence[Mapping[str, Any]]) -> list[str]:
    """The algorithm's name; then what makes the task another; then what differs otherwise."""
    settings = [_settings(members[0]) for members in siblings]
    own = differing_keys(settings)
    task = [key for key in differing_keys(on_env) if key.partition(".")[0] in _TASK]
    of_all = [key for key in task if key not in own]
    ordered = [*(key for key in task if key in own), *(key for key in own if key not in task)]
    labels = []
    for each in settings:
        told = [key for key in of_all if _changes_task(key, each)] + ordered[:_LABEL_KEYS]
        words = [f"{key.rpartition('.')[2]} {_brief(each.get(key))}" for key in told]
        labels.append(_cut(", ".join([siblings[0][0].algo, *words]), _LONGEST_LABEL))
    if len(set(labels)) == len(labels):
        return labels
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def _changes_task(key: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting does something to the environment as it is."""
    if key.startswith("atari.") and settings.get("preprocessing") != "atari":
        return False
    return settings.get(key) not in (None, [], {}, "none")


def _brief(value: Any) -> str:
    """A setting in a label: wrappers by their classes, and nothing longer than a few words."""
    text = str(value)
    if isinstance(value, list) and all(isinstance(each, dict) and "path" in each for each in value):
        text = " + ".join(str(each["path"]).rpartition(":")[2] for each in value) or "none"
    return _cut(text, _LABEL_LENGTH)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"
