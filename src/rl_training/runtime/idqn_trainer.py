"""Independent DQN on the shared runtime."""

from __future__ import annotations

import dataclasses

from rl_training.algorithms.grouped import GroupedReplayLearner
from rl_training.algorithms.idqn import IDQNConfig
from rl_training.runtime.dqn_trainer import SPEC as DQN_SPEC
from rl_training.runtime.dqn_trainer import build_dqn
from rl_training.runtime.setup import train_function
from rl_training.runtime.team_replays import AgentReplayTrainer
from rl_training.runtime.teams import team_spec_of

SPEC = team_spec_of(
    dataclasses.replace(DQN_SPEC, name="idqn", config=IDQNConfig),
    build_dqn,
    trainer=AgentReplayTrainer,
    grouped=GroupedReplayLearner,
)


train_idqn = train_function("idqn")
