"""Networks of Stable-Baselines3 as networks of this package: settings, and weights by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.stored_zip import quote
from rl_training.tools.importing.sb3_file import SavedModel
from rl_training.tools.importing.sb3_policy import ON_POLICY, activation_of, check_policy_kwargs
from rl_training.types import ActionSpec, ArraySpec, ObsSpec

_TARGETS = ("q_net_target.", "actor_target.", "critic_target.")
"""Copies of networks, which are not imported: targets become equal to the networks."""
_STRIDES = (4, 2, 1)
"""Of the convolutions of a NatureCNN."""
_IMAGE = "encoder.networks.image0"

Layers = list[tuple[Tensor, Tensor]]
"""Weight and bias of consecutive linear layers."""


@dataclasses.dataclass(frozen=True)
class Networks:
    """Networks in the form of this package."""

    algo_kwargs: dict[str, Any]
    """Settings that make them."""
    weights: dict[str, Tensor]
    """By the names of this package; without the statistics of a normaliser."""


def networks_of(
    model: SavedModel, algo: str, obs_spec: ObsSpec, action_spec: ActionSpec
) -> Networks:
    """Return a model's networks.

    Raises:
        UserError: They have no counterpart here.
    """
    check_policy_kwargs(model)
    taken = _Taken(model)
    if obs_spec.is_dict:
        raise UserError("models for Dict observations (MultiInputPolicy) cannot be imported")
    image = obs_spec.leaves[""] if obs_spec.has_images else None
    if algo in ON_POLICY:
        settings, weights = _actor_critic(taken, image, action_spec)
    elif algo == "dqn":
        settings, weights = _q_network(taken, image)
    else:
        settings, weights = _actor_critics(taken, image, algo)
    taken.require_all()
    gamma = model.data.get("gamma")
    if isinstance(gamma, float) and 0 <= gamma <= 1:
        settings["gamma"] = gamma
    return Networks({**settings, "activation": activation_of(model, algo)}, weights)


def _actor_critic(
    taken: _Taken, image: ArraySpec | None, action_spec: ActionSpec
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings and weights of PPO and A2C."""
    prefixes = ("features_extractor", "pi_features_extractor", "vf_features_extractor")
    settings, weights = _encoder(taken, image, prefixes, "")
    actor = [*taken.layers("mlp_extractor.policy_net"), taken.layer("action_net")]
    critic = [*taken.layers("mlp_extractor.value_net"), taken.layer("value_net")]
    is_gaussian = taken.has("log_std")
    if is_gaussian != (action_spec.kind == "box"):
        raise UserError(
            f"{taken.path} has {'' if is_gaussian else 'no '}Box actions, and those of the"
            f" environment are {action_spec.described}: is it the environment that the model was"
            " trained on?"
        )
    if is_gaussian:
        log_std = taken.tensor("log_std")
        actor[-1], weights["head.log_std"] = _in_policy_units(actor[-1], log_std, action_spec)
    weights |= {**_mlp("actor", actor), **_mlp("critic", critic)}
    settings |= {"hidden_sizes": _widths(actor), "critic_hidden_sizes": _widths(critic)}
    return settings, weights


def _in_policy_units(
    last: tuple[Tensor, Tensor], log_std: Tensor, spec: ActionSpec
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the last layer and the deviation in units of half the range of actions.

    There the policy's Gaussian is in the units of the environment. Here the components that have
    finite bounds are in [-1, 1] and mapped to the bounds.
    """
    weight, bias = (tensor.double() for tensor in last)
    low, high = (torch.tensor(bounds, dtype=torch.float64) for bounds in (spec.low, spec.high))
    if not len(low) == len(bias) == len(log_std):
        raise UserError(
            f"the model has {len(bias)} actions, and those of the environment are {spec.described}"
            f" of shape {spec.shape}: is it the environment that the model was trained on?"
        )
    bounded = torch.isfinite(low) & torch.isfinite(high) & (high > low)
    half = torch.where(bounded, high / 2 - low / 2, 1.0)
    center = torch.where(bounded, high / 2 + low / 2, 0.0)
    scaled = (weight / half[:, None]).float(), ((bias - center) / half).float()
    return scaled, (log_std.double() - half.log()).float()


def _q_network(taken: _Taken, image: ArraySpec | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    settings, weights = _encoder(taken, image, ("q_net.features_extractor",), "")
    layers = taken.layers("q_net.q_net")
    return (
        {**settings, "hidden_sizes": _widths(layers)},
        {**weights, **_mlp("advantage", layers)},
    )


def _actor_critics(
    taken: _Taken, image: ArraySpec | None, algo: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings and weights of SAC and TD3."""
    settings, weights = _encoder(taken, image, ("actor.features_extractor",), "actor.")
    own, more = _encoder(taken, image, ("critic.features_extractor",), "critics.")
    if own != settings:
        raise UserError("the encoders of actor and critics have different sizes")
    weights |= more
    if algo == "sac":
        mean, log_std = taken.layer("actor.mu"), taken.layer("actor.log_std")
        last = tuple(torch.cat(pair) for pair in zip(mean, log_std, strict=True))
        actor = [*taken.layers("actor.latent_pi"), (last[0], last[1])]
    else:
        actor = taken.layers("actor.mu")
    critics: list[Layers] = []
    while taken.has(f"critic.qf{len(critics)}.0.weight"):
        critics.append(taken.layers(f"critic.qf{len(critics)}"))
    if not critics or any(_widths(one) != _widths(critics[0]) for one in critics):
        raise UserError(f"{taken.path} has no critics like those of {algo.upper()}")
    for i, layers in enumerate(zip(*critics, strict=True)):
        weights[f"critics.net.weights.{i}"] = torch.stack([weight.T for weight, _ in layers])
        weights[f"critics.net.biases.{i}"] = torch.stack([bias[None] for _, bias in layers])
    settings |= {
        "hidden_sizes": _widths(actor),
        "critic_hidden_sizes": _widths(critics[0]),
        "num_critics": len(critics),
    }
    return settings, {**weights, **_mlp("actor.net", actor)}


# -- parts -----------------------------------------------------------------------------------------


class _Taken:
    """The weights of a model, and which of them were used."""

    def __init__(self, model: SavedModel) -> None:
        self.path = model.path
        self._weights = model.weights
        self._used = {name for name in model.weights if name.startswith(_TARGETS)}

    def has(self, name: str) -> bool:
        """Return whether there is a weight of this name."""
        return name in self._weights

    def tensor(self, name: str) -> Tensor:
        """Return a weight of real numbers."""
        if name not in self._weights or not self._weights[name].is_floating_point():
            raise UserError(f"{self.path} has no weight {quote(name)}")
        self._used.add(name)
        return self._weights[name]

    def layer(self, name: str) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a layer."""
        weight, bias = self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias")
        if weight.ndim < 2 or bias.shape != weight.shape[:1]:
            raise UserError(f"{self.path}: {quote(name)} has shapes that do not match")
        return weight, bias

    def layers(self, prefix: str) -> Layers:
        """Return linear layers of a sequence with an activation after each: 0, 2, 4, ..."""
        found: Layers = []
        while self.has(f"{prefix}.{2 * len(found)}.weight"):
            layer = self.layer(f"{prefix}.{2 * len(found)}")
            if layer[0].ndim != 2 or (found and layer[0].shape[1] != len(found[-1][1])):
                raise UserError(f"{self.path}: {quote(prefix)} has shapes that do not match")
            found.append(layer)
        return found

    def require_all(self) -> None:
        """Raise UserError where a weight was not used: the networks are others."""
        if unused := sorted(self._weights.keys() - self._used):
            raise UserError(
                f"{self.path} has the weight {quote(unused[0])}, which networks here do not have: a"
                " policy or features extractor of your own cannot be imported"
            )


def _encoder(
    taken: _Taken, image: ArraySpec | None, prefixes: Iterable[str], ours: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings and weights of the NatureCNN that all of ``prefixes`` are; none for vectors.

    Here a policy and a value function share one, so that theirs must be equal.
    """
    there = [prefix for prefix in prefixes if taken.has(f"{prefix}.cnn.0.weight")]
    if image is None and not there:
        return {}, {}
    if image is None or not there:
        what = "not images" if image is None else "images, which it takes as vectors (MlpPolicy)"
        raise UserError(
            f"{taken.path} has {'a' if there else 'no'} NatureCNN, and observations of the"
            f" environment are {what}"
        )
    first, *others = (_nature_cnn(taken, prefix, image) for prefix in there)
    if any(not torch.equal(first[name], other[name]) for other in others for name in first):
        raise UserError(
            f"{taken.path} has different encoders for policy and value function"
            " (share_features_extractor=False), and here they share one"
        )
    size = len(first["linear.bias"])
    return {"feature_size": size}, {f"{ours}{_IMAGE}.{name}": w for name, w in first.items()}


def _nature_cnn(taken: _Taken, prefix: str, image: ArraySpec) -> dict[str, Tensor]:
    """Return the weights of a NatureCNN: (filters, height, width, channels) here.

    The linear layer takes (channels, height, width) there and (height, width, channels) here.
    """
    weights: dict[str, Tensor] = {}
    channels, *sides = image.shape
    for i, stride in enumerate(_STRIDES):
        weight, bias = taken.layer(f"{prefix}.cnn.{2 * i}")
        if weight.ndim != 4 or weight.shape[1] != channels:
            raise UserError(
                f"{taken.path} takes images of {weight.shape[1]} channels, and those of the"
                f" environment have {channels} (frame stacking, --preprocessing atari?)"
            )
        weights[f"weights.{i}"] = weight.permute(0, 2, 3, 1).contiguous()
        weights[f"biases.{i}"] = bias
        channels = len(bias)
        sides = [(side - weight.shape[-1]) // stride + 1 for side in sides]
    weight, bias = taken.layer(f"{prefix}.linear.0")
    if min(sides) < 1 or weight.shape[1:] != (channels * sides[0] * sides[1],):
        raise UserError(
            f"{taken.path} takes images of another size than the environment's,"
            f" {image.shape[1]} x {image.shape[2]}"
        )
    by_place = weight.reshape(-1, channels, *sides).permute(0, 2, 3, 1)
    weights["linear.weight"] = by_place.reshape(len(bias), -1).contiguous()
    weights["linear.bias"] = bias
    return weights


def _mlp(name: str, layers: Layers) -> dict[str, Tensor]:
    return {
        f"{name}.layers.{i}.{part}": tensor
        for i, layer in enumerate(layers)
        for part, tensor in zip(("weight", "bias"), layer, strict=True)
    }


def _widths(layers: Layers) -> list[int]:
    return [len(bias) for _, bias in layers[:-1]]
