"""The ``policy_kwargs`` of Stable-Baselines3 as settings of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_training.errors import ConfigError
from rl_training.tools.importing.literals import Name
from rl_training.tools.importing.sb3_policy import ACTIVATIONS, ON_POLICY
from rl_training.tools.importing.zoo_defaults import WIDTHS

_OPTIMIZER = {"eps": "optimizer_eps", "weight_decay": "weight_decay", "betas": "optimizer_betas"}


@dataclasses.dataclass(frozen=True)
class NetworkSettings:
    """Settings of networks and optimizer, and what could not be translated."""

    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


def network_settings(given: Any, algo: str, *, has_images: bool, uses_sde: bool) -> NetworkSettings:
    """Return the settings of ``policy_kwargs``, which is parsed already.

    Raises:
        ConfigError: A value has the wrong form.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"policy_kwargs: {given!r} is no dict(...)")
    left, result = dict(given), NetworkSettings()
    default = None if has_images else WIDTHS.get(algo)
    result.knobs.update(_architecture(left.pop("net_arch", default), algo))
    if (activation := left.pop("activation_fn", None)) is not None:
        name = str(activation).rpartition(".")[2]
        if not isinstance(activation, Name) or name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(f"policy_kwargs: activation_fn is {activation!r}, not one of {known}")
        result.knobs["activation"] = ACTIVATIONS[name]
    deviation = left.pop("log_std_init", None)
    if deviation is not None and algo in ON_POLICY:
        result.knobs["log_std_init"] = deviation
        result.notes.append(
            "log_std_init is in units of half the range of actions here, and in those of the"
            " environment there"
        )
    elif deviation is not None and uses_sde:  # elsewhere it has no effect without
        result.missing["policy_kwargs: log_std_init"] = "it belongs to use_sde"
    if left.pop("ortho_init", True) is not True and algo in ON_POLICY:
        result.missing["policy_kwargs: ortho_init"] = "weights always begin orthogonally"
    if (critics := left.pop("n_critics", None)) is not None:
        result.knobs["num_critics"] = critics
    _optimizer(left.pop("optimizer_kwargs", None) or {}, result)
    result.missing.update({f"policy_kwargs: {name}": "no counterpart" for name in left})
    return result


def _architecture(given: Any, algo: str) -> dict[str, Any]:
    """Return hidden layers: of all networks, or of policy and critics."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], Mapping):
        (given,) = given  # as older versions write it
    if given is None:
        return {}
    critic = given
    if isinstance(given, Mapping):
        of_critic = "vf" if algo in ON_POLICY else "qf"
        if given.keys() - {"pi", of_critic} or algo == "dqn":
            raise ConfigError(f"policy_kwargs: net_arch {dict(given)!r} is not understood")
        given, critic = given.get("pi", []), given.get(of_critic, [])
    for widths in (given, critic):
        if not isinstance(widths, list) or not all(type(n) is int for n in widths):
            raise ConfigError(f"policy_kwargs: net_arch {widths!r} is no list of widths")
    return {"hidden_sizes": given} | ({} if critic == given else {"critic_hidden_sizes": critic})


def _optimizer(given: Any, result: NetworkSettings) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"policy_kwargs: optimizer_kwargs {given!r} is no dict(...)")
    for name, value in given.items():
        if name in _OPTIMIZER:
            result.knobs[_OPTIMIZER[name]] = value
        else:
            result.missing[f"policy_kwargs: optimizer_kwargs: {name}"] = "no counterpart"
