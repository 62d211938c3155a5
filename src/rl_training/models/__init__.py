from rl_training.models.mlp_actor_critic import MLPActorCritic

__all__ = ["MLPActorCritic"]
