"""PPG on the shared runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rl_training.algorithms.ppg import PPG, PPGConfig
from rl_training.algorithms.recurrent_ppg import RecurrentPPG
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import encoder_config, hidden_layers
from rl_training.models.mlp_ppg import MLPPPGModel
from rl_training.models.recurrent.lstm_ppg import LSTMPPGModel
from rl_training.runtime.ppo_trainer import SPEC as PPO_SPEC
from rl_training.runtime.recurrent_ppo_trainer import SPEC as RECURRENT_SPEC
from rl_training.runtime.recurrent_ppo_trainer import recurrent_settings
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_ppg(
    config: TrainConfig[PPGConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> PPG:
    """PPG and its model, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    model = MLPPPGModel(
        obs_spec,
        action_spec,
        hidden_sizes=hidden_layers(knobs.hidden_sizes, obs_spec, (64, 64)),
        value_sizes=knobs.value_sizes,
        activation=knobs.activation,
        log_std_init=knobs.log_std_init,
        encoder=encoder_config(config, orthogonal=True),
        normalize_obs=config.normalize_obs,
        clip_obs=config.clip_obs,
    ).to(device)
    return PPG(
        model,
        knobs,
        **learner_arguments(config, communicator, "minibatches"),
    )


def build_recurrent_ppg(
    config: TrainConfig[PPGConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> PPG:
    """PPG with memory and its model, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    settings = recurrent_settings(config, obs_spec)
    model = LSTMPPGModel(obs_spec, action_spec, value_sizes=knobs.value_sizes, **settings)
    arguments = learner_arguments(config, communicator, "minibatches")
    return RecurrentPPG(model.to(device), knobs, **arguments)


# It acts and is trained as PPO is; the phases are its own affair.
_OWN: dict[str, Any] = {"name": "ppg", "config": PPGConfig}
SPEC = dataclasses.replace(
    PPO_SPEC,
    **_OWN,
    build=build_ppg,
    with_memory=dataclasses.replace(RECURRENT_SPEC, **_OWN, build=build_recurrent_ppg),
)


train_ppg = train_function("ppg")
