"""Which modules depend on train and eval mode, change buffers, or draw random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from rl_training.errors import ConfigError

_MODE_FREE = (
    *(nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList),
    *(nn.ParameterDict, nn.Flatten, nn.Unflatten, nn.Linear, nn.Bilinear, nn.Embedding),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
    *(nn.ConvTranspose3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d),
    *(nn.AdaptiveMaxPool2d, nn.LayerNorm, nn.GroupNorm, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ReLU6),
    *(nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Softsign, nn.Softmax, nn.LogSoftmax, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.GLU),
)
"""Modules of torch that compute the same in both modes. Recurrent layers are not listed: their
CUDA kernels do not support a backward pass in eval mode."""


def _is_mode_free(module: nn.Module) -> bool:
    # Exact types, because a subclass may differ. This package's own modules do not use their mode;
    # the modules inside them are checked separately.
    own = type(module).__module__.partition(".")[0] == __name__.partition(".")[0]
    return own or type(module) in _MODE_FREE


def mode_dependent(module: nn.Module) -> list[nn.Module]:
    """Return the submodules whose results may differ between train and eval mode.

    If a module overrides ``train``, its submodules are not listed, because that method switches
    them.
    """
    if type(module).train is not nn.Module.train:
        return [module]
    found = [] if _is_mode_free(module) else [module]
    for child in module.children():
        found += mode_dependent(child)
    return list(dict.fromkeys(found))


def set_mode(modules: Iterable[nn.Module], *, training: bool) -> None:
    """Switch modules that `mode_dependent` returned."""
    for module in modules:
        if type(module).train is nn.Module.train:
            module.training = training
        else:
            module.train(training)


def changing_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers, by name, that a forward pass in train mode may change.

    Buffers of a class whose attribute ``frozen_between_updates`` is true change only outside
    learning phases and are left out.
    """
    names = {id(part): name for name, part in module.named_modules()}
    found: dict[str, Tensor] = {}
    for switched in mode_dependent(module):
        for part in switched.modules():
            if _is_mode_free(part) or getattr(part, "frozen_between_updates", False):
                continue
            found |= part.named_buffers(prefix=names[id(part)], recurse=False)
    return found


def refuse_random_modules(module: nn.Module, rule: str, user: str) -> None:
    """Raise `ConfigError` with a rule if a module draws random numbers.

    ``user`` is what does not support them: CUDA graphs, and runs of several shards, in which the
    numbers would depend on the placement of the shards.
    """
    for name, part in module.named_modules():
        if _draws(part):
            raise ConfigError(
                f"{rule}: {name or 'the network'} ({type(part).__name__}) draws random numbers,"
                f" which {user} does not support; or remove it from the encoder"
            )


def refuse_changing_buffers(module: nn.Module) -> None:
    """Raise `ConfigError` if a forward pass changes buffers, which would differ between shards."""
    for name in changing_buffers(module):
        raise ConfigError(
            f"'shards' must be 1: the buffer {name} may change with every batch (as in BatchNorm)"
            " and would differ between shards; use LayerNorm or GroupNorm in the encoder instead"
        )


@contextlib.contextmanager
def refuse_random_numbers(device: torch.device) -> Iterator[None]:
    """Raise `ConfigError` if torch's global generators are used within this context."""
    before = _generator_states(device)
    yield
    pairs = zip(before, _generator_states(device), strict=True)
    if not all(torch.equal(*pair) for pair in pairs):
        raise ConfigError(
            "'shards' must be 1: a network draws random numbers (such as torch.rand or"
            " functional.dropout in an encoder), which would depend on the placement of the shards;"
            " or remove them from the network"
        )


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))
