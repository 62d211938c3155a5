"""Random numbers of episodes, computed on the device from (seed, environment, episode)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUMBERS = 2**16
"""Numbers that an episode may draw before it shares them with the next one."""


class EpisodeStreams:
    """A stream of each environment, and in it a block of numbers for each episode.

    SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195) of a counter: integer operations
    alone, so that all devices draw the same numbers, and nothing waits for the host.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._envs = torch.arange(1, num_envs + 1, device=device)
        self._keys = torch.zeros_like(self._envs)
        self._episodes = torch.zeros_like(self._envs)

    def seed(self, seed: int) -> None:
        """Begin the streams of ``seed``, at the first episode of every environment."""
        self._keys.copy_(_mixed(self._envs * _signed(_GOLDEN) + seed))
        self._episodes.zero_()

    def uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return (count, environments) numbers in [0, 1): the first ones of each episode."""
        first = self._episodes * _NUMBERS
        index = first + torch.arange(1, count + 1, device=first.device).unsqueeze(1)
        mixed = _mixed(self._keys + index * _signed(_GOLDEN))
        bits = 53 if dtype == torch.float64 else 24
        return _shifted(mixed, 64 - bits).to(dtype) * 2.0**-bits

    def advance(self, ended: Tensor) -> None:
        """Move to the next episode where one has ended."""
        self._episodes += ended

    def state_dict(self) -> dict[str, Tensor]:
        """Return the streams and the episode that each is at."""
        return {"keys": self._keys, "episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._keys.copy_(state["keys"])
        self._episodes.copy_(state["episodes"])


def _signed(number: int) -> int:
    """Return the 64 bits of a number as torch's integers hold them."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros: torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(z: Tensor) -> Tensor:
    """Return SplitMix64's output function of 64-bit integers, which wrap around."""
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)
