"""Explanations for what users of other libraries write first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from rl_training.config import TrainConfig, preset_names
from rl_training.errors import ConfigError, did_you_mean
from rl_training.types import ACTION_MASK, ObsSpec

_POLICY_NAME = re.compile(r"(Mlp|Cnn|MultiInput)(Lstm)?Policy")
"""Policies of Stable-Baselines3, named as the first argument there."""

_ARGUMENTS = {
    "learn": {
        "callback": "use callbacks=...",
        "reset_num_timesteps": "a second learn continues the run; a new object starts a new run",
        "progress_bar": "use the setting progress",
        "log_interval": "use the setting log_interval_steps",
        "tb_log_name": "use the setting output_dir, or run_dir=... here",
        "timesteps": "use total_timesteps=...",
        "eval_env": "use env_fn and the settings eval_interval and eval_episodes",
        "env": "use env_fn=...",
    },
    "evaluate": {
        "n_eval_episodes": "use num_episodes=...",
        "env": "use env_fn=...",
        "episodes": "use num_episodes=...",
    },
    "export": {
        "path": "use folder=...",
        "opset_version": "it is torch's default",
        "deterministic": "use stochastic=True to sample",
    },
    "load": {
        "env": "use env_fn=...",
        "custom_objects": "nothing is pickled: settings of the run are stored with it",
        "print_system_info": "run 'rl-training doctor'",
    },
}
"""Arguments of methods elsewhere, and what to use here."""

_ATTRIBUTES = {
    "get_env": "environments belong to a run: use env_info for their spaces",
    "set_env": "use learn(n, env_fn=...) or evaluate(n, env_fn=...)",
    "env": "environments belong to a run: use env_info for their spaces",
    "num_timesteps": "use result.metrics['global_step']",
    "logger": "use trainer.log(name, value) in a callback",
    "get_parameters": "use policy.module.state_dict()",
    "set_parameters": "use policy.module.load_state_dict(...), or the setting init_from",
    "save_replay_buffer": "a run folder contains the replay buffer",
    "load_replay_buffer": "a run folder contains the replay buffer",
    "get_vec_normalize_env": "use normalize_obs: the statistics are part of the network",
    "observation_space": "use env_info.obs_spec",
    "action_space": "use env_info.action_spec",
    "device": "use policy.device",
    "train": "use learn",
    "fit": "use learn",
}
"""Attributes of models elsewhere, and what to use here."""


def check_arguments(name: str, env: Any, others: tuple[Any, ...], env_fn: Any) -> None:
    """Refuse arguments of the class ``name`` that it does not take, with what to write instead."""
    if isinstance(env, str) and _POLICY_NAME.fullmatch(env):
        raise ConfigError(
            f"{name} has no policy argument: the networks follow from the spaces of the"
            f" environment. Write {name}(env), and settings by name"
        )
    if others:
        raise ConfigError(
            f"{name} takes one argument without a name, the environment; give settings by name,"
            f' for example {name}("CartPole-v1", num_envs=8)'
        )
    if isinstance(env, str) and env in preset_names():
        raise ConfigError(f"{env!r} is a preset: write {name}(config_from_file({env!r}))")
    if env is None or isinstance(env, TrainConfig):
        return
    if isinstance(env, gym.vector.VectorEnv):
        raise ConfigError(
            f"a vector environment cannot be given: the run makes its own, as in"
            f' {name}("CartPole-v1", num_envs=8), {name}(env_fn=MyEnv, num_envs=8) or'
            f" {name}(vector_fn=lambda num_envs: ..., num_envs=8)"
        )
    if not isinstance(env, (str, gym.Env)) and not callable(env):
        raise ConfigError(
            f"{name} takes the id of an environment, an environment, a function that makes one"
            f" (env_fn) or a TrainConfig; got {env!r:.80}"
        )
    if env_fn is not None:
        raise ConfigError(
            "an environment and env_fn, vector_fn or device_env_fn were given: give one of them;"
            " env_id='MyName' names the run of a function"
        )


def refuse_unknown(method: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a method does not have, with what to use instead."""
    for name in given:
        hint = _ARGUMENTS[method].get(name)
        end = f": {hint}" if hint else "; settings belong to the constructor"
        raise ConfigError(f"{method} has no argument {name!r}{end}")


def missing_attribute(owner: str, name: str) -> str:
    """Return the message for an attribute that a managed class does not have."""
    text = f"{owner!r} object has no attribute {name!r}"
    if name in _ATTRIBUTES:
        return f"{text}: {_ATTRIBUTES[name]}"
    known = ("act", "config", "env_info", "evaluate", "export", "learn", "load", "policy")
    near = did_you_mean(name, (*known, "predict", "result", "run_dir", "save", "share"))
    return text + ("." + near if "Did you mean" in near else "")


def with_masks(obs_spec: ObsSpec, obs: Any, masks: Any) -> Any:
    """Return an observation with action masks that were given apart from it."""
    if (
        isinstance(obs, tuple)
        and len(obs) == 2
        and isinstance(obs[1], dict)
        and "" in obs_spec.leaves
    ):
        raise ConfigError(
            "the observation is a pair (observation, info), as reset returns it: pass the"
            " observation alone"
        )
    wrapped = set(obs_spec.leaves) == {"observation", ACTION_MASK}
    if masks is None:
        if wrapped and not isinstance(obs, dict):
            raise ConfigError("this policy needs the legal actions: predict(obs, action_masks=...)")
        return obs
    if not obs_spec.has_mask:
        raise ConfigError("action_masks were given, but the policy was trained without them")
    if isinstance(obs, dict):
        return {**obs, ACTION_MASK: masks}
    return {"observation": obs, ACTION_MASK: masks}
