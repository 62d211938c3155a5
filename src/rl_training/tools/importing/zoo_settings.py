"""Hyperparameters of RL Baselines3 Zoo as settings of this package.

What an entry leaves out has the default of Stable-Baselines3 there, and is written out here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_training.config import algo_config_type
from rl_training.errors import ConfigError
from rl_training.tools.importing.literals import parse_literal
from rl_training.tools.importing.zoo_defaults import DEFAULTS
from rl_training.tools.importing.zoo_networks import network_settings

_SAME = (
    *("gamma", "gae_lambda", "ent_coef", "max_grad_norm", "target_kl", "buffer_size", "tau"),
    *("batch_size", "learning_starts", "gradient_steps", "policy_delay", "target_policy_noise"),
    *("target_noise_clip", "exploration_fraction", "exploration_initial_eps"),
    "exploration_final_eps",
)
"""Hyperparameters with the same name and meaning."""
_RENAMED = {"n_steps": "num_steps", "n_epochs": "update_epochs", "normalize_advantage": "norm_adv"}
_WITHOUT_EFFECT = {"policy", "seed", "device", "verbose", "optimize_memory_usage", "monitor_kwargs"}
"""Settings that follow from the spaces here, or do not concern what is learnt."""
_ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
_ATARI_NAMES = {
    "noop_max": "noop_max",
    "frame_skip": "frame_skip",
    "screen_size": "screen_size",
    "terminal_on_life_loss": "terminal_on_life_loss",
    "clip_reward": "clip_rewards",
    "action_repeat_probability": "sticky_actions",
}
_GYMNASIUM = "gymnasium.wrappers."
_FRAME_STACK = "gymnasium.wrappers:FrameStackObservation"
_EPSILON = 1e-8


@dataclasses.dataclass(frozen=True)
class Translated:
    """Settings of a run, and what could not be translated."""

    settings: dict[str, Any]
    missing: dict[str, str]
    """Hyperparameters without a counterpart, with the reason."""
    notes: tuple[str, ...]
    """What is close to the original and not equal to it."""


def translate(entry: Mapping[str, Any], algo: str, env_id: str) -> Translated:
    """Return the settings of an entry of RL Baselines3 Zoo.

    Raises:
        ConfigError: A value has the wrong form.
    """
    return _Translation(entry, algo, env_id).run()


class _Translation:
    """The state of one translation: what is left of the entry, and what it became."""

    def __init__(self, entry: Mapping[str, Any], algo: str, env_id: str) -> None:
        self._algo = algo
        self._left: dict[str, Any] = {**DEFAULTS[algo], **entry}
        self._has_images = entry.get("policy") == "CnnPolicy"
        self._settings: dict[str, Any] = {"algo": algo, "env_id": env_id}
        self._knobs: dict[str, Any] = {}
        self._missing: dict[str, str] = {}
        self._notes: list[str] = []

    def run(self) -> Translated:
        """Translate everything."""
        self._environment()
        self._normalization()
        self._rates()
        if self._algo in ("ppo", "a2c"):
            self._on_policy()
        else:
            self._off_policy()
        networks = network_settings(
            self._take("policy_kwargs") or {},
            self._algo,
            has_images=self._has_images,
            uses_sde=bool(self._left.get("use_sde")),
        )
        self._knobs |= networks.knobs
        self._missing |= networks.missing
        self._notes += networks.notes
        known = {field.name for field in dataclasses.fields(algo_config_type(self._algo))}
        for name, ours in {**dict(zip(_SAME, _SAME, strict=True)), **_RENAMED}.items():
            if name in self._left and ours in known:
                self._knobs[ours] = self._take(name)
        for name, value in self._left.items():
            is_unset = value is None or value is False or value == [] or value == {}
            if name not in _WITHOUT_EFFECT and not is_unset:
                self._missing[name] = "no counterpart"
        settings = {**self._settings, "algo_kwargs": self._knobs}
        return Translated(settings, self._missing, tuple(self._notes))

    # -- values ------------------------------------------------------------------------------------

    def _take(self, name: str, default: Any = None) -> Any:
        """Return a value and leave it out of what is left; texts of expressions are parsed."""
        value = self._left.pop(name, default)
        if isinstance(value, str) and value.strip()[:1] in ("{", "[", "("):
            return parse_literal(value, name)
        if isinstance(value, str) and value.strip().startswith("dict("):
            return parse_literal(value, name)
        return value

    def _number(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name}: {value!r} is not a number")
        return value

    def _count(self, name: str, default: int) -> int:
        value = self._number(name, self._take(name, default))
        if value != int(value) or value < 1:
            raise ConfigError(f"{name}: {value!r} is not a whole number of at least 1")
        return int(value)

    def _schedule(self, name: str) -> tuple[float, bool]:
        """Return the number of a schedule, and whether it decreases linearly to 0 (``lin_1``)."""
        value = self._take(name)
        is_linear = isinstance(value, str) and value.startswith("lin_")
        if isinstance(value, str):
            try:
                value = float(value.removeprefix("lin_"))
            except ValueError:
                raise ConfigError(f"{name}: {value!r} is neither a number nor lin_NUMBER") from None
        return float(self._number(name, value)), is_linear

    # -- parts -------------------------------------------------------------------------------------

    def _environment(self) -> None:
        self._num_envs = self._count("n_envs", 1)
        self._settings["num_envs"] = self._num_envs
        if "n_timesteps" in self._left:
            self._settings["total_timesteps"] = self._count("n_timesteps", 1)
        if isinstance(kwargs := self._take("env_kwargs"), Mapping) and kwargs:
            self._settings["env_kwargs"] = dict(kwargs)
        elif kwargs:
            self._missing["env_kwargs"] = "not a mapping"
        stack = self._count("frame_stack", 1)
        given = self._take("env_wrapper") or []
        wrappers: list[Any] = []
        for one in given if isinstance(given, list) else [given]:
            self._wrapper(one, wrappers)
        if self._settings.get("preprocessing") == "atari":
            self._settings["atari"]["frame_stack"] = stack
        elif stack > 1:
            kwargs = {"stack_size": stack, "padding_type": "zero"}
            wrappers.append({"path": _FRAME_STACK, "kwargs": kwargs})
        if wrappers:
            self._settings["wrappers"] = wrappers

    def _wrapper(self, given: Any, wrappers: list[Any]) -> None:
        if isinstance(given, Mapping) and len(given) == 1:
            ((path, kwargs),) = given.items()
        else:
            path, kwargs = given, None
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(path, str) or not isinstance(kwargs, Mapping):
            raise ConfigError(f"env_wrapper: {given!r} is no name of a class")
        if path == _ATARI_WRAPPER:
            unknown = kwargs.keys() - _ATARI_NAMES.keys()
            if unknown:
                raise ConfigError(f"env_wrapper: AtariWrapper has no {min(unknown)!r}")
            named = {_ATARI_NAMES[name]: value for name, value in kwargs.items()}
            self._settings |= {"preprocessing": "atari", "atari": named}
            self._has_images = True
        elif path.startswith(_GYMNASIUM):  # re-exported from the package
            place = f"{_GYMNASIUM.rstrip('.')}:{path.rpartition('.')[2]}"
            wrappers.append({"path": place, "kwargs": dict(kwargs)})
        else:
            module, _, name = path.rpartition(".")
            self._missing[f"env_wrapper {path}"] = (
                f"add '{module}:{name}' to wrappers if it works without Stable-Baselines3"
            )

    def _normalization(self) -> None:
        given = self._take("normalize")
        more = self._take("normalize_kwargs") or {}
        if not given:
            return
        options = {**(given if isinstance(given, Mapping) else {}), **more}
        if given is not True and not isinstance(given, Mapping):
            raise ConfigError(f"normalize: {given!r} is neither true nor a mapping")
        self._settings["normalize_obs"] = options.pop("norm_obs", True)
        norm_reward = options.pop("norm_reward", True)
        if norm_reward and self._algo not in ("ppo", "a2c"):
            self._missing["normalize: norm_reward"] = (
                "stored rewards would keep old scales; only PPO and A2C normalise them here"
            )
        else:
            self._settings["normalize_reward"] = norm_reward
        for name in ("clip_obs", "clip_reward"):
            if name in options:
                self._settings[name] = options.pop(name)
        if options.pop("gamma", self._left["gamma"]) != self._left["gamma"]:
            self._missing["normalize: gamma"] = "it is that of the algorithm"
        if options.pop("epsilon", _EPSILON) != _EPSILON:
            self._missing["normalize: epsilon"] = f"it is always {_EPSILON}"
        for name in options:
            self._missing[f"normalize: {name}"] = "no counterpart"

    def _rates(self) -> None:
        self._knobs["learning_rate"], is_linear = self._schedule("learning_rate")
        self._knobs["lr_schedule"] = "linear" if is_linear else "constant"

    def _on_policy(self) -> None:
        # The value loss there is the mean squared error, here half of it.
        vf_coef = self._number("vf_coef", self._take("vf_coef"))
        self._knobs["vf_coef"] = 2 * vf_coef
        if self._algo == "ppo":
            self._clipping()
            self._minibatches()
        elif self._take("use_rms_prop", True) is not True:
            self._knobs |= {"optimizer": "adam", "optimizer_betas": [0.9, 0.999]}
        if "rms_prop_eps" in self._left:
            self._knobs["optimizer_eps"] = self._number("rms_prop_eps", self._take("rms_prop_eps"))

    def _clipping(self) -> None:
        given = self._left["clip_range"]
        self._knobs["clip_coef"], self._knobs["anneal_clip"] = self._schedule("clip_range")
        of_values = self._left.get("clip_range_vf")
        if of_values is None or of_values == given:
            self._left.pop("clip_range_vf", None)
            self._knobs["clip_vloss"] = of_values is not None

    def _minibatches(self) -> None:
        rows = self._num_envs * self._count("n_steps", 1)
        self._knobs["num_steps"] = rows // self._num_envs
        size = self._count("batch_size", 1)
        wanted = -(-rows // size)
        fitting = next(n for n in range(max(1, wanted), 0, -1) if rows % n == 0 and n < rows)
        if rows % size or fitting != wanted:
            self._notes.append(
                f"batch_size {size} does not divide the rollout of {rows:,} transitions:"
                f" minibatches have {rows // fitting} here"
            )
        self._knobs["num_minibatches"] = fitting

    def _off_policy(self) -> None:
        freq = self._take("train_freq")
        if isinstance(freq, list) and len(freq) == 2 and freq[1] == "step":
            freq = freq[0]
        if isinstance(freq, (list, str)):
            self._missing["train_freq"] = f"{freq!r}: only numbers of steps"
        else:  # calls of VecEnv.step there, transitions here
            self._knobs["train_freq"] = int(self._number("train_freq", freq)) * self._num_envs
        if "n_steps" in self._left:
            self._knobs["n_step"] = self._take("n_steps")
        if self._algo == "dqn":
            interval = self._take("target_update_interval")
            self._knobs["target_update_interval_steps"] = interval
        if self._algo == "sac":
            self._knobs["target_update_interval_updates"] = self._take("target_update_interval")
            self._temperature()
        kind, deviation = self._take("noise_type"), self._take("noise_std", 0.1)
        if self._algo == "td3" and kind in (None, "normal"):
            self._knobs["exploration_noise"] = 0.0 if kind is None else deviation
        elif kind is not None:
            self._missing["noise_type"] = f"{kind!r}: only 'normal', for TD3"

    def _temperature(self) -> None:
        given = self._take("ent_coef")
        if isinstance(given, str) and given.startswith("auto"):
            try:
                initial = float(given.removeprefix("auto").removeprefix("_") or 1.0)
            except ValueError:
                raise ConfigError(f"ent_coef: {given!r} is neither a number nor auto") from None
            self._knobs["ent_coef_init"] = initial
        else:
            self._knobs["ent_coef"] = self._number("ent_coef", given)
        if (target := self._take("target_entropy", "auto")) != "auto":
            self._knobs["target_entropy"] = self._number("target_entropy", target)
