"""Trackers: where metrics go besides ``metrics.jsonl``.

An installed package adds trackers through the entry point group ``rl_training.trackers``: the name
of an entry point is what users write in ``trackers: [name]``, its value a function of a
`TrackedRun` that returns a `Tracker`, for example in its pyproject.toml

    [project.entry-points."rl_training.trackers"]
    my_tracker = "my_package:MyTracker"
"""

from rl_training.tracking.protocol import Status, TrackedRun, Tracker

__all__ = ["Status", "TrackedRun", "Tracker"]
