"""Errors that a user can act on. A ``UserError`` is an error in the request, not a failed run."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable


class UserError(Exception):
    """An error in the request that the user can fix; the command line then exits with 2."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, hostile, or does not fit the request."""


class WorkerError(RuntimeError):
    """An environment worker raised, hung or died; the message holds its traceback."""


class LostWorkerError(WorkerError):
    """Every worker that was started for a shard failed; what was trained so far is whole."""


class EnvironmentFailure(RuntimeError):  # noqa: N818 - 'EnvironmentError' is taken
    """An environment violated the Gymnasium API or raised an error."""


class StorageError(RuntimeError):
    """A file of a run could not be written: the disk is full, read-only or forbidden."""


class ParityError(RuntimeError):
    """An exported policy does not choose the actions of `predict`; nothing of it is kept."""


class RankFailure(RuntimeError):  # noqa: N818 - it reports the failure of another process
    """Another process of a run under torchrun failed or was lost; the message names it."""

    shown_elsewhere: bool | None = None
    """Whether that process prints the message; None: not decided."""


class Paused(Exception):  # noqa: N818 - it reports no error
    """Work was left before its end because a stop was requested; it starts again when resumed."""


class NonFiniteError(RuntimeError):
    """A NaN or infinity turned up; the message names the tensor, the step and the environment."""


_OTHER_NAMES = {
    "lr": ("learning_rate",),
    "learn_rate": ("learning_rate",),
    "step_size": ("learning_rate",),
    "env": ("env_id",),
    "env_name": ("env_id",),
    "environment": ("env_id",),
    "n_envs": ("num_envs",),
    "n_steps": ("num_steps", "n_step"),
    "rollout_length": ("num_steps",),
    "n_epochs": ("update_epochs",),
    "n_minibatches": ("num_minibatches",),
    "batch_size": ("num_minibatches", "batch_sequences"),
    "minibatch_size": ("num_minibatches", "batch_size"),
    "clip_range": ("clip_coef",),
    "clip_range_vf": ("clip_vloss",),
    "clip_ratio": ("clip_coef",),
    "normalize_advantage": ("norm_adv",),
    "net_arch": ("hidden_sizes",),
    "features_extractor_class": ("encoder",),
    "features_extractor_kwargs": ("encoder_kwargs",),
    "activation_fn": ("activation",),
    "lam": ("gae_lambda", "temperature", "q_lambda"),
    "entropy_coef": ("ent_coef",),
    "discount": ("gamma",),
    "max_steps": ("total_timesteps",),
    "steps": ("total_timesteps",),
    "timesteps": ("total_timesteps",),
    "total_steps": ("total_timesteps",),
    "n_timesteps": ("total_timesteps",),
    "n_updates": ("total_updates",),
    "n_gradient_steps": ("total_updates",),
    "n_critics": ("num_critics",),
    "n_action_samples": ("num_action_samples",),
    "weight_temp": ("inverse_temperature",),
    "alpha_threshold": ("conservative_threshold",),
    "update_actor_interval": ("policy_delay",),
    "target_smoothing_sigma": ("target_policy_noise",),
    "target_smoothing_clip": ("target_noise_clip",),
    "critic_learning_rate": ("learning_rate",),
    "observation_scaler": ("normalize_obs",),
    "n_eval_episodes": ("eval_episodes",),
    "eval_freq": ("eval_interval",),
    "save_freq": ("checkpoint_interval",),
    "replay_size": ("buffer_size",),
    "memory_size": ("buffer_size",),
    "polyak": ("tau",),
    "verbose": ("progress",),
    "track": ("wandb",),
    "wandb_project_name": ("wandb_project",),
    "log_dir": ("output_dir",),
    "cuda": ("device",),
    "action_noise": ("exploration_noise",),
    "policy_freq": ("policy_delay",),
    "alpha": ("conservative_weight", "ent_coef", "priority_alpha"),
    "autotune": ("ent_coef",),
    "start_e": ("exploration_initial_eps",),
    "end_e": ("exploration_final_eps",),
    "target_network_frequency": (
        "target_update_interval_steps",
        "target_update_interval_updates",
    ),
}
"""What settings are called in Stable-Baselines3, CleanRL and elsewhere, and here."""

_OTHER_ALGORITHMS = {
    "a3c": "a2c",
    "acktr": "a2c",
    "vpg": "a2c",
    "ppo1": "ppo",
    "ppo2": "ppo",
    "trpo": "ppo",
    "maskable_ppo": "ppo",
    "ppo_lstm": "recurrent_ppo",
    "lstm_ppo": "recurrent_ppo",
    "ppo_recurrent": "recurrent_ppo",
    "rppo": "recurrent_ppo",
    "ddqn": "dqn",
    "double_dqn": "dqn",
    "dueling_dqn": "dqn",
    "rainbow": "dqn",
    "c51": "dqn",
    "qrdqn": "dqn",
    "qr_dqn": "dqn",
    "r2d2": "drqn",
    "ddpg": "td3",
    "tqc": "sac",
    "sacd": "sac_discrete",
    "sac_d": "sac_discrete",
    "sac_atari": "sac_discrete",
    "discrete_sac": "sac_discrete",
    "td3+bc": "td3_bc",
    "td3bc": "td3_bc",
    "td3plusbc": "td3_bc",
    "td3_plus_bc": "td3_bc",
    "behavior_cloning": "bc",
    "behavioral_cloning": "bc",
    "behaviour_cloning": "bc",
    "bcq": "td3_bc",
    "cal_ql": "cql",
    "crr": "awac",
    "awr": "awac",
}
"""Algorithms that are not included, and the nearest one that is."""

_NOT_HERE = {
    "batch_size": "Use num_minibatches: a rollout is split into so many minibatches of"
    " num_envs * num_steps / num_minibatches transitions",
    "tensorboard_log": "TensorBoard is on by default, in the run folder; output_dir sets where",
    "policy_kwargs": "Use hidden_sizes, critic_hidden_sizes, activation, encoder or network",
    "policy": "There is no policy argument: the networks follow from the spaces",
    "preset": "In Python a preset is a config: PPO(config_from_file('ppo/cartpole'))",
    "use_sde": "State-dependent exploration is not available",
    "replay_buffer_class": "There is one replay buffer; hindsight replay is not available",
    "optimizer_class": "Use optimizer: adam, adamw, rmsprop or radam",
    "optimizer_kwargs": "Use optimizer_betas, optimizer_eps and weight_decay",
    "monitor_wrapper": "Returns and lengths of episodes are always logged",
    "callback": "Callbacks are an argument of learn: learn(n, callbacks=...)",
    "render_mode": "Use env_kwargs={'render_mode': ...}, or the commands record and play",
}
"""Settings of other libraries without a counterpart of the same kind."""
_MOST_LISTED = 30
"""A longer list of known names is left out of a message."""

_MIN_SIMILARITY = 0.72
_SHORT_NAME = 4
"""Up to this length a name is suggested only if it alone is one typing mistake away."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant: a near miss, its start, or another library's name.

    Case is ignored, and dashes equal underscores. None where nothing known is near enough.
    """
    options = {_normalised(option): option for option in known}
    given = _normalised(name)
    if given in options:
        return options[given]
    elsewhere = (*_OTHER_NAMES.get(given, ()), _OTHER_ALGORITHMS.get(given, ""))
    for other in elsewhere:
        if other in options:
            return options[other]
    starts = [option for option in options if option.startswith(f"{given}_")]
    if len(starts) == 1:
        return options[starts[0]]
    if len(given) <= _SHORT_NAME:
        close = [option for option in options if is_one_mistake(given, option)]
        return options[close[0]] if len(close) == 1 else None
    close = difflib.get_close_matches(given, sorted(options), n=1, cutoff=_MIN_SIMILARITY)
    return options[close[0]] if close else None


def is_name_elsewhere(name: str) -> bool:
    """Return whether another library has a setting of this name that is called otherwise here."""
    return _normalised(name) in _OTHER_NAMES


def _normalised(name: str) -> str:
    return name.lower().replace("-", "_")


def is_one_mistake(one: str, other: str) -> bool:
    """Return whether a letter added, left out or replaced, or two exchanged, make them equal."""
    pairs = zip(one, other, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest, other_rest = one[shared:], other[shared:]
    return rest != other_rest and (
        rest[1:] == other_rest[1:]
        or rest[1:] == other_rest
        or rest == other_rest[1:]
        or (rest[:2] == other_rest[:2][::-1] and rest[2:] == other_rest[2:])
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for a near miss, else the list of what is known."""
    options = sorted(known)
    if hint := _NOT_HERE.get(_normalised(name)):
        return f" {hint}."
    if near := nearest_name(name, options):
        return f" Did you mean {near!r}?"
    if len(options) > _MOST_LISTED:
        return ""
    return f" Known: {', '.join(options)}." if options else ""


def did_you_mean_flag(flag: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean --x?"`` for a flag that is unknown, or nothing.

    ``known`` are the flags with or without their dashes; of ``--algo-kwargs.learning-rate`` the
    part after the last dot is compared.
    """
    names = {option.lstrip("-").rpartition(".")[2]: option.lstrip("-") for option in known}
    wanted = flag.lstrip("-").partition("=")[0].rpartition(".")[2]
    near = nearest_name(wanted, names)
    return f" Did you mean --{names[near]}?" if near else ""
