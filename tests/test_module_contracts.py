"""Which module may import which, and that what users call explains itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rl_training

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "rl_training"
LEARNING = (
    *("algorithms", "models", "data", "communicator", "types", "seeding", "errors"),
    "_internal/tree",
)


class Import(NamedTuple):
    """One name that a module imports."""

    file: Path
    line: int
    name: str
    at_top: bool
    """Outside any function, and not for types alone."""
    for_types: bool = False
    """Under TYPE_CHECKING."""

    def __str__(self) -> str:
        return f"{self.file.relative_to(SRC)}:{self.line} imports {self.name}"

    def within(self, *packages: str) -> bool:
        """Whether what is imported is one of these or lies inside one."""
        return any(f"{self.name}.".startswith(f"{package}.") for package in packages)


def imports_of(path: Path) -> Iterator[Import]:
    """Everything a file imports, wherever in it."""
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), path, at_top=True)


def _walk(node: ast.AST, path: Path, at_top: bool, for_types: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(path, node.lineno, alias.name, at_top, for_types)
    elif isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if node.level:
            parts = path.relative_to(SRC).with_suffix("").parts[: -node.level]
            origin = ".".join([*parts, *([origin] if origin else [])])
        for alias in node.names:
            yield Import(path, node.lineno, f"{origin}.{alias.name}", at_top, for_types)
    lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    types_alone = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        at_top_too = at_top and not lazy and not types_alone
        yield from _walk(child, path, at_top_too, for_types or types_alone)


def files_of(*layers: str) -> list[Path]:
    """The files of some packages or modules."""
    found: list[Path] = []
    for layer in layers:
        folder, file = PACKAGE / layer, PACKAGE / f"{layer}.py"
        assert folder.is_dir() or file.is_file(), f"there is no {layer} any more"
        found += sorted(folder.rglob("*.py")) if folder.is_dir() else [file]
    return found


def ours(*names: str) -> tuple[str, ...]:
    """Full names of layers."""
    return tuple(f"rl_training.{name}" for name in names)


def offences(layers: tuple[str, ...], *forbidden: str) -> list[str]:
    """Imports of ``layers`` that are forbidden to them, even for types."""
    return [
        str(found)
        for path in files_of(*layers)
        for found in imports_of(path)
        if found.within(*forbidden)
    ]


def loaded_by(module: str) -> set[str]:
    """The modules in memory once a fresh interpreter has imported one."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


# -- the scanner itself ----------------------------------------------------------------------------


def test_the_scan_sees_every_kind_of_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    path = tmp_path / "pkg" / "sub" / "mod.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import a.b, c\n"
        "from d import e\n"
        "from . import f\n"
        "from ..g import h\n"
        "if TYPE_CHECKING:\n    from i import j\n"
        "def k():\n    import m\n"
        "class N:\n    import o\n"
    )
    found = [(i.name, i.at_top) for i in imports_of(path)]
    assert found == [
        ("a.b", True),
        ("c", True),
        ("d.e", True),
        ("pkg.sub.f", True),
        ("pkg.g.h", True),
        ("i.j", False),
        ("m", False),
        ("o", True),
    ]
    torch_too = Import(path, 1, "torch.nn", at_top=True)
    assert torch_too.within("torch")
    assert not torch_too.within("torchvision", "torch.n")


# -- what is loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ours("algorithms.ppo", "models", "data", "types"))
def test_the_learning_layers_load_no_environments_and_no_tools(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not loaded & {"gymnasium", "tyro", "yaml", "tensorboard", "rich", "wandb"}
    assert not loaded & set(ours("envs", "runtime", "experiment", "api", "cli", "config"))


def test_types_load_no_torch() -> None:
    assert "torch" not in loaded_by("rl_training.types")


def test_environments_load_no_torch() -> None:
    # A worker process imports this much; torch would cost it a second and a few hundred MB.
    loaded = loaded_by("rl_training.envs")
    assert "rl_training.envs.factory" in loaded
    assert "rl_training.envs.workers" in loaded
    assert "torch" not in loaded


# -- what is written -------------------------------------------------------------------------------


def test_the_learning_layers_know_nothing_of_what_uses_them() -> None:
    above = ours(
        "envs", "runtime", "experiment", "api", "cli", "_internal.flags", "config", "runs", "eval"
    )
    assert not offences(LEARNING, *above, "gymnasium", "tyro", "yaml", "tensorboard")


def test_environments_know_nothing_of_learning() -> None:
    learning = ours("runtime", "algorithms", "models", "data", "experiment", "api", "cli")
    assert not offences(("envs",), "torch", *learning)


LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("version", "errors", "types", "seeding", "terminal", "launched", "plugins"),
        *("untrusted_files", "trust", "search_space"),
    ),
    ("stored_zip", "plain_pickle", "archive", "safetensors_file", "_internal"),
    ("registry",),
    ("config", "_internal.flags"),
    ("envs",),
    ("device_envs",),
    ("communicator",),
    ("algorithms.returns", "algorithms.masking", "algorithms.moments"),
    ("data", "models"),
    ("algorithms", "contrib.recurrent_ppo"),
    ("runs", "logging", "tracking", "checkpointing", "shared_folder"),
    ("datasets",),
    ("runtime", "eval"),
    ("export",),
    ("experiment",),
    ("sharing",),
    ("api",),
    ("surface",),
    ("contrib", "trainer"),
    ("tools",),
    ("cli", "__main__"),
)
"""From the lowest: a module imports from its own layer and from those before it.

Of a name and a longer one the longer counts. Imports for types alone are not counted, nor are the
lazy exports of packages, which name modules as strings.
"""
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def rank_of(module: str) -> int | None:
    """The layer of a module of this package; None for others, and for the package itself."""
    parts = module.split(".")
    if parts[0] != "rl_training":
        return None
    for length in range(len(parts), 1, -1):
        if (name := ".".join(parts[1:length])) in RANKS:
            return RANKS[name]
    return None


def test_every_module_has_a_layer() -> None:
    assert not [name for name in modules() if rank_of(name) is None and name != "rl_training"]


def test_modules_import_from_their_own_layer_and_lower_ones() -> None:
    upwards = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        own = rank_of(name)
        if own is None:
            continue
        for found in imports_of(path):
            other = rank_of(found.name)
            if other is not None and other > own and not found.for_types:
                upwards.append(str(found))
    assert not upwards


def test_the_layer_of_a_module_is_that_of_its_longest_name() -> None:
    assert rank_of("rl_training.algorithms.returns.gae") == RANKS["algorithms.returns"]
    assert rank_of("rl_training.algorithms.ppo") == RANKS["algorithms"]
    assert rank_of("torch.nn") is None
    assert RANKS["runtime"] < RANKS["experiment"] < RANKS["cli"]


def test_the_registry_is_read_without_importing_an_algorithm() -> None:
    early = [
        str(found)
        for path in files_of("registry", "config", "cli")
        for found in imports_of(path)
        if found.at_top and found.within("torch", *ours("algorithms", "models", "runtime"))
    ]
    assert not early


# -- what explains itself --------------------------------------------------------------------------


def modules() -> list[str]:
    """Every module of the package."""
    found = pkgutil.walk_packages([str(PACKAGE)], "rl_training.")
    return ["rl_training", *(info.name for info in found)]


def test_every_module_says_what_it_is_for() -> None:
    silent = []
    for name in modules():
        path = inspect.getsourcefile(importlib.import_module(name))
        assert path
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        is_package = Path(path).name == "__init__.py" and name != "rl_training"
        if not is_package and name != "rl_training.version" and not ast.get_docstring(tree):
            silent.append(name)
    assert not silent


def public_names() -> Iterator[tuple[str, Any]]:
    """What the packages export, with the public methods of the classes among it."""
    for name in modules():
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            value = getattr(module, exported)
            yield f"{name}.{exported}", value
            if inspect.isclass(value) and value.__module__.startswith("rl_training"):
                for attribute, member in inspect.getmembers(value):
                    if not attribute.startswith("_") and _is_ours(member):
                        yield f"{name}.{exported}.{attribute}", member


def _is_ours(member: Any) -> bool:
    if isinstance(member, property):
        member = member.fget
    return inspect.isroutine(member) and str(getattr(member, "__module__", "")).startswith(
        "rl_training"
    )


def test_everything_exported_has_a_docstring() -> None:
    checked = [
        (name, value)
        for name, value in public_names()
        if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property)
    ]
    assert len(checked) > 60
    assert not [name for name, value in checked if not (inspect.getdoc(value) or "").strip()]


def test_the_package_itself_has_a_docstring() -> None:
    assert rl_training.__doc__
