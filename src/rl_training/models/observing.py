"""What actor-critics share: how they see (an encoder, a normaliser) and how they act (a head)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from rl_training.errors import ConfigError
from rl_training.models.action_heads import PolicyHead
from rl_training.models.encoders import EncoderConfig, make_encoder, split_mask
from rl_training.models.normalizer import RunningNorm
from rl_training.types import Array, ObsSpec


class ObservingModule(nn.Module):
    """Turns observations into features; vectors are standardised first, given ``clip_obs``."""

    def __init__(
        self,
        head: PolicyHead,
        obs_spec: ObsSpec,
        encoder: EncoderConfig,
        clip_obs: float | None,
    ) -> None:
        super().__init__()
        self.head = head
        self.encoder, self.num_features = make_encoder(obs_spec, encoder)
        self.sees_images = obs_spec.has_images
        self.norm: nn.ModuleDict | None = None
        if clip_obs is not None:
            vectors = {k: leaf for k, leaf in obs_spec.encoded.items() if not leaf.is_image}
            if not vectors:
                raise ConfigError("'normalize_obs' is for vectors: images are scaled as they are")
            # Module names may be neither empty nor hold dots: leaves are named by position.
            self._leaf_names = {
                key: f"leaf{i}" for i, key in enumerate(obs_spec.encoded) if key in vectors
            }
            self.norm = nn.ModuleDict(
                {
                    self._leaf_names[key]: RunningNorm(leaf.shape, clip_obs)
                    for key, leaf in vectors.items()
                }
            )

    def encode(self, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Features, one row per observation, and the action mask."""
        obs, mask = split_mask(obs)
        if self.norm is not None:
            obs = self._normalize(obs)
        return self.encoder(obs), mask

    def _normalize(self, obs: Any) -> Any:
        norm = self.norm
        assert norm is not None  # noqa: S101 - narrows the type
        if isinstance(obs, dict):
            return {
                key: norm[self._leaf_names[key]](leaf) if key in self._leaf_names else leaf
                for key, leaf in obs.items()
            }
        return norm[self._leaf_names[""]](obs)

    def numpy_normalize(self) -> Callable[[Array], Array] | None:
        """The normaliser of plain vectors as it stands now, in NumPy; None without one."""
        if self.norm is None:
            return None
        norm = cast("RunningNorm", self.norm[self._leaf_names[""]])
        shift, scale, clip = norm.shift.numpy(), norm.scale.numpy(), norm.clip
        return lambda obs: np.clip((obs - shift) * scale, -clip, clip)

    def update_normalizer(self, obs: Any, valid: Tensor) -> None:
        """Show the normaliser a rollout (flat rows; those not ``valid`` are left out)."""
        if self.norm is None:
            return
        for key, name in self._leaf_names.items():
            leaf = obs[key] if key else obs
            self.norm[name].update(leaf[valid])  # type: ignore[operator]
