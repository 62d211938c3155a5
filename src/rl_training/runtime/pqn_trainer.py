"""PQN on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.pqn import PQN, PQNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_normalized_q_network
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_pqn(
    config: TrainConfig[PQNConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> PQN:
    """Return PQN and its network; weights are drawn from torch's global generator."""
    model = build_normalized_q_network(config, obs_spec, action_spec).to(device)
    return PQN(model, config.algo_kwargs, **learner_arguments(config, communicator, "minibatches"))


# It acts as DQN does, and collects rollouts as PPO does.
SPEC = dataclasses.replace(
    DQN_SPEC, name="pqn", config=PQNConfig, build=build_pqn, trainer=OnPolicyTrainer
)


train_pqn = train_function("pqn")
