"""QMIX on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.qmix import QMIXConfig
from rl_training.algorithms.vdn import VDN
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import q_network_settings
from rl_training.models.team_q_network import MixedQNetwork
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.runtime.team_replays import TeamReplayTrainer
from rl_training.runtime.teams import team_spec_of
from rl_training.types import ActionSpec, ObsSpec


def build_qmix(
    config: TrainConfig[QMIXConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> VDN:
    """Return VDN's learner with QMIX's networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    model = MixedQNetwork(
        obs_spec,
        action_spec,
        mixing_size=knobs.mixing_size,
        hypernet_hidden_sizes=knobs.hypernet_hidden_sizes,
        **q_network_settings(config, obs_spec),
    ).to(device)
    return VDN(model, knobs, **learner_arguments(config, communicator, "replay"))


# It acts as DQN does.
_DQN = dataclasses.replace(DQN_SPEC, name="qmix", config=QMIXConfig)
SPEC = team_spec_of(_DQN, build_qmix, trainer=TeamReplayTrainer)


train_qmix = train_function("qmix")
