"""TD3+BC on the shared runtime."""

from __future__ import annotations

import torch

from rl_training.algorithms.td3_bc import TD3BC, TD3BCConfig
from rl_training.config import TrainConfig
from rl_training.models.action_heads import TanhHead
from rl_training.models.building import build_actor_critics
from rl_training.runtime.continuous import eval_actor, no_actor
from rl_training.runtime.offline import OfflineTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_td3_bc(
    config: TrainConfig[TD3BCConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
) -> TD3BC:
    """TD3+BC and its networks, at the start of the config's random streams."""
    head = TanhHead(action_spec.shape, 0.0)
    model = build_actor_critics(config, obs_spec, action_spec, head).to(device)
    return TD3BC(model, config.algo_kwargs, **learner_arguments(config))


SPEC = AlgorithmSpec(
    name="td3_bc",
    config=TD3BCConfig,
    build=build_td3_bc,
    actor=no_actor,
    eval_actor=eval_actor,
    trainer=OfflineTrainer,
)


train_td3_bc = train_function("td3_bc")
