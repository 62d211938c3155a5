"""The literal table of algorithms. Adding one is one line here; nothing is imported to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from rl_training._internal.lazy import resolve
from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from rl_training.runtime.spec import AlgorithmSpec


class Entry(NamedTuple):
    """Where an algorithm's config dataclass and its `AlgorithmSpec` live, and what it takes."""

    config: str
    spec: str
    actions: tuple[str, ...]
    """Kinds of action space, as `ActionSpec.described` names them."""


_DISCRETE, _BOUNDED_BOX = "Discrete", "bounded Box"

ALGORITHMS: dict[str, Entry] = {
    "ppo": Entry(
        "rl_training.algorithms.ppo:PPOConfig",
        "rl_training.runtime.ppo_trainer:SPEC",
        (_DISCRETE, _BOUNDED_BOX, "unbounded Box", "MultiDiscrete", "MultiBinary"),
    ),
    "recurrent_ppo": Entry(
        "rl_training.contrib.recurrent_ppo:RecurrentPPOConfig",
        "rl_training.runtime.recurrent_ppo_trainer:SPEC",
        (_DISCRETE, _BOUNDED_BOX, "unbounded Box", "MultiDiscrete", "MultiBinary"),
    ),
    "ppg": Entry(
        "rl_training.algorithms.ppg:PPGConfig",
        "rl_training.runtime.ppg_trainer:SPEC",
        (_DISCRETE,),
    ),
    "dqn": Entry(
        "rl_training.algorithms.dqn:DQNConfig",
        "rl_training.runtime.dqn_trainer:SPEC",
        (_DISCRETE,),
    ),
    "drqn": Entry(
        "rl_training.algorithms.drqn:DRQNConfig",
        "rl_training.runtime.drqn_trainer:SPEC",
        (_DISCRETE,),
    ),
    "sac": Entry(
        "rl_training.algorithms.sac:SACConfig",
        "rl_training.runtime.sac_trainer:SPEC",
        (_BOUNDED_BOX,),
    ),
    "td3": Entry(
        "rl_training.algorithms.td3:TD3Config",
        "rl_training.runtime.td3_trainer:SPEC",
        (_BOUNDED_BOX,),
    ),
}


def check_actions(name: str, kind: str) -> None:
    """Refuse a kind of action space that an algorithm does not take."""
    if kind not in ALGORITHMS[name].actions:
        others = [other for other, entry in ALGORITHMS.items() if kind in entry.actions]
        raise ConfigError(
            f"{name} takes {' and '.join(ALGORITHMS[name].actions)} actions, not {kind} ones;"
            f" {', '.join(others)} can"
        )


def get_spec(name: str) -> AlgorithmSpec:
    """The spec of a registered algorithm."""
    return cast("AlgorithmSpec", resolve(ALGORITHMS[name].spec))
