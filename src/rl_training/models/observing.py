"""`ObservingModule`, the base of every network: from observations to features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from rl_training.communicator import ALONE, Communicator
from rl_training.errors import ConfigError
from rl_training.models.action_heads import NumpyChoice, PolicyHead, ReplayHead
from rl_training.models.encoders import EncoderConfig, FlattenEncoder, make_encoder, split_mask
from rl_training.models.mlp import MLP, NUMPY_ACTIVATIONS
from rl_training.models.normalizer import RunningNorm
from rl_training.types import Array, ObsSpec, Rows


class ObservingModule(nn.Module):
    """Splits the action mask off observations, normalises vectors and encodes the result.

    Observations are raw, as environments return them and buffers store them. With ``clip_obs``
    vectors are standardised by running statistics and clipped to that many standard deviations;
    with None they are encoded as they are. Networks that choose actions pass their ``head``. Where
    ``encoder`` is None the subclass computes its outputs from what `observe` returns.
    """

    head: PolicyHead | ReplayHead | None

    def __init__(
        self,
        obs_spec: ObsSpec,
        encoder: EncoderConfig | None,
        clip_obs: float | None,
        head: PolicyHead | ReplayHead | None = None,
    ) -> None:
        super().__init__()
        self.head = head  # before the encoder: checkpoints hold moments in order of parameters
        if encoder is not None:
            normalized = clip_obs is not None
            self.encoder, self.num_features = make_encoder(obs_spec, encoder, normalized=normalized)
        self.sees_images = obs_spec.has_images
        self.image_leaves = tuple(k for k, leaf in obs_spec.encoded.items() if leaf.is_image)
        """Names of the images in an observation; '' is an observation that is one image."""
        self.norm: nn.ModuleDict | None = None
        if clip_obs is not None:
            vectors = {k: leaf for k, leaf in obs_spec.encoded.items() if not leaf.is_image}
            if not vectors:
                raise ConfigError(
                    "'normalize_obs' normalises vectors, and these observations are images,"
                    " which networks scale themselves: set normalize_obs to false"
                )
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
        """Return features, one row per observation, and the action mask where there is one."""
        obs, mask = self.observe(obs)
        return self.encoder(obs), mask

    def observe(self, obs: Any) -> tuple[Any, Tensor | None]:
        """Return observations, normalised, and the action mask where there is one."""
        obs, mask = split_mask(obs)
        return (obs if self.norm is None else self._normalize(obs)), mask

    def _normalize(self, obs: Any) -> Any:
        norm = self.norm
        assert norm is not None  # noqa: S101 - narrows the type
        if isinstance(obs, dict):
            return {
                key: norm[self._leaf_names[key]](leaf) if key in self._leaf_names else leaf
                for key, leaf in obs.items()
            }
        return norm[self._leaf_names[""]](obs)

    def norm_of(self, name: str) -> RunningNorm | None:
        """Return the normaliser of an array of the observation, where it has one."""
        if self.norm is None or name not in self._leaf_names:
            return None
        return cast("RunningNorm", self.norm[self._leaf_names[name]])

    def update_normalizer(self, *rows: Rows, communicator: Communicator = ALONE) -> None:
        """Add the valid rows of each shard to the statistics."""
        if self.norm is None:
            return
        for key, name in self._leaf_names.items():
            leaves = [(shard.obs[key] if key else shard.obs)[shard.valid] for shard in rows]
            self.norm[name].update(*leaves, communicator=communicator)  # type: ignore[operator]

    # -- acting in NumPy -----------------------------------------------------------------------

    def numpy_policy(self, net: MLP) -> NumpyChoice | None:
        """Return a function from observations and noise (None: greedy) to actions, in NumPy.

        ``net`` maps features to the head's parameters. Weights and normaliser are views; a
        Gaussian's deviation is read when this is called. None where `numpy_choice` is None.
        """
        choose = self.numpy_choice(net.activation)
        if choose is None:
            return None
        forward, normalize = net.numpy_function(), self.numpy_normalize()
        if normalize is None:
            return lambda obs, noise: choose(forward(obs), noise)
        return lambda obs, noise: choose(forward(normalize(obs)), noise)

    def numpy_choice(self, activation: str) -> NumpyChoice | None:
        """Return the head's choice in NumPy; None where this network has to act through torch.

        NumPy needs plain float32 vectors, weights on the CPU, and an activation and a head that
        have a NumPy form.
        """
        plain = isinstance(self.encoder, FlattenEncoder) and self.encoder.single_vector
        on_cpu = next(self.parameters()).device.type == "cpu"
        if self.head is None or not (plain and on_cpu and activation in NUMPY_ACTIVATIONS):
            return None
        return self.head.numpy_choice()

    def numpy_normalize(self) -> Callable[[Array], Array] | None:
        """Return the normaliser of plain vectors in NumPy, over views; None without one."""
        if self.norm is None:
            return None
        norm = cast("RunningNorm", self.norm_of(""))
        shift, scale, clip = norm.shift.numpy(), norm.scale.numpy(), norm.clip
        return lambda obs: np.clip((obs - shift) * scale, -clip, clip)


def update_normalizers(module: nn.Module, *rows: Rows, communicator: Communicator = ALONE) -> None:
    """Call `ObservingModule.update_normalizer` of every network inside ``module``.

    Target networks copy the statistics with the weights (`Target.follow`).
    """
    for part in module.modules():
        if isinstance(part, ObservingModule):
            part.update_normalizer(*rows, communicator=communicator)
