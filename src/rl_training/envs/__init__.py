from rl_training.envs.adapter import VectorAdapter
from rl_training.envs.factory import EnvFn, make_env, make_vector_env
from rl_training.envs.halves import (
    Adapter,
    HalvedAdapter,
    PlainAdapter,
    make_adapter,
    plain_adapter,
)
from rl_training.envs.team_adapter import TeamAdapter

__all__ = [
    "Adapter",
    "EnvFn",
    "HalvedAdapter",
    "PlainAdapter",
    "TeamAdapter",
    "VectorAdapter",
    "make_adapter",
    "make_env",
    "make_vector_env",
    "plain_adapter",
]
