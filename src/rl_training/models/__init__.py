from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_q_network import MLPQNetwork

__all__ = ["MLPActorCritic", "MLPQNetwork"]
