"""The names that the packages export are there, and are what they should be."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import rl_training
import rl_training.algorithms
import rl_training.api
import rl_training.envs
import rl_training.runtime
import rl_training.trainer
from rl_training._internal.lazy import lazy_exports, resolve

PACKAGES = [
    "rl_training",
    *(
        info.name
        for info in pkgutil.walk_packages(rl_training.__path__, "rl_training.")
        if info.ispkg and ".assets" not in info.name
    ),
    "rl_training.trainer",
]
WITHOUT_A_LIST = {
    "rl_training._internal",
    "rl_training.algorithms",  # takes its names from the modules of the algorithms
    "rl_training.tools.doctor",
    "rl_training.tools.dataset",
    "rl_training.tools.tune",
    "rl_training.tools.importing",
    "rl_training.tools.watch",
    "rl_training.tools.zoo",
}


@pytest.fixture(params=[name for name in PACKAGES if name not in WITHOUT_A_LIST])
def package(request: pytest.FixtureRequest) -> ModuleType:
    """Each package with exports."""
    return importlib.import_module(request.param)


def test_all_packages_are_known() -> None:
    layers = {"algorithms", "api", "data", "envs", "experiment", "models", "runtime", "trainer"}
    assert {f"rl_training.{name}" for name in layers} | {"rl_training"} <= set(PACKAGES)
    assert set(PACKAGES) >= WITHOUT_A_LIST


def test_every_exported_name_resolves(package: ModuleType) -> None:
    assert package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_exports_stand_once_and_are_listed(package: ModuleType) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package.__all__) <= set(dir(package))


def test_a_star_import_works(package: ModuleType) -> None:
    scope: dict[str, object] = {}
    exec(f"from {package.__name__} import *", scope)
    assert set(package.__all__) <= set(scope)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_attribute_is_an_attribute_error(name: str) -> None:
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        _ = package.NoSuchThing
    assert not hasattr(package, "NoSuchThing")
    with pytest.raises(ImportError):
        exec(f"from {package.__name__} import NoSuchThing")


def test_the_front_door_holds_what_the_readme_uses() -> None:
    assert {"PPO", "TrainConfig", "make_vector_env", "train_ppo", "__version__"} <= set(
        rl_training.__all__
    )
    assert inspect.isclass(rl_training.PPO)
    assert inspect.isclass(rl_training.TrainConfig)
    assert callable(rl_training.make_vector_env)
    assert callable(rl_training.train_ppo)
    assert isinstance(rl_training.__version__, str)


def test_one_thing_has_one_identity() -> None:
    assert rl_training.PPO is rl_training.api.PPO
    assert rl_training.train_ppo is rl_training.trainer.train_ppo
    assert rl_training.train_ppo is rl_training.runtime.train_ppo
    assert rl_training.TrainResult is rl_training.trainer.TrainResult
    assert rl_training.make_vector_env is rl_training.envs.make_vector_env


def test_the_managed_class_and_the_algorithm_are_two_things() -> None:
    managed: object = rl_training.api.PPO
    algorithm: object = rl_training.algorithms.PPO
    assert managed is not algorithm
    assert all(
        callable(getattr(managed, name))
        for name in ("learn", "predict", "evaluate", "save", "load")
    )
    assert all(
        callable(getattr(algorithm, name)) for name in ("learn", "state_dict", "load_state_dict")
    )


def test_lazy_names_are_resolved_when_asked_for() -> None:
    get, names = lazy_exports("here", {"Path": "pathlib:Path", "gone": "no_such_module:x"})
    assert names() == ["Path", "gone"]
    assert get("Path") is importlib.import_module("pathlib").Path
    with pytest.raises(ModuleNotFoundError):
        get("gone")
    with pytest.raises(AttributeError, match="module 'here' has no attribute 'other'"):
        get("other")


@pytest.mark.parametrize("path", ["pathlib", "pathlib:", ":Path", ""])
def test_a_path_without_both_parts_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not of the form 'module:Name'"):
        resolve(path)
