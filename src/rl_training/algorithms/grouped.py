"""Learners of several groups of agents, each with networks of its own, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rl_training.data.grouped_rollout import of_group
from rl_training.types import Progress, StopRequest, never


class GroupedLearner:
    """A `Learner` that hands each group's rollout to the group's own learner."""

    def __init__(self, groups: Mapping[str, Any]) -> None:
        self.groups = dict(groups)
        # Module names may hold no dots: groups are named by position.
        self._names = {name: f"group{i}" for i, name in enumerate(self.groups)}
        parts = {self._names[name]: learner.module for name, learner in self.groups.items()}
        self.module: nn.Module = nn.ModuleDict(parts)

    def learn(
        self, experience: Any, progress: Progress, stop: StopRequest = never, *, updates: int = 1
    ) -> int:
        """Let every group learn, and return the gradient steps of all."""
        return sum(
            learner.learn(of_group(experience, name), progress, stop, updates=updates)
            for name, learner in self.groups.items()
        )

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of every group, as ``losses/GROUP/NAME``."""
        return {
            f"losses/{name}/{key.removeprefix('losses/')}": value
            for name, learner in self.groups.items()
            for key, value in learner.pop_metrics().items()
        }

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from the weights of another run."""
        self.module.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of all groups together, and the rest by group."""
        states = {name: learner.state_dict() for name, learner in self.groups.items()}
        rest = {
            name: {key: value for key, value in state.items() if key != "model"}
            for name, state in states.items()
        }
        return {"model": self.module.state_dict(), "groups": rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        for name, learner in self.groups.items():
            prefix = f"{self._names[name]}."
            weights = {
                key.removeprefix(prefix): value
                for key, value in state["model"].items()
                if key.startswith(prefix)
            }
            learner.load_state_dict({**state["groups"][name], "model": weights})


class GroupedReplayLearner(GroupedLearner):
    """A `GroupedLearner` of learners from a replay, whose updates may be stopped between any two.

    Groups make their updates one after another. `_ahead` counts those that a group has made and
    another has not yet.
    """

    def __init__(self, groups: Mapping[str, Any]) -> None:
        super().__init__(groups)
        self._ahead = dict.fromkeys(self.groups, 0)

    @property
    def num_updates(self) -> int:
        """Updates of all groups so far."""
        return sum(int(learner.num_updates) for learner in self.groups.values())

    def learn(
        self, experience: Any, progress: Progress, stop: StopRequest = never, *, updates: int = 1
    ) -> int:
        """Let every group make ``updates`` updates; return how many all of them have made."""
        for name, learner in self.groups.items():
            missing = updates - self._ahead[name]
            if not missing:
                continue
            own = of_group(experience, name)
            self._ahead[name] += learner.learn(own, progress, stop, updates=missing)
            if self._ahead[name] < updates:
                break
        done = min(self._ahead.values())
        self._ahead = {name: count - done for name, count in self._ahead.items()}
        return done

    def metric_sums(self) -> dict[str, Any]:
        """Return the sums since the last `pop_metrics` of every group."""
        return {"groups": {name: one.metric_sums() for name, one in self.groups.items()}}

    def load_metric_sums(self, state: Mapping[str, Any]) -> None:
        """Restore those sums."""
        for name, learner in self.groups.items():
            learner.load_metric_sums(state["groups"][name])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all groups, and the updates by which some are ahead."""
        return {**super().state_dict(), "ahead": dict(self._ahead)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._ahead = {name: int(state["ahead"][name]) for name in self.groups}
