from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_ppg import MLPPPGModel
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.recurrent import LSTMActorCritic, LSTMQNetwork

__all__ = ["LSTMActorCritic", "LSTMQNetwork", "MLPActorCritic", "MLPPPGModel", "MLPQNetwork"]
