"""``rl-training import-sb3`` and ``import-zoo``: models and settings of other libraries."""
