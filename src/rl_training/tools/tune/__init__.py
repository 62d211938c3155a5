"""Hyperparameter tuning: studies whose trials are ordinary runs."""
