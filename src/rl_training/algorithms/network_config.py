"""Settings of networks: sizes, and networks of the user's own."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rl_training._internal.coerce import NAMES_CLASS
from rl_training.algorithms.schedules import OptimizationConfig
from rl_training.errors import ConfigError

_REPLACED = (
    *("hidden_sizes", "critic_hidden_sizes", "activation", "encoder", "feature_size", "dueling"),
    "layer_norm",
    "noisy",
)
"""Settings of the networks that a custom ``network`` replaces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(OptimizationConfig):
    """Settings of the networks that all algorithms have."""

    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers; unset: the algorithm's default."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"
    """Activation between layers."""
    encoder: str | None = dataclasses.field(default=None, metadata=NAMES_CLASS)
    """Custom feature extractor: an nn.Module class or 'module:Class', called with a description of
    the observations (ObsSpec); unset: a NatureCNN for each image, vectors unchanged."""
    encoder_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keyword arguments of the custom encoder (on the command line as YAML)."""
    feature_size: int = 512
    """Output size of the NatureCNN of each image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.feature_size >= 1, "feature_size", "at least 1")
        self._check_widths("hidden_sizes")
        has_encoder = self.encoder is not None or not self.encoder_kwargs
        self._require(has_encoder, "encoder_kwargs", "empty where 'encoder' is unset")

    def _check_widths(self, name: str) -> None:
        for width in getattr(self, name) or ():
            self._require(width >= 1, name, "widths of at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(NetworkConfig):
    """Settings of algorithms with a policy and a value function."""

    critic_hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers of the value function or critics; unset: as hidden_sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_widths("critic_hidden_sizes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomNetworkConfig(NetworkConfig):
    """Settings of algorithms whose whole network can be the user's own."""

    network: str | None = dataclasses.field(default=None, metadata=NAMES_CLASS)
    """Custom network: an nn.Module class or 'module:Class', called with a description of the
    observations (ObsSpec) and the number of outputs; it replaces encoder and layers."""
    network_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keyword arguments of the custom network (on the command line as YAML)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_network = self.network is not None or not self.network_kwargs
        self._require(has_network, "network_kwargs", "empty where 'network' is unset")
        if self.network is not None:
            self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in _REPLACED and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"'algo_kwargs.{field.name}' has no effect with 'algo_kwargs.network', which"
                    f" replaces the network: leave it at its default, {field.default!r}"
                )
