"""IQN on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.iqn import IQN, IQNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_iqn_network
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_iqn(
    config: TrainConfig[IQNConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> IQN:
    """IQN and its networks, at the start of the config's random streams."""
    model = build_iqn_network(config, obs_spec, action_spec)
    arguments = learner_arguments(config, communicator, "replay")
    return IQN(model.to(device), config.algo_kwargs, **arguments)


SPEC = dataclasses.replace(DQN_SPEC, name="iqn", config=IQNConfig, build=build_iqn)


train_iqn = train_function("iqn")
