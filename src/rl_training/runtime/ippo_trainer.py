"""IPPO on the shared runtime."""

from __future__ import annotations

import dataclasses

from rl_training.algorithms.ippo import IPPOConfig
from rl_training.runtime.ppo_trainer import SPEC as PPO_SPEC
from rl_training.runtime.ppo_trainer import build_ppo
from rl_training.runtime.setup import train_function
from rl_training.runtime.teams import team_spec_of

_PPO = dataclasses.replace(PPO_SPEC, name="ippo", config=IPPOConfig)
SPEC = team_spec_of(_PPO, build_ppo)


train_ippo = train_function("ippo")
