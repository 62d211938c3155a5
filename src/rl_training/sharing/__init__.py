"""Policies as folders to share: weights, config, spaces and a model card."""
