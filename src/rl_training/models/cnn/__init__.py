from rl_training.models.cnn.columns import ColumnGameNetwork
from rl_training.models.cnn.nature import NatureCNN

__all__ = ["ColumnGameNetwork", "NatureCNN"]
