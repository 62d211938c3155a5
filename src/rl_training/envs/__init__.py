from rl_training.envs.adapter import VectorAdapter
from rl_training.envs.factory import EnvFn, make_env, make_vector_env

__all__ = ["EnvFn", "VectorAdapter", "make_env", "make_vector_env"]
