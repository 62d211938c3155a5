from rl_training.envs.adapter import VectorAdapter
from rl_training.envs.factory import EnvFn, make_env, make_vector_env
from rl_training.envs.halves import Adapter, HalvedAdapter, make_adapter

__all__ = [
    "Adapter",
    "EnvFn",
    "HalvedAdapter",
    "VectorAdapter",
    "make_adapter",
    "make_env",
    "make_vector_env",
]
