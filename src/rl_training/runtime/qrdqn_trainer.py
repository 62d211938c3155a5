"""QR-DQN on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.qrdqn import QRDQN, QRDQNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_q_network
from rl_training.models.value_distributions import Quantiles
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_qrdqn(
    config: TrainConfig[QRDQNConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> QRDQN:
    """QR-DQN and its networks, at the start of the config's random streams."""
    distribution = Quantiles(config.algo_kwargs.num_quantiles)
    model = build_q_network(config, obs_spec, action_spec, distribution)
    arguments = learner_arguments(config, communicator, "replay")
    return QRDQN(model.to(device), config.algo_kwargs, **arguments)


SPEC = dataclasses.replace(DQN_SPEC, name="qrdqn", config=QRDQNConfig, build=build_qrdqn)


train_qrdqn = train_function("qrdqn")
