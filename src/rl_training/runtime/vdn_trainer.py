"""VDN on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.vdn import VDN, VDNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import q_network_settings
from rl_training.models.team_q_network import SummedQNetwork
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.runtime.team_replays import TeamReplayTrainer
from rl_training.runtime.teams import team_spec_of
from rl_training.types import ActionSpec, ObsSpec


def build_vdn(
    config: TrainConfig[VDNConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> VDN:
    """Return VDN and its networks, at the start of the config's random streams."""
    settings = q_network_settings(config, obs_spec)
    model = SummedQNetwork(obs_spec, action_spec, **settings).to(device)
    return VDN(model, config.algo_kwargs, **learner_arguments(config, communicator, "replay"))


# It acts as DQN does.
_DQN = dataclasses.replace(DQN_SPEC, name="vdn", config=VDNConfig)
SPEC = team_spec_of(_DQN, build_vdn, trainer=TeamReplayTrainer)


train_vdn = train_function("vdn")
