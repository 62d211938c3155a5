"""Values of an environment's ``info`` that a run logs: ``log_info: [is_success]``."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WINDOW = 100
_OURS = ("episode",)
"""Keys that this package adds to the info at the end of an episode."""


class EpisodeInfo:
    """Means of the values that named keys have in the info of the last step of each episode.

    Over the last hundred episodes, with warnings of keys that are missing or no numbers. With
    ``quota``, for an evaluation, over the first so many of each environment, without warnings.
    """

    def __init__(
        self, keys: Sequence[str], quota: Sequence[int] | None = None, window: int = WINDOW
    ) -> None:
        self.keys = tuple(keys)
        self._quota = None if quota is None else list(quota)
        length = window if quota is None else None
        self._values: dict[str, deque[float]] = {key: deque(maxlen=length) for key in self.keys}
        self._episodes = 0
        self._other_keys: set[str] = set()
        self._warned = set(() if quota is None else self.keys)

    def add(self, env: int, info: Mapping[str, Any]) -> None:
        """Add the values of an episode of environment ``env``, given the info of its last step."""
        if self._quota is not None:
            if not self._quota[env]:
                return
            self._quota[env] -= 1
        self._episodes += 1
        for key in self.keys:
            if key in info:
                self._add_value(key, info[key])
        self._other_keys.update(key for key in info if key not in (*self.keys, *_OURS))

    def _add_value(self, key: str, value: Any) -> None:
        number = _number(value)
        if number is not None:
            self._values[key].append(number)
        elif key not in self._warned:
            self._warned.add(key)
            warnings.warn(
                f"'log_info': info[{key!r}] at the end of an episode is {_short(value)}, not a"
                " finite number: such values are left out. Name keys whose values are numbers or"
                " bools",
                stacklevel=2,
            )

    def means(self, group: str) -> dict[str, float]:
        """Return the means, named ``group/KEY_mean``; warn once of a key that no episode had."""
        self.warn_of_missing()
        return {
            f"{group}/{key}_mean": float(np.mean(values))
            for key, values in self._values.items()
            if values
        }

    def warn_of_missing(self) -> None:
        """Warn once of each key that no episode had."""
        for key, values in self._values.items():
            if self._episodes and not values and key not in self._warned:
                self._warned.add(key)
                self._warn_missing(key)

    def sums(self) -> list[tuple[float, int]]:
        """Return the sum and number of the values of each key."""
        self.warn_of_missing()
        return [(float(np.sum(values)), len(values)) for values in self._values.values()]

    def _warn_missing(self, key: str) -> None:
        found = ", ".join(sorted(map(repr, self._other_keys))) or "none"
        warnings.warn(
            f"'log_info': {key!r} was not in the info of the last step of any of"
            f" {self._episodes:,} episodes; keys that were: {found}",
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the window."""
        return {key: list(values) for key, values in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of the keys that are logged now."""
        for key, values in self._values.items():
            values.clear()
            values.extend(float(value) for value in state.get(key, ()))


def means_of_sums(
    group: str, keys: Sequence[str], sums: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Return the means of what `EpisodeInfo.sums` returned, as `EpisodeInfo.means` does."""
    pairs = zip(keys, sums, strict=True)
    return {f"{group}/{key}_mean": total / count for key, (total, count) in pairs if count}


def _number(value: Any) -> float | None:
    """A value as a finite number; None where it is none. An array of one number is one."""
    try:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            return None
        number = float(array.reshape(()))
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
