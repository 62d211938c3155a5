"""Helpers for observations: an array (or tensor), a dict of them, or dicts by group of agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")
U = TypeVar("U")


def tree_map(function: Callable[..., U], tree: T | dict[str, T], *others: Any) -> U | dict[str, U]:
    """Apply ``function`` to each leaf of ``tree`` (and to the same leaf of ``others``)."""
    if isinstance(tree, dict):
        return cast(
            "dict[str, U]",
            {
                key: tree_map(function, leaf, *(o[key] for o in others))
                if isinstance(leaf, dict)
                else function(leaf, *(o[key] for o in others))
                for key, leaf in tree.items()
            },
        )
    return function(tree, *others)


def tree_leaves(tree: T | dict[str, T]) -> list[T]:
    """The leaves, in the order of the keys."""
    if not isinstance(tree, dict):
        return [tree]
    leaves: list[T] = []
    for leaf in tree.values():
        leaves += tree_leaves(leaf)
    return leaves


def tree_stack(stack: Callable[[list[Any]], U], trees: Sequence[Any]) -> U | dict[str, U]:
    """Stack the same leaf of many trees with ``stack`` (``np.stack``, ``torch.stack``)."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: stack([cast("dict[str, Any]", t)[key] for t in trees]) for key in first}
    return stack(list(trees))
