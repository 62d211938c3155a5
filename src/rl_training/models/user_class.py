"""Networks of the user's own: they are made and called once, so that errors name their cause."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError, UserError
from rl_training.types import ObsSpec

PROBE_ROWS = 3
"""Observations in the batch that a network is called with when it is built."""


class UserClass(NamedTuple):
    """A class that a setting names, with the keyword arguments for it."""

    cls: type[nn.Module]
    kwargs: Mapping[str, Any]
    setting: str
    """Name of the setting, for errors; that of the keyword arguments is ``setting``_kwargs."""

    def make(self, **arguments: Any) -> nn.Module:
        """Return an object of the class; ``arguments`` come first, by position, in this order."""
        try:
            return self.cls(*arguments.values(), **self.kwargs)
        except UserError:
            raise
        except Exception as error:
            called = ", ".join([*arguments, *(f"{k}={v!r}" for k, v in self.kwargs.items())])
            raise ConfigError(
                f"{self._named}({called}) raised {self._raised(error)}. It is called with"
                f" {' and '.join(arguments)} by position and with '{self.setting}_kwargs' by name;"
                f" its signature is {self.cls.__name__}{_signature(self.cls)}"
            ) from error

    def probe(self, module: nn.Module, obs: Any) -> Any:
        """Return what the module computes from ``obs``, without gradients and in eval mode."""
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            with torch.no_grad():
                return module(obs)
        except Exception as error:
            raise ConfigError(
                f"{self._named}.forward raised {self._raised(error)}, when called with a batch of"
                f" {PROBE_ROWS} observations: {describe(obs)}"
            ) from error
        finally:
            for part, training in modes:
                part.training = training

    def wrong_output(self, expected: str, output: Any, obs: Any) -> ConfigError:
        """Return the error for an output that is not what it should be."""
        return ConfigError(
            f"{self._named}.forward must return {expected}; for a batch of {PROBE_ROWS}"
            f" observations ({describe(obs)}) it returned {describe(output)}"
        )

    @property
    def _named(self) -> str:
        return f"'{self.setting}': {self.cls.__name__}"

    def _raised(self, error: Exception) -> str:
        """Return an error in one line, with the last line of the class's own file it came from."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        file = _source_file(self.cls)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return f"{text} ({file}, line {frames[-1].lineno})" if frames else text


def _source_file(cls: type[Any]) -> str | None:
    try:
        return inspect.getsourcefile(cls)
    except (TypeError, OSError):  # a class of a notebook or of an interactive session
        return None


def _signature(cls: type[Any]) -> str:
    try:
        return str(inspect.signature(cls))
    except (TypeError, ValueError):
        return "(...)"


def probe_observations(obs_spec: ObsSpec, *, normalized: bool) -> Any:
    """Return a batch of zeros of the form that an encoder sees."""
    leaves = {
        key: torch.zeros(
            (PROBE_ROWS, *leaf.shape),
            dtype=torch.float32 if normalized and not leaf.is_image else getattr(torch, leaf.dtype),
        )
        for key, leaf in obs_spec.encoded.items()
    }
    return leaves if obs_spec.is_dict else leaves[""]


def is_floats(value: Any, *shapes: tuple[int, ...]) -> bool:
    """Return whether a value is a tensor of floats of one of these shapes."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape in shapes


def describe(value: Any) -> str:
    """Return shapes and types of tensors, for an error."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(f'{k!r}: {describe(v)}' for k, v in value.items())}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(describe, value))}" if value else "an empty tuple"
    return f"an object of type {type(value).__name__}"
