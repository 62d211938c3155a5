"""IQL on the shared runtime."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.iql import IQL, IQLConfig, IQLModel
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.models.action_heads import CategoricalHead, ReplayHead, TanhGaussianHead
from rl_training.models.building import build_actor_critics, build_value
from rl_training.runtime.actors import Actor
from rl_training.runtime.continuous import eval_actor, exploring_actor
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_iql(
    config: TrainConfig[IQLConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
) -> IQL:
    """IQL and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head: ReplayHead = TanhGaussianHead(action_spec.shape, knobs.log_std_init)
    if action_spec.kind == "discrete":
        head = CategoricalHead(action_spec.nvec, ())
    networks = build_actor_critics(config, obs_spec, action_spec, head)
    model = IQLModel(networks, build_value(config, obs_spec)).to(device)
    return IQL(model, knobs, **learner_arguments(config))


def _actor(algorithm: Any, config: TrainConfig[Any], device: torch.device) -> Actor:
    if isinstance(algorithm.model.actor.head, CategoricalHead):
        raise ConfigError(
            "iql learns Discrete actions from a dataset alone: set total_updates instead of"
            " total_timesteps"
        )
    return exploring_actor(algorithm, config, device)


SPEC = AlgorithmSpec(
    name="iql",
    config=IQLConfig,
    build=build_iql,
    actor=_actor,
    eval_actor=eval_actor,
    trainer=OffPolicyTrainer,
)


train_iql = train_function("iql")
