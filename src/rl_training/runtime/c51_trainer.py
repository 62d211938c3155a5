"""C51 on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.c51 import C51, C51Config
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_q_network
from rl_training.models.value_distributions import Atoms
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_c51(
    config: TrainConfig[C51Config],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> C51:
    """C51 and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    distribution = Atoms(knobs.v_min, knobs.v_max, knobs.num_atoms)
    model = build_q_network(config, obs_spec, action_spec, distribution)
    arguments = learner_arguments(config, communicator, "replay")
    return C51(model.to(device), config.algo_kwargs, **arguments)


SPEC = dataclasses.replace(DQN_SPEC, name="c51", config=C51Config, build=build_c51)


train_c51 = train_function("c51")
