"""Discrete SAC on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.sac import SACModel
from rl_training.algorithms.sac_discrete import SACDiscrete, SACDiscreteConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.action_heads import CategoricalHead
from rl_training.models.building import build_actor_critics
from rl_training.runtime.sac_trainer import SPEC as SAC_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_sac_discrete(
    config: TrainConfig[SACDiscreteConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> SACDiscrete:
    """Discrete SAC and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head = CategoricalHead(action_spec.nvec, ())
    model = SACModel(build_actor_critics(config, obs_spec, action_spec, head), knobs).to(device)
    return SACDiscrete(model, knobs, **learner_arguments(config, communicator, "replay"))


# It acts, and fills a replay, as SAC does.
SPEC = dataclasses.replace(
    SAC_SPEC, name="sac_discrete", config=SACDiscreteConfig, build=build_sac_discrete
)


train_sac_discrete = train_function("sac_discrete")
