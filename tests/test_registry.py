"""One table makes the surface: classes, functions, exports and refusals."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rl_training
import rl_training.api
import rl_training.runtime
import rl_training.trainer
from rl_training.algorithms.off_policy import ReplayConfig
from rl_training.algorithms.ppo import OnPolicyConfig
from rl_training.api import ManagedAlgorithm, RecurrentAlgorithm, managed_class
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.registry import ALGORITHMS, check_settings, check_spaces, config_type, get_spec
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, HybridActionSpec, ObsSpec

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rl_training"


def generator() -> ModuleType:
    """The script that writes the surface."""
    path = ROOT / "scripts" / "generate_surface.py"
    spec = importlib.util.spec_from_file_location("generate_surface", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_typed_surface_is_that_of_the_table() -> None:
    script: Any = generator()
    assert script.TARGET.read_text(encoding="utf-8") == script.surface()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_entry_makes_the_class_the_function_and_their_exports(algo: str) -> None:
    entry = ALGORITHMS[algo]
    name = entry.class_name_of(algo)
    managed = getattr(rl_training, name)
    assert managed is getattr(rl_training.api, name)
    assert managed.algo == algo
    assert issubclass(managed, RecurrentAlgorithm if entry.is_recurrent else ManagedAlgorithm)
    train = getattr(rl_training.trainer, f"train_{algo}")
    assert train is getattr(rl_training, f"train_{algo}")
    assert train is getattr(rl_training.runtime, f"train_{algo}")
    assert train.__name__ == f"train_{algo}"
    with pytest.raises(ConfigError, match="other"):
        train(_other(algo))
    spec = get_spec(algo)
    assert (spec.name, spec.config) == (algo, config_type(algo))
    assert entry.title
    made = managed_class(algo)
    assert (made.__name__, made.algo, made.__mro__[1]) == (name, algo, managed.__mro__[1])


def _other(algo: str) -> TrainConfig[Any]:
    config: TrainConfig[Any] = TrainConfig(algo="ppo" if algo != "ppo" else "dqn")
    object.__setattr__(config, "algo", "other")
    return config


def test_an_algorithm_is_named_in_its_own_files_the_table_and_the_generated_surface() -> None:
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "importing" not in path.parts  # it knows the algorithms of other libraries
        and re.search(r"\ba2c\b|\bA2C\b|_a2c\b|a2c_|A2CConfig", path.read_text(encoding="utf-8"))
    }
    own = {"algorithms/a2c.py", "runtime/a2c_trainer.py"}
    # errors.py suggests it for the names of related algorithms; IMPALA has its loss.
    assert naming == own | {"registry.py", "surface.py", "errors.py", "algorithms/impala.py"}


# -- refusals --------------------------------------------------------------------------------------

_VECTOR = ArraySpec((3,), "float32")
_IMAGE = ArraySpec((1, 36, 36), "uint8")
OBSERVATIONS = {
    "vector": ObsSpec({"": _VECTOR}),
    "image": ObsSpec({"": _IMAGE}),
    "Dict": ObsSpec({"a": _VECTOR, "b": _VECTOR}),
}
ACTIONS = {
    "Discrete": ActionSpec("discrete", (), "int64", (2,), (0,)),
    "bounded Box": ActionSpec("box", (1,), "float32", low=(-1.0,), high=(1.0,)),
    "unbounded Box": ActionSpec("box", (1,), "float32", low=(-float("inf"),), high=(1.0,)),
    "MultiDiscrete": ActionSpec("multi_discrete", (2,), "int64", (2, 3), (0, 0)),
    "MultiBinary": ActionSpec("multi_binary", (2,), "int8"),
    "hybrid": HybridActionSpec.of([(("a",), ActionSpec("multi_binary", (2,), "int8"))]),
}


def named_as_able(error: ConfigError) -> list[str]:
    """The algorithms that a refusal names."""
    listed = re.search(r"; use ([\w, ]+)$", str(error))
    return listed.group(1).replace(" or ", ", ").split(", ") if listed else []


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_actions_are_taken_or_refused_as_the_entry_says(algo: str, kind: str) -> None:
    action = ACTIONS[kind]
    assert action.described == kind
    if kind in ALGORITHMS[algo].actions:
        check_spaces(algo, OBSERVATIONS["vector"], action)
        return
    with pytest.raises(ConfigError, match=kind) as refused:
        check_spaces(algo, OBSERVATIONS["vector"], action)
    able = named_as_able(refused.value)
    entry = ALGORITHMS[algo]  # no algorithm for datasets or teams takes every kind of action
    assert able or entry.offline or entry.multi_agent
    for other in able:
        assert ALGORITHMS[other].offline == ALGORITHMS[algo].offline
        assert ALGORITHMS[other].multi_agent == ALGORITHMS[algo].multi_agent
        check_spaces(other, OBSERVATIONS["vector"], action)


@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_observations_are_taken_or_refused_as_the_entry_says(algo: str, kind: str) -> None:
    entry = ALGORITHMS[algo]
    action = ACTIONS[entry.actions[0]]
    if kind in entry.observations:
        check_spaces(algo, OBSERVATIONS[kind], action)
        return
    with pytest.raises(ConfigError, match=kind) as refused:
        check_spaces(algo, OBSERVATIONS[kind], action)
    for other in named_as_able(refused.value):
        check_spaces(other, OBSERVATIONS[kind], action)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_masks_are_taken_or_refused_as_the_entry_says(algo: str) -> None:
    entry = ALGORITHMS[algo]
    if "Discrete" not in entry.actions:
        return  # a mask marks discrete choices
    masked = ObsSpec({"a": _VECTOR, ACTION_MASK: ArraySpec((2,), "bool")})
    if entry.masks:
        check_spaces(algo, masked, ACTIONS["Discrete"])
    else:
        with pytest.raises(ConfigError):
            check_spaces(algo, masked, ACTIONS["Discrete"])


@pytest.mark.parametrize("mode", ["eager", "compile", "cudagraph"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_accelerations_are_taken_or_refused_as_the_entry_says(algo: str, mode: str) -> None:
    if mode in ALGORITHMS[algo].accelerations:
        check_settings(algo, acceleration=mode, overlap=False)
        return
    with pytest.raises(ConfigError, match="acceleration") as refused:
        TrainConfig(algo=algo, acceleration=mode)  # type: ignore[arg-type]
    assert "ppo" in named_as_able(refused.value)


def test_actions_that_nothing_of_its_kind_takes_name_nobody() -> None:
    with pytest.raises(ConfigError) as refused:
        check_spaces("bc", OBSERVATIONS["image"], ACTIONS["MultiBinary"])
    assert named_as_able(refused.value) == []


def test_the_family_shares_its_settings() -> None:
    families = [algo for algo in ALGORITHMS if issubclass(config_type(algo), OnPolicyConfig)]
    assert set(families) == {"ppo", "a2c", "recurrent_ppo", "ppg", "impala", "appo"} | {
        "ippo",
        "mappo",
    }
    for algo in ALGORITHMS:  # a learning-rate schedule and an optimizer are settings of every one
        names = {"lr_schedule", "lr_warmup_fraction", "optimizer", "weight_decay"}
        assert names <= set(config_type(algo).__dataclass_fields__)


def test_learners_from_a_replay_have_relu_whatever_else_they_inherit() -> None:
    for algo in ALGORITHMS:
        if issubclass(config_type(algo), ReplayConfig):
            assert config_type(algo)().activation == "relu", algo
