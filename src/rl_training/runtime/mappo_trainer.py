"""MAPPO on the shared runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rl_training.algorithms.mappo import MAPPO, MAPPOConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import encoder_config, hidden_layers, memory_settings
from rl_training.models.central_actor_critic import CentralActorCritic, CentralLSTMActorCritic
from rl_training.runtime.ppo_trainer import SPEC as PPO_SPEC
from rl_training.runtime.self_play import source_of_games
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.runtime.teams import team_spec_of
from rl_training.types import ActionSpec, ObsSpec


def build_mappo(
    config: TrainConfig[MAPPOConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> MAPPO:
    """Return MAPPO and its model; weights are drawn from torch's global generator."""
    knobs = config.algo_kwargs
    has_memory = knobs.has_memory
    kind: Any = CentralLSTMActorCritic if has_memory else CentralActorCritic
    default = (64,) if has_memory else (64, 64)
    model = kind(
        obs_spec,
        action_spec,
        hidden_sizes=hidden_layers(knobs.hidden_sizes, obs_spec, default),
        critic_hidden_sizes=knobs.critic_hidden_sizes,
        activation=knobs.activation,
        log_std_init=knobs.log_std_init,
        encoder=encoder_config(config, orthogonal=True),
        normalize_obs=config.normalize_obs,
        clip_obs=config.clip_obs,
        normalize_values=knobs.normalize_values,
        **(memory_settings(knobs) if has_memory else {}),
    ).to(device)
    return MAPPO(model, knobs, **learner_arguments(config, communicator, "minibatches"))


# It acts, and collects rollouts, as PPO does.
_PPO = dataclasses.replace(PPO_SPEC, name="mappo", config=MAPPOConfig, source=source_of_games)
SPEC = team_spec_of(_PPO, build_mappo)


train_mappo = train_function("mappo")
