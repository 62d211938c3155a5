"""AWAC on the shared runtime."""

from __future__ import annotations

import torch

from rl_training.algorithms.awac import AWAC, AWACConfig
from rl_training.config import TrainConfig
from rl_training.models.action_heads import TanhGaussianHead
from rl_training.models.building import build_actor_critics
from rl_training.runtime.continuous import eval_actor, exploring_actor
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_awac(
    config: TrainConfig[AWACConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
) -> AWAC:
    """AWAC and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head = TanhGaussianHead(action_spec.shape, knobs.log_std_init)
    model = build_actor_critics(config, obs_spec, action_spec, head).to(device)
    return AWAC(model, knobs, **learner_arguments(config))


SPEC = AlgorithmSpec(
    name="awac",
    config=AWACConfig,
    build=build_awac,
    actor=exploring_actor,
    eval_actor=eval_actor,
    trainer=OffPolicyTrainer,
)


train_awac = train_function("awac")
