"""Encoders, from observations to feature vectors: flattened, or a CNN for each image."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_training._internal.tree import tree_leaves
from rl_training.models.cnn.nature import NatureCNN
from rl_training.models.user_class import PROBE_ROWS, UserClass, is_floats, probe_observations
from rl_training.types import ACTION_MASK, ObsSpec


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """How observations are encoded."""

    custom: UserClass | None = None
    """The user's own encoder, made from the `ObsSpec`."""
    feature_size: int = 512
    """Features of each image."""
    orthogonal: bool = False
    """Whether weights are initialised orthogonally, as is usual for policy gradients."""
    bfloat16: bool = False
    """Whether convolutions run in half precision."""
    layer_norm: bool = False
    """Whether the layers for images are followed by layer normalisation."""


DEFAULT_ENCODER = EncoderConfig()


def _flat(leaf: Tensor) -> Tensor:
    """Return one vector per row; the number of rows may be symbolic, which `len` is not."""
    return leaf.reshape(leaf.shape[0], -1).float()


class FlattenEncoder(nn.Module):
    """One vector per row: every leaf of an observation flattened, concatenated."""

    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__()
        vector = not obs_spec.is_dict and len(obs_spec.leaves[""].shape) == 1
        self.single_vector = vector and obs_spec.leaves[""].dtype == "float32"
        self.output_size = sum(leaf.size for leaf in obs_spec.encoded.values())

    def forward(self, obs: Tensor | dict[str, Tensor]) -> Tensor:
        """Concatenate."""
        if self.single_vector and isinstance(obs, Tensor):
            return obs
        return torch.cat([_flat(leaf) for leaf in tree_leaves(obs)], 1)


class ImageEncoder(nn.Module):
    """A `NatureCNN` for every image; other leaves are flattened; all concatenated."""

    def __init__(self, obs_spec: ObsSpec, config: EncoderConfig) -> None:
        super().__init__()
        # Module names may be neither empty nor hold dots: leaves are named by position.
        self._names = {
            key: f"image{i}"
            for i, (key, leaf) in enumerate(obs_spec.encoded.items())
            if leaf.is_image
        }
        self.networks = nn.ModuleDict(
            {
                name: NatureCNN(
                    cast("tuple[int, int, int]", obs_spec.leaves[key].shape),
                    config.feature_size,
                    orthogonal=config.orthogonal,
                    bfloat16=config.bfloat16,
                    layer_norm=config.layer_norm,
                )
                for key, name in self._names.items()
            }
        )
        self.output_size = sum(
            config.feature_size if leaf.is_image else leaf.size
            for leaf in obs_spec.encoded.values()
        )

    def forward(self, obs: Tensor | dict[str, Tensor]) -> Tensor:
        """Encode each leaf and concatenate."""
        if isinstance(obs, Tensor):
            return cast("Tensor", self.networks[self._names[""]](obs))
        return torch.cat(
            [
                self.networks[self._names[key]](leaf) if key in self._names else _flat(leaf)
                for key, leaf in obs.items()
            ],
            1,
        )


def make_encoder(
    obs_spec: ObsSpec, config: EncoderConfig, *, normalized: bool = False
) -> tuple[nn.Module, int]:
    """Return the user's encoder or the default for these observations, and its output size."""
    if config.custom is not None:
        return _custom_encoder(obs_spec, config.custom, normalized)
    if obs_spec.has_images:
        images = ImageEncoder(obs_spec, config)
        return images, images.output_size
    vectors = FlattenEncoder(obs_spec)
    return vectors, vectors.output_size


def _custom_encoder(
    obs_spec: ObsSpec, custom: UserClass, normalized: bool
) -> tuple[nn.Module, int]:
    """Return the user's encoder, and the number of features that it computes of a batch."""
    encoder = custom.make(obs_spec=obs_spec)
    obs = probe_observations(obs_spec, normalized=normalized)
    features = custom.probe(encoder, obs)
    size = features.shape[-1] if isinstance(features, Tensor) and features.ndim == 2 else 0
    if not (size and is_floats(features, (PROBE_ROWS, size))):
        expected = "features of shape (batch, number of features), floats"
        raise custom.wrong_output(expected, features, obs)
    return encoder, size


def split_mask(obs: Any) -> tuple[Any, Tensor | None]:
    """Return observations without the action mask, and the mask where there is one."""
    if isinstance(obs, dict) and ACTION_MASK in obs:
        return {key: leaf for key, leaf in obs.items() if key != ACTION_MASK}, obs[ACTION_MASK]
    return obs, None
