"""Groups of runs that differ only in their seed, labelled by the settings that differ."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_training.tools.report.data import StoredRun
from rl_training.tools.report.stats import Unit

NOT_LEARNING = frozenset(
    {
        "seed",
        "output_dir",
        "progress",
        "tensorboard",
        "wandb",
        "wandb_project",
        "mlflow",
        "mlflow_experiment",
        "trackers",
        "record_interval",
    }
)
"""Settings that do not change the result: runs that differ only in these are one group."""
_TASK = ("env_kwargs", "wrappers", "preprocessing", "atari")
"""Settings that change the task of an environment."""
_LABEL_KEYS = 3
_LABEL_LENGTH = 40
_LONGEST_LABEL = 200


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one config on several seeds."""

    label: str
    env_id: str
    settings: Mapping[str, Any]
    runs: tuple[StoredRun, ...]
    """All runs, by seed."""
    counted: tuple[StoredRun, ...]
    """The aggregated runs: finished, one per seed."""

    @property
    def unit(self) -> Unit:
        """What its runs count."""
        return self.runs[0].unit

    @property
    def not_aggregated(self) -> tuple[StoredRun, ...]:
        """Runs that are shown but not aggregated."""
        return tuple(run for run in self.runs if run not in self.counted)


def make_groups(runs: Iterable[StoredRun]) -> list[Group]:
    """Group runs, sorted by environment and label."""
    runs = list(runs)
    of_versions = _settings_of_some_versions(runs)
    found: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        ignored = of_versions[run.algo]
        settings = {key: value for key, value in _settings(run).items() if key not in ignored}
        found[json.dumps([run.env_id, settings], sort_keys=True, default=str)].append(run)
    alike: dict[tuple[str, str], list[list[StoredRun]]] = defaultdict(list)
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


def _settings_of_some_versions(runs: Sequence[StoredRun]) -> dict[str, set[str]]:
    """Return settings that only some runs of an algorithm have, all with the same value.

    They were added or removed by a version of this package and do not separate groups.
    """
    by_algo: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_algo[run.algo].append(_settings(run))
    return {
        algo: {
            key
            for key in {key for each in settings for key in each}
            if _is_package_setting(key)
            and len(having := [each[key] for each in settings if key in each]) < len(settings)
            and all(value == having[0] for value in having)
        }
        for algo, settings in by_algo.items()
    }


def _is_package_setting(key: str) -> bool:
    """Return whether a setting is the package's own, not a user's key (``env_kwargs.x``)."""
    owner, dot, _ = key.rpartition(".")
    return owner == "algo_kwargs" or (not dot and key not in _TASK)


def common_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the settings that are the same in every group."""
    first, *others = (group.settings for group in groups)
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ, or that are missing in some, in order of appearance."""
    keys = dict.fromkeys(key for mapping in settings for key in mapping)
    absent = object()
    return [
        key
        for key in keys
        if any(mapping.get(key, absent) != settings[0].get(key, absent) for mapping in settings)
    ]


def _settings(run: StoredRun) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in NOT_LEARNING}


def _group(members: list[StoredRun], label: str) -> Group:
    runs = tuple(sorted(members, key=lambda run: (run.seed, run.created, str(run.path))))
    # A seed that was trained twice is not two samples: only its newest run is aggregated.
    newest = {run.seed: run for run in runs if run.finished}
    return Group(label, runs[0].env_id, _settings(runs[0]), runs, tuple(newest.values()))


def _labels(siblings: Sequence[list[StoredRun]], on_env: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return labels: the algorithm, the settings that change the task, then other differences."""
    settings = [_settings(members[0]) for members in siblings]
    own = differing_keys(settings)
    task = [key for key in differing_keys(on_env) if key.partition(".")[0] in _TASK]
    of_all = [key for key in task if key not in own]
    ordered = [*(key for key in task if key in own), *(key for key in own if key not in task)]
    labels = []
    for each in settings:
        named = [key for key in of_all if _changes_task(key, each)] + ordered[:_LABEL_KEYS]
        words = [f"{key.rpartition('.')[2]} {_brief(each.get(key))}" for key in named]
        labels.append(_cut(", ".join([siblings[0][0].algo, *words]), _LONGEST_LABEL))
    if len(set(labels)) == len(labels):
        return labels
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def _changes_task(key: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting has a value that changes the environment."""
    if key.startswith("atari.") and settings.get("preprocessing") != "atari":
        return False
    return settings.get(key) not in (None, [], {}, "none")


def _brief(value: Any) -> str:
    """Return a setting for a label: wrappers by class name, everything cut to a few words."""
    text = str(value)
    if isinstance(value, list) and all(isinstance(each, dict) and "path" in each for each in value):
        text = " + ".join(str(each["path"]).rpartition(":")[2] for each in value) or "none"
    return _cut(text, _LABEL_LENGTH)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"
