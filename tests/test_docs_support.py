"""The table of what each algorithm supports, in the documentation, is the registry's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from rl_training.registry import ALGORITHMS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "algorithms" / "index.md"


def load_tables() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS.parent / "scripts")
        return importlib.import_module("docs_tables")


tables = load_tables()


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    _, _, *body = tables.table_of_support().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def test_the_page_of_algorithms_shows_the_table_once() -> None:
    assert PAGE.read_text(encoding="utf-8").count("\n<!-- begin support -->\n") == 1
    assert tables.table_of_support() in PAGE.read_text(encoding="utf-8")


def test_every_algorithm_has_one_row_that_links_to_its_page() -> None:
    shown = [row[0] for row in rows()]
    assert shown == [
        f"[{entry.class_name_of(name)}]({name}.md)" for name, entry in ALGORITHMS.items()
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_holds_what_the_registry_declares(name: str) -> None:
    declared = ALGORITHMS[name]
    (row,) = (row for row in rows() if row[0].endswith(f"({name}.md)"))
    _, actions, observations, memory, masks, accelerations, torchrun = row
    assert tuple(actions.split(", ")) == declared.actions
    assert tuple(observations.split(", ")) == declared.observations
    assert tuple(part.strip("`") for part in memory.split(", ")) == declared.memory
    assert (masks == "yes", masks == "no") == (declared.masks, not declared.masks)
    assert tuple(part.strip("`") for part in accelerations.split(", ")) == declared.accelerations
    assert torchrun == ("yes" if "torchrun" in declared.engines else "no")


def test_a_known_row_reads_as_expected() -> None:
    (drqn,) = (row for row in rows() if row[0] == "[DRQN](drqn.md)")
    assert drqn[1:] == ["Discrete", "vector, image, Dict", "`lstm`, `gru`", "yes", "`eager`", "yes"]
