"""Datasets of recorded episodes, in Minari's format: reading and writing them. No torch."""

from rl_training.datasets.reading import Dataset, RecordedEpisode, open_dataset
from rl_training.datasets.writing import Destination, Recorded, find_destination, write_dataset

__all__ = [
    "Dataset",
    "Destination",
    "Recorded",
    "RecordedEpisode",
    "find_destination",
    "open_dataset",
    "write_dataset",
]
