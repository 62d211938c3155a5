"""Reading checkpoints, under the name it had before it moved to `rl_training.runtime.stored`."""

from rl_training.runtime.stored import config_from_state, load_model_weights, load_state

__all__ = ["config_from_state", "load_model_weights", "load_state"]
