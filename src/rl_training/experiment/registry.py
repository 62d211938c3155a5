"""The literal table of algorithms. Adding one is one line here; nothing is imported to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from rl_training._lazy import resolve

if TYPE_CHECKING:
    from rl_training.runtime.spec import AlgorithmSpec


class Entry(NamedTuple):
    """Where an algorithm's config dataclass and its `AlgorithmSpec` live."""

    config: str
    spec: str


ALGORITHMS: dict[str, Entry] = {
    "ppo": Entry("rl_training.algorithms.ppo:PPOConfig", "rl_training.runtime.ppo_trainer:SPEC"),
    "dqn": Entry("rl_training.algorithms.dqn:DQNConfig", "rl_training.runtime.dqn_trainer:SPEC"),
}


def get_spec(name: str) -> AlgorithmSpec:
    """The spec of a registered algorithm."""
    return cast("AlgorithmSpec", resolve(ALGORITHMS[name].spec))
