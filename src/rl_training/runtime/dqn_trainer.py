"""DQN on the shared runtime."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.dqn import DQN, DQNConfig
from rl_training.config import TrainConfig
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.runtime.actors import Actor, EpsilonGreedyActor, GreedyActor
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, encoder_config, hidden_layers
from rl_training.seeding import torch_stream
from rl_training.types import ActionSpec, ObsSpec


def build_dqn(
    config: TrainConfig[DQNConfig], obs_spec: ObsSpec, action_spec: ActionSpec, device: torch.device
) -> DQN:
    """DQN and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    model = MLPQNetwork(
        obs_spec,
        action_spec,
        hidden_sizes=hidden_layers(knobs.hidden_sizes, obs_spec, (120, 84)),
        activation=knobs.activation,
        dueling=knobs.dueling,
        encoder=encoder_config(config, orthogonal=False),
        normalize_obs=config.normalize_obs,
        clip_obs=config.clip_obs,
    ).to(device)
    generator = torch_stream(config.seed, "replay")
    return DQN(model, knobs, generator=generator, acceleration=config.acceleration)


def _actor(algorithm: DQN, config: TrainConfig[DQNConfig], device: torch.device) -> Actor:
    knobs = config.algo_kwargs
    model: Any = algorithm.module
    generator = torch_stream(config.seed, "exploration")
    return EpsilonGreedyActor(model, knobs.exploration, generator, device, config.acceleration)


def _eval_actor(algorithm: DQN, device: torch.device, sampling: torch.Generator | None) -> Actor:
    model: Any = algorithm.module
    if sampling is None:
        return GreedyActor(model, device)
    final = algorithm.config.exploration_final_eps
    return EpsilonGreedyActor(model, lambda _: final, sampling, device)


SPEC = AlgorithmSpec(
    name="dqn",
    config=DQNConfig,
    build=build_dqn,
    actor=_actor,
    eval_actor=_eval_actor,
    trainer=OffPolicyTrainer,
)


train_dqn = train_function("dqn")
