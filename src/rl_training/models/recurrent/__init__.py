from rl_training.models.recurrent.lstm_actor_critic import LSTMActorCritic
from rl_training.models.recurrent.lstm_ppg import LSTMPPGModel
from rl_training.models.recurrent.lstm_q_network import LSTMQNetwork

__all__ = ["LSTMActorCritic", "LSTMPPGModel", "LSTMQNetwork"]
