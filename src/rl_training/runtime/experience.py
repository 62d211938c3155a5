"""The interfaces between getting experience, learning from it, and the loop that runs both.

A `Trainer` holds an `ExperienceSource`, a `Learner` and a buffer. The source fills the buffer, the
learner learns from it. Neither knows the other, and the trainer knows no environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from rl_training.types import (
    Array,
    EnvInfo,
    Episode,
    Obs,
    Progress,
    StopRequest,
    VectorStep,
    never,
)

Timed: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes the name of a part of the loop and its function; returns what is to be called instead."""


class Buffer(Protocol):
    """Storage that a source fills."""

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Store one step of every environment; ``record`` is what the actor recorded with it."""
        ...


class Collected(NamedTuple):
    """What one call of `ExperienceSource.collect` did."""

    vector_steps: int
    """Steps of all environments: fewer than requested where a stop was requested."""
    steps: int
    """Transitions (reset-only rows are not counted)."""
    episodes: tuple[Episode, ...]
    """Episodes that ended."""
    policy_version: int = 0
    """Version of the policy that acted, as it was published; the oldest one, if several did."""
    of_shards: tuple[int, ...] = ()
    """Steps of each local shard's environments, where they differ."""


class ExperienceSource(Protocol):
    """Where experience comes from."""

    info: EnvInfo

    @property
    def obs(self) -> Obs | None:
        """The observations that the next actions are chosen for; None before the first step."""
        ...

    @property
    def episode_lengths(self) -> Array | None:
        """Steps so far of each environment's current episode; None where they are unknown."""
        ...

    @property
    def exactly_resumable(self) -> bool:
        """Whether `load_state_dict` can restore the state bit for bit."""
        ...

    def collect(
        self, buffer: Buffer, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add ``num_steps`` steps of every environment to the buffer, or fewer on ``stop``.

        A source whose steps come in blocks may add more to a replay.
        """
        ...

    def end_rollout(self) -> None:
        """Merge the statistics of the rewards of a rollout that was learnt from.

        Called where rewards are normalised.
        """
        ...

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Act with these weights from now on.

        ``version`` grows with every learning phase. A source that shares the module's memory only
        records it.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the recent episodes, by the names they are logged under."""
        ...

    def measure(self, timed: Timed) -> None:
        """Call ``timed("environment" | "inference" | "storing", function)`` for every part."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs to continue from here."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; False where the environments could not be restored exactly."""
        ...

    def end_of(self, state: Mapping[str, Any]) -> tuple[Obs, Mapping[str, Any]] | None:
        """Return the last observations and the actor's state in a saved state; None: it has none.

        A rollout that was being collected ends there, where the state cannot be restored exactly.
        """
        ...

    def close(self) -> None:
        """Release what was taken."""
        ...


OnStep: TypeAlias = Callable[[Obs, Array, VectorStep, Callable[[], list[dict[str, Any]]]], None]
"""Takes the observations, the actions that the environments received, the step that followed, and
a function that returns the info of each environment."""


@runtime_checkable
class WatchedSource(Protocol):
    """A source whose steps and infos can be watched: what ``on_step`` and ``log_info`` need."""

    def watch_steps(self, on_step: OnStep | None) -> None:
        """Call ``on_step`` for every step that is collected; None: no longer."""
        ...

    def watch_info(self, keys: Sequence[str]) -> None:
        """Average the values of ``keys`` in the info of each episode's last step.

        They are among the `metrics` from then on, as ``rollout/KEY_mean``.
        """
        ...


class Learner(Protocol):
    """What learns: every algorithm, of either family."""

    module: torch.nn.Module
    """All networks of the policy; their weights are what is saved and loaded."""

    def learn(
        self, experience: Any, progress: Progress, stop: StopRequest = never, *, updates: int = 1
    ) -> int:
        """Learn from a buffer and return the number of gradient steps taken.

        A replay learner takes ``updates`` gradient steps, or fewer where ``stop`` requests it. An
        on-policy learner takes as many as its settings require; where ``stop`` requests it, it
        raises `Paused` and its state from before the call must be restored.
        """
        ...

    def pop_metrics(self) -> dict[str, float]:
        """Return means over the updates since the last call, in one transfer from the device."""
        ...

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Start from the weights of another run."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs; no file is written."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        ...


class ReplayLearner(Learner, Protocol):
    """A learner whose metrics may cover several calls of ``learn``."""

    num_updates: int
    """Gradient steps so far."""

    def metric_sums(self) -> dict[str, Any]:
        """Return the sums since the last `pop_metrics`, for a checkpoint between two reports."""
        ...

    def load_metric_sums(self, state: Mapping[str, Any]) -> None:
        """Restore those sums."""
        ...
