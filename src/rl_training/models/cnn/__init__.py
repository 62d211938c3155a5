from rl_training.models.cnn.nature import NatureCNN

__all__ = ["NatureCNN"]
