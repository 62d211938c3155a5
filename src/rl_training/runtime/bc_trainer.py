"""Behavioural cloning on the shared runtime."""

from __future__ import annotations

import torch

from rl_training.algorithms.bc import BC, BCConfig, BCModel
from rl_training.config import TrainConfig
from rl_training.models.action_heads import CategoricalHead, ReplayHead, TanhHead
from rl_training.models.building import build_actor
from rl_training.runtime.continuous import eval_actor, no_actor
from rl_training.runtime.offline import OfflineTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_bc(
    config: TrainConfig[BCConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
) -> BC:
    """BC and its network, at the start of the config's random streams."""
    head: ReplayHead = TanhHead(action_spec.shape, 0.0)
    if action_spec.kind == "discrete":
        head = CategoricalHead(action_spec.nvec, ())
    model = BCModel(build_actor(config, obs_spec, head)).to(device)
    return BC(model, config.algo_kwargs, **learner_arguments(config))


SPEC = AlgorithmSpec(
    name="bc",
    config=BCConfig,
    build=build_bc,
    actor=no_actor,
    eval_actor=eval_actor,
    trainer=OfflineTrainer,
)


train_bc = train_function("bc")
