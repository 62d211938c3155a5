"""CQL on the shared runtime."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.cql import CQL, CQLConfig, DiscreteCQL
from rl_training.algorithms.sac import SACModel
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.models.action_heads import SquashedGaussianHead
from rl_training.models.building import build_actor_critics, build_plain_q_network
from rl_training.runtime import continuous
from rl_training.runtime.actors import Actor, EvaluationActor
from rl_training.runtime.offline import OfflineTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_cql(
    config: TrainConfig[CQLConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
) -> CQL | DiscreteCQL:
    """CQL and its networks, at the start of the config's random streams."""
    knobs, arguments = config.algo_kwargs, learner_arguments(config)
    if action_spec.kind == "discrete":
        _refuse_settings_of_box(knobs)
        network = build_plain_q_network(config, obs_spec, action_spec).to(device)
        return DiscreteCQL(network, knobs, **arguments)
    head = SquashedGaussianHead(action_spec.shape)
    networks = build_actor_critics(config, obs_spec, action_spec, head)
    return CQL(SACModel(networks, knobs).to(device), knobs, **arguments)


_OF_BOX = (
    *("critic_hidden_sizes", "num_critics", "critic_layer_norm", "actor_learning_rate"),
    *("ent_coef", "ent_coef_init", "target_entropy", "conservative_threshold"),
    *("num_action_samples", "soft_backup"),
)
"""Settings of the policy and of its critics, which the Q-network of Discrete actions replaces."""


def _refuse_settings_of_box(knobs: CQLConfig) -> None:
    usual = CQLConfig()
    for name in _OF_BOX:
        if getattr(knobs, name) != getattr(usual, name):
            raise ConfigError(f"'algo_kwargs.{name}' is for Box actions, and these are Discrete")


def _eval_actor(
    algorithm: CQL | DiscreteCQL, device: torch.device, sampling: torch.Generator | None
) -> Actor:
    if isinstance(algorithm, DiscreteCQL):  # its policy is greedy, and there is no exploration
        network: Any = algorithm.module
        return EvaluationActor(network, device)
    return continuous.eval_actor(algorithm, device, sampling)


SPEC = AlgorithmSpec(
    name="cql",
    config=CQLConfig,
    build=build_cql,
    actor=continuous.no_actor,
    eval_actor=_eval_actor,
    trainer=OfflineTrainer,
)


train_cql = train_function("cql")
