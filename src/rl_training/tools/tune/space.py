"""The search space of a study: declared ranges, or those of a YAML file, checked against a config.

A setting is declared as a `Range` or a `Choice` (`rl_training.search_space`), in YAML:

    learning_rate: {low: 1e-5, high: 1e-2, log: true}
    num_steps: [32, 64, 128]
    gamma: declared        # the range that the algorithm declares
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_training._internal.coerce import coerce, hidden_fields, to_plain
from rl_training._internal.field_docs import without_none
from rl_training._internal.yaml_io import dump_yaml, load_yaml_file
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, did_you_mean
from rl_training.search_space import RUN_SETTINGS, Choice, Range, declared_space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DECLARED = "declared"
"""Value in a YAML file for the range that the algorithm declares."""
_MAX_OPTIONS = 1000
_RANGE_KEYS = ("low", "high", "log")

Values: TypeAlias = Range | Choice


@dataclasses.dataclass(frozen=True)
class Space:
    """Settings to tune, each with the values to try, in the types of the settings."""

    values: Mapping[str, Values]
    whole: frozenset[str]
    """Settings that take whole numbers."""

    def to_plain(self) -> dict[str, Any]:
        """Return what a YAML file of this space contains."""
        return {name: _plain(values) for name, values in self.values.items()}

    def to_yaml(self) -> str:
        """Return a YAML file of this space."""
        return "".join(
            f"{name}: {_flow(values)}\n" for name, values in sorted(self.to_plain().items())
        )

    @property
    def combinations(self) -> int | None:
        """Number of different trials; None: a setting has a range of any numbers."""
        counts = []
        for name, values in self.values.items():
            if isinstance(values, Choice):
                counts.append(len(values.options))
            elif name in self.whole:
                counts.append(int(values.high) - int(values.low) + 1)
            else:
                return None
        return math.prod(counts)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the space as Optuna's distributions."""
        return {name: self._distribution(name, values) for name, values in self.values.items()}

    def _distribution(self, name: str, values: Values) -> BaseDistribution:
        from optuna import distributions

        if isinstance(values, Choice):
            return distributions.CategoricalDistribution(tuple(map(_label, values.options)))
        if name in self.whole:
            low, high = int(values.low), int(values.high)
            return distributions.IntDistribution(low, high, log=values.log)
        return distributions.FloatDistribution(values.low, values.high, log=values.log)

    def settings_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a trial's parameters describe.

        Raises:
            ConfigError: A parameter is missing, or is not within this space.
        """
        return {name: self._setting(name, params) for name in self.values}

    def _setting(self, name: str, params: Mapping[str, Any]) -> Any:
        values, found = self.values[name], params.get(name)
        if isinstance(values, Choice):
            by_label = {_label(option): option for option in values.options}
            if found in by_label:
                return by_label[found]
        elif isinstance(found, (int, float)) and values.low <= found <= values.high:
            return int(found) if name in self.whole else float(found)
        raise ConfigError(f"a trial has no value of {name!r} within the space of the study")

    def params_near(self, config: TrainConfig[Any]) -> dict[str, Any]:
        """Return parameters with a config's own values, clipped to the ranges of this space.

        A value that is not among the options of a choice is left out.
        """
        params: dict[str, Any] = {}
        for name, values in self.values.items():
            own = to_plain(_value(config, name))
            if isinstance(values, Choice):
                if _label(own) in map(_label, values.options):
                    params[name] = _label(own)
            elif isinstance(own, (int, float)):
                params[name] = min(max(own, values.low), values.high)
        return params


def declared(config: TrainConfig[Any]) -> Space:
    """Return the space that the algorithm of a config declares.

    Settings that the config refuses to change, whatever their value, are left out.
    """
    found = declared_space(type(config.algo_kwargs))
    if config.preprocessing == "atari":  # images are not standardised
        found.pop("normalize_obs", None)
    tunable = {
        name: values
        for name, values in found.items()
        if any(_is_accepted(config, name, value) for value in _examples(values))
    }
    return _checked(config, tunable)


def read_space(config: TrainConfig[Any], source: Mapping[str, Any] | str | Path) -> Space:
    """Return the space of a YAML file, or of a mapping with the content of one."""
    if isinstance(source, Mapping):
        return _from_mapping(config, source, "space")
    content = load_yaml_file(Path(source))
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must contain a mapping of settings to the values to try")
    try:
        return _from_mapping(config, content, str(source))
    except ConfigError as error:
        where = "" if str(source) in str(error) else f"{source}: "
        raise ConfigError(f"{where}{error}") from None


def _from_mapping(config: TrainConfig[Any], content: Mapping[str, Any], where: str) -> Space:
    if not content:
        raise ConfigError(f"{where} lists no setting to tune")
    known = tunable_settings(config)
    own = declared_space(type(config.algo_kwargs))
    found: dict[str, Values] = {}
    for name, given in content.items():
        if name not in known:
            fields = {field.name for field in dataclasses.fields(TrainConfig)}
            hint = did_you_mean(str(name), known)
            what = "cannot be tuned" if name in fields else "is no setting of"
            raise ConfigError(
                f"{name!r} {what}{'' if name in fields else f' {config.algo}'}.{hint}"
            )
        if given == DECLARED:
            if name not in own:
                raise ConfigError(f"{config.algo} declares no range of {name!r}: write one")
            found[name] = own[name]
        else:
            found[name] = _parsed(str(name), given)
    return _checked(config, found)


def tunable_settings(config: TrainConfig[Any]) -> list[str]:
    """Return the names that a space may contain."""
    kind = type(config.algo_kwargs)
    hidden = hidden_fields(kind)
    own = [field.name for field in dataclasses.fields(kind) if field.name not in hidden]
    return [*own, *RUN_SETTINGS]


def _parsed(name: str, given: Any) -> Values:
    if isinstance(given, (Range, Choice)):
        return given
    if isinstance(given, (list, tuple)):
        return Choice(tuple(given))
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{name!r} must be a list of values, {{low: ..., high: ..., log: true}}, or"
            f" '{DECLARED}'; got {given!r}"
        )
    for key in given:
        if key not in _RANGE_KEYS:
            raise ConfigError(f"unknown key '{name}.{key}'.{did_you_mean(str(key), _RANGE_KEYS)}")
    for key in ("low", "high"):
        if key not in given:
            raise ConfigError(f"{name!r} needs '{key}'")
    return Range(given["low"], given["high"], coerce(given.get("log", False), bool, f"{name}.log"))


def _checked(config: TrainConfig[Any], found: Mapping[str, Values]) -> Space:
    """Return a space of values that have the types of their settings."""
    hints = {
        **{name: _HINTS[name] for name in RUN_SETTINGS},
        **typing.get_type_hints(type(config.algo_kwargs)),
    }
    typed = {name: _typed(name, values, hints[name]) for name, values in found.items()}
    whole = {name for name in typed if without_none(hints[name]) is int}
    return Space(typed, frozenset(whole))


_HINTS = typing.get_type_hints(TrainConfig)


def _typed(name: str, values: Values, hint: Any) -> Values:
    if isinstance(values, Choice):
        options = tuple(
            to_plain(coerce(option, hint, f"{name}[{i}]"))
            for i, option in enumerate(values.options)
        )
        labels = list(map(_label, options))
        if not options or len(options) > _MAX_OPTIONS or len(set(labels)) < len(labels):
            raise ConfigError(f"{name!r} must be one value or more, all different")
        return Choice(options)
    kind = without_none(hint)
    if kind not in (int, float):
        raise ConfigError(f"{name!r} takes no range of numbers: list the values to try, [a, b]")
    low, high = (coerce(getattr(values, key), kind, f"{name}.{key}") for key in ("low", "high"))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"'{name}.low' must be below '{name}.high'; got {low} and {high}")
    if values.log and low <= 0:
        raise ConfigError(f"'{name}.low' must be above 0 with log: true; got {low}")
    return Range(low, high, values.log)


def _examples(values: Values) -> tuple[Any, ...]:
    return values.options if isinstance(values, Choice) else (values.low, values.high)


def _is_accepted(config: TrainConfig[Any], name: str, value: Any) -> bool:
    if to_plain(_value(config, name)) == to_plain(value):
        return False
    try:
        config.with_overrides(**{name: value})
    except ConfigError:
        return False
    return True


def _value(config: TrainConfig[Any], name: str) -> Any:
    return getattr(config if name in RUN_SETTINGS else config.algo_kwargs, name)


def _label(option: Any) -> Any:
    """Return a choice as Optuna stores it: plain numbers and texts, lists as JSON."""
    return (
        option if option is None or isinstance(option, (bool, int, float, str)) else _json(option)
    )


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(values: Values) -> Any:
    if isinstance(values, Choice):
        return list(values.options)
    plain: dict[str, Any] = {"low": values.low, "high": values.high}
    return {**plain, "log": True} if values.log else plain


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return dump_yaml(value).removesuffix("...\n").strip()
