"""A source of experience that plays recorded steps back: no environment, no actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rl_training.runtime.experience import Buffer, Collected, ExperienceSource, Timed
from rl_training.types import Array, EnvInfo, Obs, Progress, StopRequest, VectorStep, never


class Recorded(NamedTuple):
    """The arguments of one `Buffer.add`."""

    obs: Obs
    action: Array
    record: Mapping[str, Any]
    step: VectorStep


class RecordingBuffer:
    """Passes steps on to a buffer and keeps them."""

    def __init__(self, buffer: Buffer, kept: list[Recorded]) -> None:
        self._buffer = buffer
        self._kept = kept

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        self._kept.append(Recorded(obs, action, dict(record), step))
        self._buffer.add(obs, action, record, step)


def record(source: ExperienceSource) -> list[Recorded]:
    """Keep all that a source collects from now on."""
    kept: list[Recorded] = []
    collect = source.collect

    def recording(buffer: Buffer, *args: Any) -> Collected:
        return collect(RecordingBuffer(buffer, kept), *args)

    source.collect = recording  # type: ignore[assignment,method-assign]
    return kept


class ReplayedSource:
    """Adds recorded steps to a buffer, in their order."""

    episode_lengths = None
    exactly_resumable = True

    def __init__(self, info: EnvInfo, steps: list[Recorded]) -> None:
        self.info = info
        self.published: list[int] = []
        self._steps = steps
        self._position = 0

    def end_rollout(self) -> None:
        """Recorded rewards are as they are."""

    @property
    def obs(self) -> Obs | None:
        return self._steps[self._position - 1].step.obs if self._position else None

    def collect(
        self, buffer: Buffer, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        taken = 0
        episodes: list[Any] = []
        for recorded in self._steps[self._position : self._position + num_steps]:
            if stop():
                break
            buffer.add(*recorded)
            episodes += recorded.step.episodes
            taken += 1
        valid = [one.step.valid for one in self._steps[self._position : self._position + taken]]
        self._position += taken
        return Collected(taken, int(sum(rows.sum() for rows in valid)), tuple(episodes))

    def publish(self, module: torch.nn.Module, version: int) -> None:
        self.published.append(version)

    def metrics(self) -> dict[str, float]:
        return {}

    def measure(self, timed: Timed) -> None:
        del timed

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        self._position = int(state["position"])
        return True

    def end_of(self, state: Mapping[str, Any]) -> None:
        return None

    def close(self) -> None:
        pass
