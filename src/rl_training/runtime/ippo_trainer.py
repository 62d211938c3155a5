"""IPPO on the shared runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rl_training.algorithms.ippo import IPPOConfig
from rl_training.algorithms.ppo import PPO
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.runtime.ppo_trainer import SPEC as PPO_SPEC
from rl_training.runtime.ppo_trainer import build_ppo
from rl_training.runtime.recurrent_ppo_trainer import build_recurrent_ppo
from rl_training.runtime.self_play import source_of_games
from rl_training.runtime.setup import train_function
from rl_training.runtime.teams import team_spec_of
from rl_training.types import ActionSpec, ObsSpec


def build_ippo(
    config: TrainConfig[Any],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> PPO:
    """Return the learner of one group: PPO, or RecurrentPPO, on the rows of its agents."""
    build = build_recurrent_ppo if config.has_memory else build_ppo
    return build(config, obs_spec, action_spec, device, communicator)


_PPO = dataclasses.replace(PPO_SPEC, name="ippo", config=IPPOConfig, source=source_of_games)
SPEC = team_spec_of(_PPO, build_ippo)


train_ippo = train_function("ippo")
