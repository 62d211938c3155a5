"""State of the global random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def global_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators, which a user's code may use."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "python": [version, np.asarray(words, np.int64), gauss],
        "numpy": [name, np.asarray(keys), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":  # otherwise this would initialise every GPU
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def generator_fingerprint() -> tuple[Any, ...]:
    """Return a value that differs once a global generator on the host has been used."""
    _, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    words = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), tuple(rest), words


class GeneratorWatch:
    """Warns once if the global generators are used within it, in its first ``uses``."""

    def __init__(self, uses: int) -> None:
        self._uses = uses
        self._before: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        if self._uses:
            self._before = generator_fingerprint()

    def __exit__(self, error: object, *_: object) -> None:
        if not self._uses or error is not None:
            return
        self._uses -= 1
        if generator_fingerprint() != self._before:
            self._uses = 0
            warnings.warn(
                "environments, networks or callbacks draw from the global generators of random,"
                " numpy or torch: with several shards, what is learnt then depends on which"
                " process executes which shard. Draw from the environment's own generator"
                " (self.np_random) instead",
                stacklevel=3,
            )


def check_global_rng_state(state: Mapping[str, Any]) -> None:
    """Raise an error if a state cannot be restored; the generators are not changed."""
    before = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()  # noqa: NPY002
    try:
        set_global_rng_state({key: value for key, value in state.items() if key != "cuda"})
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def set_global_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a saved state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
