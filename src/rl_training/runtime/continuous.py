"""What SAC and TD3 share on the runtime: their networks but for the head, and their actors."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.config import TrainConfig
from rl_training.models.action_heads import SquashedGaussianHead, TanhHead
from rl_training.models.mlp_continuous import ActorCritics, MLPActor, MLPCritics
from rl_training.runtime.actors import Actor, ExploringActor, GreedyActor
from rl_training.runtime.spec import encoder_config, hidden_layers
from rl_training.seeding import torch_stream
from rl_training.types import ActionSpec, ObsSpec


def build_networks(
    config: TrainConfig[Any],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    head: SquashedGaussianHead | TanhHead,
) -> ActorCritics:
    """A policy with this head, and critics."""
    knobs = config.algo_kwargs
    shared: dict[str, Any] = {
        "hidden_sizes": hidden_layers(knobs.hidden_sizes, obs_spec, (256, 256)),
        "activation": knobs.activation,
        "encoder": encoder_config(config, orthogonal=False),
        "normalize_obs": config.normalize_obs,
        "clip_obs": config.clip_obs,
    }
    actor = MLPActor(obs_spec, head, **shared)
    critics = MLPCritics(obs_spec, action_spec.size, num_critics=knobs.num_critics, **shared)
    return ActorCritics(actor, critics)


def exploring_actor(algorithm: Any, config: TrainConfig[Any], device: torch.device) -> Actor:
    """Random while the replay warms up, then the policy with its noise."""
    return ExploringActor(
        algorithm.model.actor,
        config.algo_kwargs.learning_starts,
        torch_stream(config.seed, "exploration"),
        device,
        config.acceleration,
    )


def eval_actor(algorithm: Any, device: torch.device, sampling: torch.Generator | None) -> Actor:
    """The policy without its noise, or with noise from the generator given."""
    return GreedyActor(algorithm.model.actor, device, sampling)
