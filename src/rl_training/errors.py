"""Errors a user can act on. A ``UserError`` is a mistake in the request, not a failure of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend; the command line prints it in one line and exits with 2."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, hostile, or does not fit the request."""


class WorkerError(RuntimeError):
    """An environment worker raised, hung or died; the message holds its traceback."""


class EnvironmentFailure(RuntimeError):  # noqa: N818 - 'EnvironmentError' is taken
    """An environment broke its own rules."""


class StorageError(RuntimeError):
    """A file of a run could not be written: the disk is full, read-only or forbidden."""


class Paused(Exception):  # noqa: N818 - it reports no error
    """Work was left before its end because a stop was requested; it starts again when resumed."""


class NonFiniteError(RuntimeError):
    """A NaN or infinity turned up; the message names the tensor, the step and the environment."""


_OTHER_NAMES = {
    "lr": ("learning_rate",),
    "env": ("env_id",),
    "env_name": ("env_id",),
    "n_envs": ("num_envs",),
    "n_steps": ("num_steps", "n_step"),
    "n_epochs": ("update_epochs",),
    "clip_range": ("clip_coef",),
    "clip_range_vf": ("clip_vloss",),
    "normalize_advantage": ("norm_adv",),
    "net_arch": ("hidden_sizes",),
    "policy_kwargs": ("hidden_sizes",),
    "activation_fn": ("activation",),
    "max_steps": ("total_timesteps",),
    "timesteps": ("total_timesteps",),
    "total_steps": ("total_timesteps",),
    "tensorboard_log": ("tensorboard",),
    "verbose": ("progress",),
    "action_noise": ("exploration_noise",),
    "policy_freq": ("policy_delay",),
    "alpha": ("ent_coef", "priority_alpha"),
    "autotune": ("ent_coef",),
    "start_e": ("exploration_initial_eps",),
    "end_e": ("exploration_final_eps",),
    "target_network_frequency": (
        "target_update_interval_steps",
        "target_update_interval_updates",
    ),
}
"""What settings are called in Stable-Baselines3, CleanRL and elsewhere, and here."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for a near miss, else the list of what is known.

    The name that a setting has in other libraries is a near miss, too.
    """
    options = sorted(known)
    elsewhere = [other for other in _OTHER_NAMES.get(name, ()) if other in options]
    close = elsewhere or difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(options)}." if options else ""
